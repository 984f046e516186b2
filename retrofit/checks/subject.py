"""A model to measure, and what several checks need of it: each of these is computed once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import fx, nn

from retrofit.program.capture import capture
from retrofit.program.dataflow import backward_slice
from retrofit.program.program import Program
from retrofit.runtime.agreement import Arithmetic
from retrofit.runtime.probes import Inputs, extent_of, logits_of, named_outputs, resized, run

Layout = tuple[tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a model returned: its logits, as it is measured, and the shape and dtype of everything."""

    logits: torch.Tensor
    layouts: dict[str, Layout]

    @staticmethod
    def of(arithmetic: Arithmetic, inputs: Inputs) -> Run:
        output = run(arithmetic.model, inputs)
        layouts = {name: (tuple(value.shape), value.dtype) for name, value in named_outputs(output).items()}
        if arithmetic.note:
            with arithmetic.computing():
                output = run(arithmetic.model, inputs)
        return Run(logits_of(output).detach().cpu(), layouts)


@dataclasses.dataclass
class Subject:
    """A model and the inputs it is measured on."""

    model: nn.Module
    shapes: tuple[dict[str, Any], ...]  # the inputs, then inputs of the same kinds for other batch sizes and lengths
    captured: Program | None = None  # where the model has been captured already
    runs: dict[int, Run] = dataclasses.field(default_factory=dict)
    wide_runs: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        return self.shapes[0]

    def run(self, shape: int = 0) -> Run:
        """What the model returns for the inputs of that shape; raises what the model's own code raises."""
        if shape not in self.runs:
            self.runs[shape] = Run.of(self.arithmetic, self.shapes[shape])
        return self.runs[shape]

    def wide(self, shape: int = 0) -> torch.Tensor | None:
        """The logits for the inputs of that shape in float64; None where the model's code refuses it."""
        if shape == 0:
            return self.arithmetic.wide_outputs
        if shape not in self.wide_runs:
            self.wide_runs[shape] = self.arithmetic.wide_outputs_for(self.shapes[shape])
        return self.wide_runs[shape]

    @functools.cached_property
    def arithmetic(self) -> Arithmetic:
        """How the model is measured on the first inputs."""
        return Arithmetic(self.model, self.inputs, lambda: self.run().logits)

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


def other_shapes(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], ...]:
    """The inputs for two other batch sizes and shorter lengths."""
    batch, length = extent_of(inputs)
    shapes = [(batch + 1, max(1, length - 3)), (1, max(1, length - 1))]
    return tuple(resized(model, inputs, rows, columns, seed=seed) for seed, (rows, columns) in enumerate(shapes, start=3))
