"""Isomorphism of two models' graphs around their mixtures, and the corresponding parameters."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrofit.program.dataflow import reachable
from retrofit.program.program import Call, Program

ATEN = torch.ops.aten
SAME_VALUES = {ATEN.contiguous.default, ATEN.clone.default, ATEN.alias.default, ATEN.detach.default}  # copies
CASTS = {ATEN.to.dtype, ATEN.to.device, ATEN.to.dtype_layout, ATEN._to_copy.default}  # copies if the dtype does not change
COMMUTES = {ATEN.add.Tensor, ATEN.mul.Tensor}
RESHAPES = {ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default}
PLACES = ("device", "layout", "pin_memory")  # arguments of an operation for the place of its result, not its value
LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The graph of a model with each of its mixtures as one operation."""

    program: Program
    ends: dict[fx.Node, tuple[int, fx.Node]]  # output of a mixture → the mixture's number, its input
    digests: dict[fx.Node, str]  # equal for equal computations of equal inputs, whatever the values of the parameters

    @staticmethod
    def of(program: Program, mixtures: Sequence[str]) -> Surroundings:
        """Return the surroundings of `mixtures`, paths of modules that are called once each."""
        ends: dict[fx.Node, tuple[int, fx.Node]] = {}
        for number, path in enumerate(mixtures):
            call = call_of(program, path)
            entering = next(iter(call.inputs.values()))
            for node in call.outputs.values():
                ends.setdefault(node, (number, entering))
        found = Surroundings(program, ends, {})
        for node in program.graph.nodes:
            found.digests[node] = found.digest(node)
        return found

    def digest(self, node: fx.Node) -> str:
        if node in self.ends:
            number, entering = self.ends[node]
            return hashed("mixture", number, self.digests[entering])
        if node.op == "placeholder":
            return hashed(*self.held(node))
        origin = self.origin(node)
        if origin is not node:
            return self.digests[origin]
        target = "reshape" if node.target in RESHAPES else str(node.target)
        return hashed(node.op, target, *self.arguments(node))

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the node with the values of this one: another one if this is a copy, or a dropout without effect."""
        while node not in self.ends and node.op == "call_function":
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or not is_copy(node, source):
                return node
            node = source
        return node

    def held(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the meaning of a placeholder."""
        program, value = self.program, node.meta.get("val")
        shape = tuple(getattr(value, "shape", ()))
        if node in program.parameters:
            return "parameter", shape
        if node in program.inputs:
            return "input", program.inputs[node]
        constant = program.values.get(program.constants.get(node, ""))
        return "held", shape, constant.tolist() if constant is not None and not constant.is_meta else None

    def arguments(self, node: fx.Node) -> list[str]:
        """Return the arguments of a node by their digests, sorted if their order has no effect."""
        args = [argument for argument in node.args if not isinstance(argument, torch.device)]
        kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACES}
        arguments = [repr(fx.node.map_arg(argument, lambda operand: Quoted(self.digests[operand]))) for argument in (*args, kwargs)]
        return [*sorted(arguments[:2]), *arguments[2:]] if node.target in COMMUTES else arguments

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of a node; of two that commute, the one with the smaller digest first."""
        if node in self.ends:
            return [self.origin(self.ends[node][1])]
        operands = [self.origin(all_input_node) for all_input_node in node.all_input_nodes]
        if node.target in COMMUTES:
            return sorted(operands, key=lambda operand: self.digests[operand])
        return operands

    def slice_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the backward slice of `node`, in the order of the graph."""
        seen = reachable([node], self.operands)
        return [node for node in self.program.graph.nodes if node in seen]

    def place(self, node: fx.Node) -> str:
        """Return a node in words: the operation, and the module that it is in."""
        program = self.program
        if node in program.parameters:
            return f"the parameter {program.parameters[node]} {'×'.join(map(str, self.held(node)[1]))}"
        call = program.owner.get(node)
        where = call.path if call is not None and call.path else "the model's own code"
        return f"{getattr(node.target, '__name__', node.target)} in {where}"


def is_copy(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node has the values of its operand."""
    if node.target in CASTS:
        ours, theirs = node.meta.get("val"), source.meta.get("val")
        return ours is not None and theirs is not None and ours.dtype == theirs.dtype
    if node.target is ATEN.dropout.default:
        return node.args[2:3] == (False,)
    return node.target in SAME_VALUES


class Quoted(str):
    """Text that is its own `repr`."""

    def __repr__(self) -> str:
        return str(self)


def hashed(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def call_of(program: Program, path: str) -> Call:
    """Return the single call of a module. Raises `LookupError` if it is called never or twice."""
    calls = [call for call in program.calls if call.path == path]
    if len(calls) != 1 or not calls[0].inputs or not calls[0].outputs:
        raise LookupError(f"{path} is called {len(calls)} times")
    return calls[0]


def root_of(surroundings: Surroundings) -> fx.Node:
    """Return the node with the values of the logits, or of the first output."""
    outputs = surroundings.program.outputs
    return surroundings.origin(outputs.get(LOGITS) or next(iter(outputs.values())))


def first_difference(a: Surroundings, b: Surroundings) -> str:
    """Return the first node of `a` that `b` does not compute, and the reverse; "" if the graphs are equal."""
    ours, theirs = (side.slice_of(root_of(side)) for side in (a, b))
    known, there = {a.digests[node] for node in ours}, {b.digests[node] for node in theirs}
    if a.digests[root_of(a)] == b.digests[root_of(b)]:
        return ""
    first = next((node for node in ours if a.digests[node] not in there), None)
    its = next((node for node in theirs if b.digests[node] not in known), None)
    here = a.place(first) if first is not None else "nothing"
    return f"{here} is not in it; it has {b.place(its) if its is not None else 'nothing'} there"


def matched_parameters(a: Surroundings, b: Surroundings) -> dict[str, str]:
    """Return for each parameter of `b` outside its mixtures its counterpart in `a`. The graphs are equal.

    Raises `LookupError` if a parameter has two counterparts.
    """
    found: dict[str, str] = {}
    seen: set[tuple[fx.Node, fx.Node]] = set()
    waiting = [(root_of(a), root_of(b))]
    while waiting:
        pair = waiting.pop()
        if pair in seen:
            continue
        seen.add(pair)
        ours, theirs = pair
        if ours in a.program.parameters:
            name = b.program.parameters[theirs]
            if found.setdefault(name, a.program.parameters[ours]) != a.program.parameters[ours]:
                raise LookupError(f"{name} would have to be two parameters at once")
        waiting.extend(zip(a.operands(ours), b.operands(theirs), strict=True))
    return found
