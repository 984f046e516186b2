"""Strided layers. Sequence-AltUp: a layer computes one token in k, its anchor, whose correction the tokens between receive too.

    predict   ŷ_i = a1 x_i + a2 x_{⌊i/k⌋k}
    compute   ỹ_0, ỹ_k, … = layer(x_0, x_k, …)
    correct   y_i = ŷ_i + b (ỹ_{⌊i/k⌋k} − ŷ_{⌊i/k⌋k})

With the anchor's x and ỹ collected, y_i = a1 x_i + c_{⌊i/k⌋k} where c = b ỹ + (a2 − b (a1 + a2)) x: only one vector an anchor is
spread over its window, and stored in decoding. a1 = 1, a2 = 0, b = 1 at the start, which makes k = 1 the dense layer.

The papers' baselines: stride-and-skip, y_i = ỹ_i at anchors and x_i between them; average-pooling, every token of a window gets the
layer's output for the window's mean (consecutive layers pool once, because the mean of equal tokens is the token).

Alternating Updates for Efficient Transformers (NeurIPS 2023), §4.2, §5.4 and supplement E, Alg. 2. `arguments` chooses the anchors
and cuts a call's other arguments down to them; `decoding` has the call with a cache.

Annealing turns the dense layer into a strided one: it computes fewer and fewer of the tokens between its anchors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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
    is_without_tokens,
    named_arguments,
    positional_names,
)
from retrofit.sdk import Wrapper, item_at, with_item
from retrofit.sdk.modules import batch_first, cache_among, float_like

OutputKey = int | str | None  # of an item in a layer's output; None: the output itself


class UnpaddedCalls:
    """Whether compiled code is in a call that pads nothing, of the module that makes the masks of strided layers.

    Compiled code cannot read a mask. These masks depend on none of the module's `arguments`; if it gets no others that may follow
    the tokens, none of the tokens is padding.
    """

    guards: ClassVar[tuple[str, ...]] = ("begin", "end")

    def __init__(self, module: nn.Module, arguments: Collection[int | str]) -> None:
        self.names, self.arguments, self.active = positional_names(module), tuple(arguments), False

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Enter a call: a forward pre-hook of the module."""
        if torch.compiler.is_dynamo_compiling():
            given = named_arguments(args, kwargs, self.names)
            self.active = all(name in self.arguments for name, value in given if follows_tokens(value))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the call: a forward hook of the module."""
        self.active = False


def follows_tokens(value: Any) -> bool:
    """Return whether an argument, or a part of it, may follow the tokens."""
    return value.dim() > 0 if isinstance(value, Tensor) else not is_without_tokens(value)


class StridedLayer(Wrapper):
    """`layer` on every `k`-th token of the stream, its anchors; subclasses define the values of the tokens between.

    The stream, (batch, T, d), or (T, batch, d) if `tokens_first`, is the argument `stream_in` and the output `stream_out`.
    `token_dims` are the token dimensions of the other arguments; `returned` are the arguments that the layer returns, by their key
    in its output; `unread` those it only passes on. `mask_argument` is the argument with its mask. `name` is the layer's in a
    cache. `unpadded_calls` tells where nothing is padded.

    While it is annealed, it also computes the share `dense_share` of the tokens between the anchors: with all of them, and scalars
    of 1, 0 and 1, it is the dense layer.
    """

    dense_share: float = 0.0
    unpadded_calls: UnpaddedCalls | None = None

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
            from retrofit.passes.sequence_altup.decoding import decode  # deferred: it imports transformers

            return decode(self, call, cache)
        anchors = self.anchors(call)
        x = self.layer_input(call.x, anchors)
        strided_args, strided_kwargs = call.strided(self.turn(x), anchors)
        output = self.layer(*strided_args, **strided_kwargs)
        corrections = self.correction(x, self.turn(self.stream_of(output)))
        y = self.update(call.x, corrections, anchors, None)
        return with_item(call.restore_arguments(output, self.returned), self.stream_out, self.turn(y))

    def anchors(self, call: LayerCall) -> Anchors:
        """Return the anchors of a whole sequence."""
        real = self.real(call, 0, 0)
        if real is None and not self.dense_share:
            return EvenAnchors(0, call.x.shape[1], self.k)
        if real is None:
            real = torch.ones(1, call.x.shape[1], dtype=torch.bool, device=call.x.device)
        return CountedAnchors(real, self.k, dense_share=self.dense_share)

    def real(self, call: LayerCall, before: int | Tensor, offset: int) -> Tensor | None:
        """Return the mask of real tokens after `before` others, (1 or batch, T); None if all are real."""
        if torch.compiler.is_dynamo_compiling() and self.unpadded_calls is not None and self.unpadded_calls.active:
            return None
        return call.real(before, offset)

    def turn(self, stream: Tensor) -> Tensor:
        """Return the stream with the batch first, from the layer's own layout, and back."""
        return batch_first(stream, self.tokens_first)

    def stream_of(self, output: Any) -> Tensor:
        """Return the stream in the layer's output, in the layer's own layout."""
        stream: Tensor = item_at(output, self.stream_out)
        return stream

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
