"""A model to measure, and what several checks need of it: each of these is computed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from retrofit.checks.padded_inputs import Padded, pad_inputs, share_padding
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.probes import Inputs, extent_of, logits_of, named_outputs, resized, run
from retrofit.numerics.agreement import Arithmetic, is_large
from retrofit.program.capture import capture
from retrofit.program.dataflow import backward_slice
from retrofit.program.program import Program

Layout = tuple[tuple[int, ...], torch.dtype]
Watch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a model returned: its logits, as it is measured, and the shape and dtype of everything."""

    logits: torch.Tensor
    layouts: dict[str, Layout]

    @staticmethod
    def of(arithmetic: Arithmetic, inputs: Inputs, watching: contextlib.AbstractContextManager[Any] | None = None) -> Run:
        with watching or contextlib.nullcontext():
            output = run(arithmetic.model, inputs)
        layouts = {name: (tuple(value.shape), value.dtype) for name, value in named_outputs(output).items()}
        if arithmetic.note:
            with arithmetic.computing():
                output = run(arithmetic.model, inputs)
        return Run(logits_of(output).detach().cpu(), layouts)


@dataclasses.dataclass
class Subject:
    """A model and the inputs it is measured on; checks that need the same forward share it."""

    model: nn.Module
    shapes: tuple[dict[str, Any], ...]  # the inputs; of the same kinds for other batches and lengths; with optional arguments
    captured: Program | None = None  # where the model has been captured already
    runs: dict[int, Run] = dataclasses.field(default_factory=dict)
    is_large: bool | None = None  # as its dense model is; None: as it is itself
    watches: dict[str, Watch] = dataclasses.field(default_factory=dict)  # of the first forward on the inputs, by check
    watched: dict[str, Any] = dataclasses.field(default_factory=dict)  # what these saw
    wide_runs: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_large is None:
            self.is_large = is_large(self.model)

    @property
    def inputs(self) -> dict[str, Any]:
        return self.shapes[0]

    def run(self, shape: int = 0) -> Run:
        """What the model returns for the inputs of that shape; raises what the model's own code raises."""
        if shape not in self.runs:
            found = self.run_watched() if shape == 0 and self.watches else Run.of(self.arithmetic, self.shapes[shape])
            self.runs[shape] = found
            self.arithmetic.remember(self.shapes[shape], found.logits.to(device_of(self.model)))
        return self.runs[shape]

    def run_watched(self) -> Run:
        """The run on the inputs, watched where that does not disturb it."""
        try:
            with contextlib.ExitStack() as watching:
                found = {name: watching.enter_context(watch()) for name, watch in self.watches.items()}
                ran = Run.of(self.arithmetic, self.inputs, watching)  # which ends the watching
        except Exception:  # of who watches, or of the model, which then raises it again
            return Run.of(self.arithmetic, self.inputs)
        self.watched |= found
        return ran

    def seen(self, name: str, watch: Watch) -> Any:
        """What that check sees of a forward on the inputs: of the first one where it was watched."""
        if name not in self.watched:
            with watch() as found:
                run(self.model, self.inputs)
            self.watched[name] = found
        return self.watched[name]

    def wide(self, shape: int = 0) -> torch.Tensor | None:
        """The logits for the inputs of that shape in float64; None where the model's code refuses it."""
        if shape == self.cheapest:
            return self.arithmetic.wide_outputs
        if shape not in self.wide_runs:
            self.wide_runs[shape] = self.arithmetic.wide_outputs_for(self.shapes[shape])
        return self.wide_runs[shape]

    @functools.cached_property
    def arithmetic(self) -> Arithmetic:
        """How the model is measured, and on the cheapest inputs how far it rounds."""
        found = Arithmetic(self.model, self.shapes[self.cheapest], lambda: self.run(self.cheapest).logits)
        for shape, one in self.runs.items():
            found.remember(self.shapes[shape], one.logits.to(device_of(self.model)))
        return found

    @property
    def cheapest(self) -> int:
        """The shape for what costs most: the first, of a large model the smallest."""
        return min(range(len(self.shapes)), key=lambda shape: size_of(self.shapes[shape])) if self.is_large else 0

    def padded(self, side: str) -> Padded:
        """A sequence padded on that side in a batch, and alone; of a large model in the batch that its checks share."""
        return self.shared_padding(side) or pad_inputs(self.model, self.inputs, side)

    def shared_padding(self, side: str) -> Padded | None:
        """A sequence of the second shape, padded in a batch for both sides and for steps; None in a small model."""
        if not self.is_large or len(self.shapes) < 2:
            return None
        return share_padding(self.model, self.inputs, self.shapes[1], side)

    @functools.cached_property
    def program(self) -> Program:
        return self.captured or capture(self.model, self.inputs)

    @functools.cached_property
    def reached(self) -> set[fx.Node]:
        """The nodes of the program that its outputs depend on."""
        return backward_slice(self.program.outputs.values())

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by each of their names."""
        return dict(self.model.named_parameters(remove_duplicate=False))


def size_of(inputs: Inputs) -> int:
    """How many numbers the inputs hold."""
    return sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))


def other_shapes(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], ...]:
    """The inputs for two other batch sizes and shorter lengths."""
    batch, length = extent_of(inputs)
    shapes = [(batch + 1, max(1, length - 3)), (1, max(1, length - 1))]
    return tuple(resized(model, inputs, rows, columns, seed=seed) for seed, (rows, columns) in enumerate(shapes, start=3))
