"""What was found in a captured model, as data: nothing about how it is found, or how it is written for people."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from retrofit.anatomy.parts import Layer, Part, Stack

if TYPE_CHECKING:
    import networkx
    from torch import fx, nn

    from retrofit.program.dataflow import Dataflow
    from retrofit.program.program import Program

WITHOUT_GRADIENT = "no gradient reaches it: the outputs depend on it by comparison or choice alone"  # of what is not trained


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was found in a model, where, and what was not."""

    stacks: tuple[Stack, ...]
    embedding: Part | None  # token embedding; None where the model takes no ids
    embeddings: tuple[Part, ...]  # every table looked up by token ids
    head: Part | None  # product that makes the per-token logits
    stem: tuple[str, ...]  # modules between the inputs and the first layers
    tail: tuple[str, ...]  # modules between the last layers and the outputs
    tied: tuple[tuple[str, ...], ...]  # names that are one parameter
    parameters: int
    notes: tuple[str, ...]  # what could not be placed, and why
    flow: Dataflow  # of its program
    model: nn.Module

    @property
    def program(self) -> Program:
        """The captured program it was found in."""
        return self.flow.program

    @functools.cached_property
    def graph(self) -> networkx.DiGraph:
        """The data flow it was found in as a `networkx` graph: nodes by name, with operation, shape and module path."""
        return self.flow.graph()

    def node(self, name: str) -> fx.Node:
        """The node of the program called `name`, as parts of the anatomy name it."""
        return self.flow.node(name)

    def is_trained(self, layer: Layer) -> bool:
        """Whether what the layer returns gets a gradient from an output of the model."""
        return self.node(layer.exit) in self.flow.trained

    @property
    def width(self) -> int:
        """The stream's width, d_model, of the last stack: the one that makes the outputs."""
        return self.stacks[-1].width

    def deepest(self, kind: str = "all") -> int:
        """The number of layers of the deepest stack, of those of a kind where one is named; 0 where there is none."""
        return max((len(stack.layers) for stack in self.stacks if kind in ("all", stack.kind)), default=0)

    @property
    def layers(self) -> Iterator[Layer]:
        return (layer for stack in self.stacks for layer in stack.layers)
