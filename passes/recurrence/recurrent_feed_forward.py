"""A feed-forward plus a recurrence, and the wrapper of its layer, which gives the recurrence what it needs of the layer's call.

A layer's own code calls its feed-forward with the stream alone. `RecurrentLayer` adds the keyword `recurrence` to that call: the
padding that the layer's mask shows, the layer's cache, and the layout of the stream's tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrofit.passes.recurrence.simple_recurrent_unit import Recurrence
from retrofit.sdk import RetrofitError, Wrapper, argument_at, argument_place, map_first
from retrofit.sdk.anatomy import LayerCall
from retrofit.sdk.modules import (
    CacheWithHistories,
    TokenHistory,
    batch_first,
    cache_among,
    call_with_keywords,
    child_modules,
    histories_of,
    is_growing,
    staying_tokens,
    tensor_argument,
    unpadded_tokens,
    visible_keys,
)

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

KEYWORD = "recurrence"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the tokens that a feed-forward reads."""

    tokens_first: bool = False  # (tokens, batch, d), and not (batch, tokens, d)
    flat: bool = False  # batch and tokens in one dimension


class RecurrentFeedForward(Wrapper):
    """`layer(x) + recurrence(x)`.

    x is the argument `stream_in`. The sum replaces the item `stream_out` of the feed-forward's output: an index or a key, None for
    the output itself. With a cache the recurrence of a causal stack continues after the previous call: the cache stores its state,
    under the layer's name and the feed-forward's name in it.
    """

    stores_histories = True

    def __init__(
        self,
        layer: nn.Module,
        unit: Recurrence,
        name: str,
        layout: Layout,
        causal: bool,
        *,
        stream_in: int | str,
        stream_out: int | str | None,
    ) -> None:
        super().__init__(layer)
        self.recurrence, self.name_in_layer, self.layout, self.causal = unit, name, layout, causal
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, recurrence: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        x, call = argument_at(self.stream_in, args, kwargs), recurrence or {}
        output = self.layer(*args, **kwargs)
        added = self.added(x, call.get("real"), call.get("cache"), call.get("sizes"), str(call.get("layer", "")))
        return map_first(output, lambda y: y + added.to(y.dtype), self.stream_out)

    def added(self, x: Tensor, real: Tensor | None, cache: Cache | None, sizes: tuple[int, int] | None, layer: str) -> Tensor:
        """Return what the recurrence adds, of the shape of x."""
        stream = x.unflatten(0, sizes) if self.layout.flat and sizes is not None else x
        stream = batch_first(stream, self.layout.tokens_first)  # (batch, T, d)
        if cache is None or not self.causal:
            y, _ = self.recurrence(stream, None, real)
        else:
            if getattr(cache, "lacks_states", False):
                raise RetrofitError(
                    "a recurrence received a cache without its states",
                    why="it was filled by a compiled training step, which stores only keys and values",
                    remedy="call model.eval() before the prompt",
                    code="cache",
                )
            histories, name = histories_of(cache), f"{layer}.{self.name_in_layer}".strip(".")
            if name not in histories:
                y, c = self.recurrence(stream, None, real)
                histories[name] = TokenHistory.in_cache(cache, 1, c)
                histories[name].push(c)
            else:
                known = histories[name]
                for _ in range(known.rounds):
                    y, c = self.recurrence(stream, known.last()[:, 0], real, known.begins)
                    known.push(c)
        return batch_first(y, self.layout.tokens_first).reshape(x.shape)


class RecurrentLayer(Wrapper):
    """Calls `layer` so that its feed-forwards at `paths` receive the keyword `recurrence`.

    Its stream is the argument `stream_in`. A checkpointed layer passes on no cache: its second run, for the gradient, must not read
    the state that the first run stored. Neither does a compiled training step, in which a model creates a cache that nothing reads:
    compiled code cannot change the class of this cache to one that stores states.
    """

    def __init__(self, layer: nn.Module, call: LayerCall, paths: tuple[str, ...]) -> None:
        super().__init__(layer)
        self.name, self.paths, self.tokens_first = call.path, paths, call.tokens_first
        self.stream_in = argument_place(layer, call.stream_in)
        self.mask = None if call.mask is None else argument_place(layer, call.mask.key)
        self.true_hides = call.mask is not None and call.mask.true_hides

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = child_modules(self)["layer"]
        x = argument_at(self.stream_in, args, kwargs)
        checkpointed = bool(self.training and getattr(layer, "gradient_checkpointing", False))
        cache: Any = None if checkpointed else cache_among(args, kwargs)
        if self.training and torch.compiler.is_dynamo_compiling() and not isinstance(cache, (CacheWithHistories, type(None))):
            cache.lacks_states = True
            cache = None
        mask = tensor_argument(self.mask, args, kwargs)
        given = {
            "real": self.unpadded(x.transpose(0, 1) if self.tokens_first else x, mask, cache),
            "cache": cache,
            "sizes": tuple(x.shape[:2]),
            "layer": "" if cache is None else self.name,  # layers that differ only in a name that is not read are captured once
        }
        return call_with_keywords(layer, self.paths, {KEYWORD: given}, args, kwargs)

    def unpadded(self, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor | None:
        """Return which tokens of x are no padding, (batch or 1, tokens); None if nothing shows padding."""
        if cache is not None and (staying := staying_tokens(cache)) is not None:
            return staying
        is_fixed = cache is not None and not is_growing(cache)
        passed = self.count(x, cache) if is_fixed and self.mask is not None else None
        visible = None if mask is None else visible_keys(mask, x.shape[1], self.true_hides)
        return None if visible is None else unpadded_tokens(visible, x.shape[1], is_growing(cache), passed)

    def count(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the number of tokens before x, (batch, 1), and add those of x to the cache's count."""
        histories, name = histories_of(cache), f"{self.name}.passed"
        if name not in histories:
            histories[name] = TokenHistory.in_cache(cache, 1, torch.zeros(x.shape[:2], dtype=torch.long, device=x.device))
        passed = histories[name].last()
        histories[name].push(passed + torch.arange(1, x.shape[1] + 1, device=x.device))
        return passed
