"""A captured program: the graph, what its placeholders hold, and every module call with its inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

MUTATION = "mutation "  # before a number, in the name of an output that is the new value of a buffer

Key = int | str | None


@dataclasses.dataclass
class Call:
    """One call of one module: the node passed as each argument, the node returned as each output."""

    path: str
    index: int  # 0 for the first call of that module, 1 for its second
    number: int  # position among all calls, in the order they began
    parent: Call | None
    names: tuple[str, ...] = ()  # the other paths of its module, by which it may have been called
    inputs: dict[Key, fx.Node] = dataclasses.field(default_factory=dict)
    outputs: dict[Key, fx.Node] = dataclasses.field(default_factory=dict)
    kept: dict[str, fx.Node] = dataclasses.field(default_factory=dict)  # by attribute: the tensors that its code left in the module

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def chain(self) -> Iterator[Call]:
        """This call and the calls around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def encloses(self, other: Call) -> bool:
        """Return whether `other` is this call, or was made while it ran."""
        return any(call is self for call in other.chain)


@dataclasses.dataclass
class Program:
    """A captured model: its graph, what each placeholder holds, its module calls."""

    graph: fx.Graph
    parameters: dict[fx.Node, str]  # placeholder → parameter name
    buffers: dict[fx.Node, str]  # placeholder → buffer name
    constants: dict[fx.Node, str]
    inputs: dict[fx.Node, str]  # placeholder → name of the argument
    outputs: dict[str, fx.Node]  # name of the output → node
    calls: list[Call]  # the root call, of the model itself, first
    owner: dict[fx.Node, Call]  # the innermost call a node was computed in
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of the constants and buffers
    examples: dict[str, Any] = dataclasses.field(default_factory=dict)  # the arguments it was captured with, by name
    returns: Any = None  # the class that the model's outputs come in
    constant_outputs: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name: what it returns that is no tensor
    results: tuple[str, ...] = ()  # the names of all that it returns, in order
    layout: Any = None  # how these nest, in the terms of torch's pytree
    branches: bool = False  # whether the code branches on values: the program then holds the branches these inputs take

    @property
    def root(self) -> Call:
        """The call of the model itself."""
        return self.calls[0]

    def replace_node(self, gone: fx.Node, by: fx.Node) -> None:
        """Replace the node `gone` by the node `by` wherever it is read, returned or taken, and erase it."""
        gone.replace_all_uses_with(by)
        of_calls = (table for call in self.calls for table in (call.inputs, call.outputs, call.kept))
        tables: list[dict[Any, fx.Node]] = [self.outputs, *of_calls]
        for table in tables:
            table.update({key: by for key, value in table.items() if value is gone})
        self.graph.erase_node(gone)
        self.owner.pop(gone, None)
