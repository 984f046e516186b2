"""A layer whose activations are computed again in the backward pass, from what the layer after it received."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofit.passes.reversible.chain import reversible_call
from retrofit.passes.reversible.written_arguments import with_copies
from retrofit.sdk import Wrapper, argument_place, child_modules, is_exporting


class ReversibleLayer(Wrapper):
    """Evaluated, `layer` as it is; trained, one reversible step, which keeps `bits` bits of each number of the stream.

    The stream is the argument `stream_in`, and leaves by `stream_out`: an index or key of what the layer returns, None for the
    value itself. The model writes to its arguments `written` once it has run: a step keeps copies of them.
    """

    stays_outermost = True  # a chain of steps ends where something else makes the stream

    def __init__(
        self,
        layer: nn.Module,
        bits: int,
        *,
        stream_in: int | str,
        stream_out: int | str | None,
        written: tuple[int | str, ...] = (),
    ) -> None:
        super().__init__(layer)
        self.written = written
        self.bits, self.stream_in, self.stream_out = bits, argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = child_modules(self)["layer"]
        if not (self.training and torch.is_grad_enabled()) or is_exporting():
            return layer(*args, **kwargs)
        args, kwargs = with_copies(args, kwargs, self.written)
        return reversible_call(layer, self.stream_in, self.stream_out, self.bits, args, kwargs)

    def extra_repr(self) -> str:
        return f"γ=±2^-{self.bits}"
