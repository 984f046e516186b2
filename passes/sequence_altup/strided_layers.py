"""Strided layers. Sequence-AltUp: a layer computes every k-th token, and its correction is handed on to the tokens between.

    predict   ŷ_i = a1 x_i + a2 x_{⌊i/k⌋k}
    compute   ỹ_0, ỹ_k, … = layer(x_0, x_k, …)
    correct   y_i = ŷ_i + b (ỹ_{⌊i/k⌋k} − ŷ_{⌊i/k⌋k})

With the anchor's x and ỹ collected, y_i = a1 x_i + c_{⌊i/k⌋k} where c = b ỹ + (a2 − b (a1 + a2)) x: one vector an anchor is all
that is spread over its window, and all that decoding has to remember. a1 = 1, a2 = 0, b = 1 at the start, which makes k = 1 the
dense layer.

The papers' baselines: stride-and-skip, y_i = ỹ_i at anchors and x_i between them; average-pooling, every token of a window is given
what the layer makes of the window's mean (layers in a row pool once, for the mean of equal tokens is the token).

Alternating Updates for Efficient Transformers (NeurIPS 2023), §4.2, §5.4 and supplement E, Alg. 2. Which tokens are anchors is in
`striding`, how what else the layer is handed follows them in `handed`, what decoding keeps in `anchor_cache`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from retrofit.passes.sequence_altup.anchor_cache import AnchorLayer, copied, give_back, keep, moved_on, recalled, seen_through
from retrofit.passes.sequence_altup.anchors import CountedAnchors, EvenAnchors
from retrofit.passes.sequence_altup.layer_arguments import Anchors, Follows, Handed, Path, as_mask, names_of, path_of
from retrofit.sdk import DoesNotFitError, Wrapper, batch_first, cache_among, with_item


class StridedLayer(Wrapper):
    """`layer` sees every `k`-th token of the stream, its anchors; a subclass says what becomes of the tokens between.

    The stream, (batch, T, d), or (T, batch, d) where `tokens_first`, enters by the argument `stream_in`, leaves by `stream_out`, an
    index or key of what the layer returns (None: the value itself). `follows` says how other arguments follow the tokens; `returns`
    which of them the layer hands back, by its output's index; `unread` which it passes on without looking into them. `name` is what
    the layer's memories go by in a cache.
    """

    def __init__(
        self,
        layer: nn.Module,
        k: int,
        *,
        name: str = "",
        stream_in: int | str = 0,
        stream_out: int | str | None = None,
        follows: Mapping[Path, Follows] | None = None,
        returns: Mapping[int | str, Path] | None = None,
        unread: Collection[int | str] = (),
        tokens_first: bool = False,
    ) -> None:
        super().__init__(layer)
        self.k, self.name, self.stream_out, self.tokens_first = k, name, stream_out, tokens_first
        self.names = names_of(layer)
        self.stream: Path = path_of(layer, stream_in)
        self.follows, self.returns, self.unread = dict(follows or {}), dict(returns or {}), frozenset(unread)
        like = next((parameter for parameter in layer.parameters() if parameter.is_floating_point()), torch.empty(()))
        self.add_coefficients(like.device, like.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handed = Handed.of(args, kwargs, self.names, self.stream, self.follows, self.unread)
        handed.x = self.turned(handed.x)
        cache = cache_among(args, kwargs)
        if cache is not None:
            return self.decode(handed, cache)
        real = handed.real(0, 0)
        anchors = EvenAnchors(0, handed.x.shape[1], self.k) if real is None else CountedAnchors(real, self.k)
        x = self.seen(handed.x, anchors)
        given, keywords = handed.strided(self.turned(x), anchors, None, 0)
        output = self.layer(*given, **keywords)
        out = None if isinstance(output, Tensor) else self.stream_out
        made = self.correction(x, self.turned(output if out is None else output[out]))
        return with_item(handed.restored(output, self.returns), out, self.turned(self.update(handed.x, made, anchors, None)))

    @torch.compiler.disable
    def decode(self, handed: Handed, cache: Cache) -> Any:
        """The call on a cache: the layer runs where there are anchors among the new tokens."""
        x, held = handed.x, recalled(cache, self.name) or AnchorLayer(self.name, self.k)
        offset = held.offset(x.shape[1])
        real = handed.real(held.tokens, offset)
        anchors = held.anchors(x.shape[1], real, x.shape[0])
        earlier, corrections = held.earlier, None
        if anchors.count:
            output, corrections, out = self.run(handed, cache, held, anchors, offset)
            held.template = self.template(output, out)
        else:
            output, out = self.rebuilt(held.template, handed, cache)
        y = self.update(x, x.new_zeros(x.shape[0], 0, x.shape[2]) if corrections is None else corrections, anchors, earlier)
        held.advance(anchors, real, x.shape[1], corrections)
        keep(cache, held)
        return with_item(output, out, self.turned(y))

    def run(
        self, handed: Handed, cache: Cache, held: AnchorLayer, anchors: Anchors, offset: int
    ) -> tuple[Any, Tensor, int | str | None]:
        """What the layer returns for the anchors, their corrections, and the stream's place in what it returned."""
        x = self.seen(handed.x, anchors)
        args, kwargs = handed.strided(self.turned(x), anchors, held, offset)
        view = seen_through(cache, held)
        args = [view if value is cache else value for value in args]
        kwargs = {key: view if value is cache else value for key, value in kwargs.items()}
        before = copied(cache) if held.recurrent is None else {}
        moving = anchors.valid.any(1) if anchors.valid is not None and held.recurrent else None
        if moving is not None and anchors.valid is not None and anchors.count > 1 and not bool(anchors.valid.all()):
            raise DoesNotFitError(
                "a strided recurrent layer was handed several tokens at once, of which rows have different numbers of anchors",
                why="its states would move on by the anchors of other rows",
                remedy="after the prompt, go on one token at a time",
            )
        resting = copied(cache, held.recurrent) if moving is not None and held.recurrent else {}
        held.mask = handed.mask or held.mask
        if held.keys is not None and isinstance(anchors, CountedAnchors) and not handed.tells and not held.sees_all(anchors):
            if held.mask is None:
                raise DoesNotFitError(
                    "a strided layer was handed no mask for a batch whose rows differ in length",
                    why="its keys of shorter rows have to be hidden",
                    remedy="pass attention_mask with every step, or use attn_implementation='sdpa'",
                )
            handed.put(
                args, kwargs, held.mask[0], as_mask(held.visible(anchors), held.mask[1])
            )  # none is due where padding is gone
        output = self.layer(*args, **kwargs)
        if moving is not None:
            give_back(cache, resting, moving)
        if held.recurrent is None:
            held.recurrent = moved_on(before, cache)
        out = None if isinstance(output, Tensor) else self.stream_out
        corrections = self.correction(x, self.turned(output if out is None else output[out]))
        return handed.restored(output, self.returns), corrections, out

    def turned(self, stream: Tensor) -> Tensor:
        """The stream with the batch first as the layer has it, and back."""
        return batch_first(stream, self.tokens_first)

    def template(self, output: Any, out: int | str | None) -> Any:
        """What is needed to make an output like this one without running the layer."""
        if out is None:
            return None
        items = output.items() if isinstance(output, Mapping) else enumerate(output)
        held = {key: "cache" if isinstance(value, Cache) else None for key, value in items}
        return type(output), held, out

    def rebuilt(self, template: Any, handed: Handed, cache: Cache) -> tuple[Any, int | str | None]:
        """An output like the layer's last: arguments that it hands back are there, what it would have computed is None."""
        if template is None:
            return None, None
        kind, held, out = template
        items = {key: cache if value == "cache" else None for key, value in held.items()}
        for key, path in self.returns.items():
            if key in items:
                items[key] = handed.argument(path)
        if issubclass(kind, Mapping):
            return kind(**items), out
        values = list(items.values())
        return (kind(*values) if hasattr(kind, "_fields") else kind(values)), out

    # What a method says.

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        """The method's own parameters are there."""

    def seen(self, x: Tensor, anchors: Anchors) -> Tensor:
        """What the layer is to work on: (batch, anchors, d)."""
        return anchors.pick(x)

    def correction(self, x: Tensor, y: Tensor) -> Tensor:
        """What each anchor hands on to its window, from what the layer saw and what it made of it: (batch, anchors, d)."""
        return y

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        """The stream after the layer, from that before and what the anchors hand on; `earlier` is that of the last one before."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"k={self.k}"


class SequenceAltUpLayer(StridedLayer):
    """y_i = ŷ_i + b (ỹ − ŷ) at its anchor, ŷ_i = a1 x_i + a2 x at its anchor: `a1`, `a2` and `b` are scalars, (1,) each."""

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        for name, value in (("a1", 1.0), ("a2", 0.0), ("b", 1.0)):
            setattr(self, name, nn.Parameter(torch.full((1,), value, device=device, dtype=dtype)))

    def correction(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b * y + (self.a2 - self.b * (self.a1 + self.a2)) * x).to(x.dtype)

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        return (self.a1 * x + anchors.spread(made, earlier)).to(x.dtype)


class StrideAndSkipLayer(StridedLayer):
    """Tokens that are no anchors pass the layer by."""

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        if not anchors.count:
            return x
        return torch.where(anchors.are(x), anchors.spread(made, earlier), x).to(x.dtype)


class AveragePoolingLayer(StridedLayer):
    """Every token of a window gets what the layer makes of the window's mean. It looks ahead, so that it keeps no cache."""

    def seen(self, x: Tensor, anchors: Anchors) -> Tensor:
        return anchors.mean(x)

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        return anchors.spread(made, earlier).to(x.dtype)


METHODS: dict[str, type[StridedLayer]] = {
    "sequence-altup": SequenceAltUpLayer,
    "stride-and-skip": StrideAndSkipLayer,
    "average-pooling": AveragePoolingLayer,
}
