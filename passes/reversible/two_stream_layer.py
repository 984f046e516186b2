"""A layer that runs on two streams, and the dial that leads from the dense layer to it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.passes.reversible.intercepted_sums import Branches, call_intercepted
from retrofit.passes.reversible.repeated_call import without_checkpoints
from retrofit.passes.reversible.two_streams import Swaps, halves, two_stream_call
from retrofit.sdk import DoesNotFitError, Wrapper, argument_place, child_modules, find_argument, is_exporting, with_item


class Streams:
    """Both streams as the branches of a layer are added, and the share of the way from the dense layer to two streams."""

    def __init__(self, newer: Tensor, older: Tensor, share: float) -> None:
        self.newer, self.older, self.share = newer, older, share

    def add(self, _: int, value: Tensor) -> Tensor:
        """x_{j+1} = (1 − λ) x_j + λ x_{j−1} + f_j(x_j); the dense sum bit for bit where λ is 0."""
        base = self.older if self.share == 1 else torch.lerp(self.newer, self.older.to(self.newer.dtype), self.share)
        self.newer, self.older = base + value, self.newer
        return self.newer

    def clamped(self, newer: Tensor) -> None:
        """The newer stream is this one."""
        self.newer = newer

    def mean(self) -> Tensor:
        return torch.lerp(self.newer, self.older.to(self.newer.dtype), self.share / 2)


class TwoStreamLayer(Wrapper):
    """Runs the branches of `layer` on two streams; trained, each branch is computed again in the backward pass.

    The streams come as one tensor [newer | older], the first layer gets one stream, and the last returns the mean of both.
    """

    stays_outermost = True  # between two layers there is nothing else
    adds_branches = True

    def __init__(
        self,
        layer: nn.Module,
        width: int,
        sums: Sequence[int],
        parts: Sequence[str],
        *,
        stream_in: int | str,
        stream_out: int | str | None,
        closes: bool,
    ) -> None:
        super().__init__(layer)
        place = argument_place(layer, stream_in)
        self.swaps = Swaps(width, place, stream_out, tuple(sums), tuple(parts), closes)
        self.share = 1.0  # λ

    @property
    def stream_out(self) -> int | str | None:
        return self.swaps.stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer, swaps = child_modules(self)["layer"], self.swaps
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(swaps.stream_in, arguments, keywords)
        x = container[key]
        if x.shape[-1] not in (swaps.width, 2 * swaps.width):
            raise DoesNotFitError(
                f"a layer received a stream {x.shape[-1]} wide, where one of two streams is {swaps.width}",
                why="something else changes the stream between its layers",
                remedy="apply reversible last",
            )
        if self.training and torch.is_grad_enabled() and self.share == 1 and not is_exporting():
            output = two_stream_call(layer, swaps, args, kwargs)
            if output is not NotImplemented:
                return output
        newer, older = halves(x, swaps.width)
        streams = Streams(newer, older, self.share)
        container[key] = newer
        output = self.on(streams, lambda: layer(*arguments, **keywords))
        out = None if isinstance(output, Tensor) else swaps.stream_out
        return with_item(output, out, streams.mean() if swaps.closes else torch.cat([streams.newer, streams.older], -1))

    def on(self, streams: Streams, call: Callable[[], Any]) -> Any:
        """What a call of the layer returns that works on these streams."""
        with without_checkpoints(child_modules(self)["layer"]) if self.training else contextlib.nullcontext():
            return call_intercepted(call, Branches(self.swaps.sums, streams.newer, streams.add, streams.clamped))

    def extra_repr(self) -> str:
        return f"{len(self.swaps.sums)} swaps"


@dataclasses.dataclass(frozen=True)
class SecondStream:
    """At 0 a branch is added to the stream that it read, which is the dense function; at 1 to the other one."""

    name: str = "the share of the older stream that a branch is added to"

    def fits(self, site: nn.Module) -> bool:
        return bool(two_stream_layers(site))

    def turn(self, site: nn.Module, share: float) -> None:
        """λ is `share`; below 1 nothing is reversed, and a training step keeps all activations."""
        for layer in two_stream_layers(site):
            layer.share = share


def two_stream_layers(site: nn.Module) -> list[TwoStreamLayer]:
    return [module for module in site.modules() if isinstance(module, TwoStreamLayer)]
