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
from retrofit.runtime.probes import Inputs, extent_of, logits_of, named_outputs, resized, run

Layout = tuple[tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a model returned: its logits, and the shape and dtype of everything."""

    logits: torch.Tensor
    layouts: dict[str, Layout]

    @staticmethod
    def of(model: nn.Module, inputs: Inputs) -> Run:
        output = run(model, inputs)
        layouts = {name: (tuple(value.shape), value.dtype) for name, value in named_outputs(output).items()}
        return Run(logits_of(output).detach().cpu(), layouts)


@dataclasses.dataclass
class Subject:
    """A model and the inputs it is measured on."""

    model: nn.Module
    shapes: tuple[dict[str, Any], ...]  # the inputs, then inputs of the same kinds for other batch sizes and lengths
    captured: Program | None = None  # where the model has been captured already
    runs: dict[int, Run] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        return self.shapes[0]

    def run(self, shape: int = 0) -> Run:
        """What the model returns for the inputs of that shape; raises what the model's own code raises."""
        if shape not in self.runs:
            self.runs[shape] = Run.of(self.model, self.shapes[shape])
        return self.runs[shape]

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
