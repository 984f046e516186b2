"""Strided layers. Sequence-AltUp: a layer computes one token in k, its anchor, whose correction the tokens between receive too.

    predict   ŷ_i = a1 x_i + a2 x_{⌊i/k⌋k}
    compute   ỹ_0, ỹ_k, … = layer(x_0, x_k, …)
    correct   y_i = ŷ_i + b (ỹ_{⌊i/k⌋k} − ŷ_{⌊i/k⌋k})

With the anchor's x and ỹ collected, y_i = a1 x_i + c_{⌊i/k⌋k} where c = b ỹ + (a2 − b (a1 + a2)) x: only one vector an anchor is
spread over its window, and stored in decoding. a1 = 1, a2 = 0, b = 1 at the start, which makes k = 1 the dense layer.

The papers' baselines: stride-and-skip, y_i = ỹ_i at anchors and x_i between them; average-pooling, every token of a window gets the
layer's output for the window's mean (consecutive layers pool once, because the mean of equal tokens is the token).

Alternating Updates for Efficient Transformers (NeurIPS 2023), §4.2, §5.4 and supplement E, Alg. 2. `arguments` chooses the anchors
and cuts a call's other arguments down to them; `growing_anchors` and `fixed_anchors` store states for decoding.

Annealing turns the dense layer into a strided one: it computes fewer and fewer of the tokens between its anchors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from retrofit.passes.sequence_altup.anchor_cache import (
    AnchorLayer,
    changed_states,
    copy_states,
    find_anchor_layer,
    restore_states,
    store_anchor_layer,
    view_of,
)
from retrofit.passes.sequence_altup.arguments import (
    Anchors,
    ArgumentPath,
    CountedAnchors,
    EvenAnchors,
    LayerCall,
    MaskArgument,
    NoAnchors,
    TokenDims,
    argument_path,
    positional_names,
    to_mask,
)
from retrofit.passes.sequence_altup.fixed_anchors import FixedAnchorLayer, has_fixed_size
from retrofit.passes.sequence_altup.growing_anchors import GrowingAnchorLayer
from retrofit.sdk import DoesNotFitError, Wrapper, item_at, with_item
from retrofit.sdk.modules import batch_first, cache_among, float_like

OutputKey = int | str | None  # of an item in a layer's output; None: the output itself


class StridedLayer(Wrapper):
    """`layer` on every `k`-th token of the stream, its anchors; subclasses define the values of the tokens between.

    The stream, (batch, T, d), or (T, batch, d) if `tokens_first`, is the argument `stream_in` and the output `stream_out`.
    `token_dims` are the token dimensions of the other arguments; `returned` are the arguments that the layer returns, by their key
    in its output; `unread` those it only passes on. `mask_argument` is the argument with its mask. `name` is the layer's in a
    cache.

    While it is annealed, it also computes the share `dense_share` of the tokens between the anchors: with all of them, and scalars
    of 1, 0 and 1, it is the dense layer.
    """

    dense_share: float = 0.0

    def __init__(
        self,
        layer: nn.Module,
        k: int,
        *,
        name: str = "",
        stream_in: int | str = 0,
        stream_out: OutputKey = None,
        token_dims: Mapping[ArgumentPath, TokenDims] | None = None,
        returned: Mapping[int | str, ArgumentPath] | None = None,
        unread: Collection[int | str] = (),
        mask_argument: MaskArgument | None = None,
        tokens_first: bool = False,
    ) -> None:
        super().__init__(layer)
        self.k, self.name, self.stream_out, self.tokens_first, self.mask_argument = k, name, stream_out, tokens_first, mask_argument
        self.names = positional_names(layer)
        self.stream: ArgumentPath = argument_path(layer, stream_in)
        self.token_dims, self.returned, self.unread = dict(token_dims or {}), dict(returned or {}), frozenset(unread)
        like = float_like(layer)
        self.add_coefficients(like.device, like.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = LayerCall.read(args, kwargs, self.names, self.stream, self.token_dims, self.unread)
        call.x = self.turn(call.x)
        cache = cache_among(args, kwargs)
        if cache is not None:
            return self.decode(call, cache)
        anchors = self.anchors(call)
        x = self.layer_input(call.x, anchors)
        strided_args, strided_kwargs = call.strided(self.turn(x), anchors)
        output = self.layer(*strided_args, **strided_kwargs)
        corrections = self.correction(x, self.turn(self.stream_of(output)))
        y = self.update(call.x, corrections, anchors, None)
        return with_item(call.restore_arguments(output, self.returned), self.stream_out, self.turn(y))

    def anchors(self, call: LayerCall) -> Anchors:
        """Return the anchors of a whole sequence."""
        real = call.real(0, 0)
        if real is None and not self.dense_share:
            return EvenAnchors(0, call.x.shape[1], self.k)
        if real is None:
            real = torch.ones(1, call.x.shape[1], dtype=torch.bool, device=call.x.device)
        return CountedAnchors(real, self.k, dense_share=self.dense_share)

    def decode(self, call: LayerCall, cache: Cache) -> Any:
        """Return the layer's output with a cache: the layer runs if there are anchors among the new tokens."""
        if self.dense_share:
            raise DoesNotFitError(
                "a strided layer was called with a cache during annealing",
                why="the tokens it computes change with every step",
                remedy="use use_cache=False until annealing is done",
                code="annealing",
            )
        stored = find_anchor_layer(cache, self.name) or self.new_anchor_layer(cache)
        compiles = isinstance(stored, FixedAnchorLayer) or not (stored.tokens or cache.is_compileable)
        return (self.step if compiles else self.uncompiled_step)(call, cache, stored)

    def new_anchor_layer(self, cache: Cache) -> AnchorLayer:
        """Return an empty anchor layer for this cache; token histories contain anchors only, so theirs grows."""
        if has_fixed_size(cache) and not any(getattr(module, "stores_histories", False) for module in self.modules()):
            return FixedAnchorLayer(self.name, self.k, self.mask_argument, int(cache.get_mask_sizes(1, 0)[0]))
        return GrowingAnchorLayer(self.name, self.k, self.mask_argument)

    @torch.compiler.disable
    def uncompiled_step(self, call: LayerCall, cache: Cache, stored: AnchorLayer) -> Any:
        """Return what `step` does; how much is stored depends on the values of masks, which compiled code cannot read."""
        return self.step(call, cache, stored)

    def step(self, call: LayerCall, cache: Cache, stored: AnchorLayer) -> Any:
        """Return the layer's output and keep its anchors in `stored`."""
        x, offset = call.x, stored.offset(call.x.shape[1])
        real = call.real(stored.start, offset)
        anchors = stored.anchors(x.shape[1], real, x.shape[0])
        earlier, corrections = stored.earlier, None
        if anchors.count:
            output, corrections = self.run(call, cache, stored, anchors, offset)
            if stored.template is None:
                stored.template = output_template(output)
        else:
            output = self.rebuild_output(stored.template, call, cache)
        nothing = x.new_zeros(x.shape[0], 0, x.shape[2])
        y = self.update(x, nothing if corrections is None else corrections, anchors, earlier)
        y = stored.settled(y, lambda: self.update(x, nothing, NoAnchors(), earlier))
        stored.advance(anchors, real, x.shape[1], corrections)
        store_anchor_layer(cache, stored)
        return with_item(output, self.stream_out, self.turn(y))

    def run(self, call: LayerCall, cache: Cache, stored: AnchorLayer, anchors: Anchors, offset: int) -> tuple[Any, Tensor]:
        """Return the layer's output for the anchors, and their corrections."""
        x = self.layer_input(call.x, anchors)
        stored.make_room(anchors, call.key_extents)
        args, kwargs = call.strided(self.turn(x), anchors, functools.partial(stored.key_indices, anchors, offset))
        view = cache if stored.is_settled else view_of(cache, stored, anchors.valid)
        args = [view if value is cache else value for value in args]
        kwargs = {key: view if value is cache else value for key, value in kwargs.items()}
        before = copy_states(cache) if stored.recurrent is None else {}
        advancing = self.advancing_rows(anchors, stored)
        waiting = copy_states(cache, stored.recurrent) if advancing is not None and stored.recurrent else {}
        stored.mask = call.mask or stored.mask
        if stored.keys is not None and isinstance(anchors, CountedAnchors) and not call.shows_padding:
            self.hide_missing_keys(call, args, kwargs, stored, anchors)
        output = self.layer(*args, **kwargs)
        if advancing is not None:
            restore_states(cache, waiting, advancing)
        if stored.recurrent is None:
            stored.recurrent = changed_states(before, cache)
        corrections = self.correction(x, self.turn(self.stream_of(output)))
        return call.restore_arguments(output, self.returned), corrections

    def advancing_rows(self, anchors: Anchors, stored: AnchorLayer) -> Tensor | None:
        """Return the rows (batch) with an anchor, whose recurrent states may advance; None without such states."""
        if anchors.valid is None or not stored.recurrent:
            return None
        if anchors.count > 1 and not bool(anchors.valid.all()):
            raise DoesNotFitError(
                "a strided recurrent layer received several tokens at once, with different numbers of anchors per row",
                why="its states would advance by the anchors of other rows",
                remedy="after the prompt, decode one token at a time",
                code="padding",
            )
        return anchors.valid.any(1)

    def hide_missing_keys(
        self, call: LayerCall, args: list[Any], kwargs: dict[str, Any], stored: AnchorLayer, anchors: CountedAnchors
    ) -> None:
        """Add a mask to a call without it where rows store different numbers of anchors: models omit masks when padding is gone."""
        if stored.sees_all(anchors):
            return
        if stored.mask is None:
            raise DoesNotFitError(
                "a strided layer received no mask for rows of different length",
                why="the padding of shorter rows must be masked",
                remedy="pass attention_mask with every step, or use attn_implementation='sdpa'",
                code="no-mask",
            )
        path, dtype = stored.mask
        call.set_argument(args, kwargs, path, to_mask(stored.visible(anchors), dtype))

    def turn(self, stream: Tensor) -> Tensor:
        """Return the stream with the batch first, from the layer's own layout, and back."""
        return batch_first(stream, self.tokens_first)

    def stream_of(self, output: Any) -> Tensor:
        """Return the stream in the layer's output, in the layer's own layout."""
        stream: Tensor = item_at(output, self.stream_out)
        return stream

    def rebuild_output(self, template: Any, call: LayerCall, cache: Cache) -> Any:
        """Return an output like the layer's last one: with the arguments that it returns, and None for computed values."""
        if template is None:
            return call.x
        kind, kinds = template
        items = {name: cache if value == "cache" else None for name, value in kinds.items()}
        for name, path in self.returned.items():
            if name in items:
                items[name] = call.argument(path)
        if issubclass(kind, Mapping):
            return kind(**items)
        values = list(items.values())
        return kind(*values) if hasattr(kind, "_fields") else kind(values)

    # Methods of subclasses.

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        """Add the method's own parameters."""

    def layer_input(self, x: Tensor, anchors: Anchors) -> Tensor:
        """Return the layer's input: (batch, anchors, d)."""
        return anchors.pick(x)

    def correction(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the value that each anchor spreads over its window, from the layer's input and output: (batch, anchors, d)."""
        return y

    def update(self, x: Tensor, corrections: Tensor, anchors: Anchors | NoAnchors, earlier: Tensor | None) -> Tensor:
        """Return the stream after the layer; `earlier` is the correction of the last anchor before these tokens."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"k={self.k}"


def output_template(output: Any) -> Any:
    """Return the input of `rebuild_output`: the output's type and its items that are the cache; None for a tensor."""
    if isinstance(output, Tensor):
        return None
    items = output.items() if isinstance(output, Mapping) else enumerate(output)
    return type(output), {name: "cache" if isinstance(value, Cache) else None for name, value in items}


class SequenceAltUpLayer(StridedLayer):
    """y_i = ŷ_i + b (ỹ − ŷ) at its anchor, ŷ_i = a1 x_i + a2 x at its anchor: `a1`, `a2` and `b` are scalars, (1,) each."""

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        for name, value in (("a1", 1.0), ("a2", 0.0), ("b", 1.0)):
            setattr(self, name, nn.Parameter(torch.full((1,), value, device=device, dtype=dtype)))

    def scalars(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return a1, a2 and b; during annealing, as far from 1, 0 and 1 as the layer is from the dense one."""
        if not self.dense_share:
            return self.a1, self.a2, self.b
        share = self.dense_share
        return self.a1 + share * (1 - self.a1), self.a2 - share * self.a2, self.b + share * (1 - self.b)

    def correction(self, x: Tensor, y: Tensor) -> Tensor:
        a1, a2, b = self.scalars()
        return (b * y + (a2 - b * (a1 + a2)) * x).to(x.dtype)

    def update(self, x: Tensor, corrections: Tensor, anchors: Anchors | NoAnchors, earlier: Tensor | None) -> Tensor:
        return (self.scalars()[0] * x + anchors.spread(corrections, earlier)).to(x.dtype)


class StrideAndSkipLayer(StridedLayer):
    """Strided layer whose other tokens skip the layer."""

    def update(self, x: Tensor, corrections: Tensor, anchors: Anchors | NoAnchors, earlier: Tensor | None) -> Tensor:
        if isinstance(anchors, NoAnchors) or not anchors.count:
            return x
        return torch.where(anchors.is_anchor(x), anchors.spread(corrections, earlier), x).to(x.dtype)


class AveragePoolingLayer(StridedLayer):
    """Every token of a window gets the layer's output for the window's mean. It looks ahead, so it cannot decode."""

    def layer_input(self, x: Tensor, anchors: Anchors) -> Tensor:
        return anchors.window_means(x)

    def update(self, x: Tensor, corrections: Tensor, anchors: Anchors | NoAnchors, earlier: Tensor | None) -> Tensor:
        return anchors.spread(corrections, earlier).to(x.dtype)


METHODS: dict[str, type[StridedLayer]] = {
    "sequence-altup": SequenceAltUpLayer,
    "stride-and-skip": StrideAndSkipLayer,
    "average-pooling": AveragePoolingLayer,
}


@dataclasses.dataclass(frozen=True)
class ComputedTokens:
    """The dial of annealing: at 0 the dense layer, all tokens computed and a1, a2, b = 1, 0, 1; at 1 the method."""

    name: str = "the share of the tokens that are computed"

    def fits(self, site: nn.Module) -> bool:
        return any(isinstance(module, StridedLayer) for module in site.modules())

    def turn(self, site: nn.Module, share: float) -> None:
        """Stop computing this share of the tokens between anchors."""
        for module in site.modules():
            if isinstance(module, StridedLayer):
                module.dense_share = 1.0 - share
