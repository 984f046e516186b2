"""Whether two models are the same graph around their mixtures, and which parameter of the one stands where in the other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrofit.program.program import Call, Program

COMMUTES = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}
PLACES = ("device", "layout", "pin_memory")  # arguments of an operation that say where its result is, not what
LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The graph of a model with each of its mixtures as one operation."""

    program: Program
    ends: dict[fx.Node, tuple[int, fx.Node]]  # what leaves a mixture → its number, what enters it
    digests: dict[fx.Node, str]  # equal for equal computations of equal inputs, whatever the values of the parameters

    @staticmethod
    def of(program: Program, mixtures: Sequence[str]) -> Surroundings:
        """`mixtures` are paths of modules, each of which is called once."""
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
        return hashed(node.op, str(node.target), *(part for part in self.arguments(node)))

    def held(self, node: fx.Node) -> tuple[Any, ...]:
        """What a placeholder stands for."""
        program, value = self.program, node.meta.get("val")
        shape = tuple(getattr(value, "shape", ()))
        if node in program.parameters:
            return "parameter", shape
        if node in program.inputs:
            return "input", program.inputs[node]
        constant = program.values.get(program.constants.get(node, ""))
        return "held", shape, constant.tolist() if constant is not None and not constant.is_meta else None

    def arguments(self, node: fx.Node) -> list[str]:
        """The arguments of a node by their digests, in an order of their own where their order does not matter."""
        kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACES}
        said = [repr(fx.node.map_arg(one, lambda operand: Quoted(self.digests[operand]))) for one in (*node.args, kwargs)]
        return [*sorted(said[:2]), *said[2:]] if node.target in COMMUTES else said

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """What a node is computed from; of two that may be swapped the one of the lesser digest first."""
        if node in self.ends:
            return [self.ends[node][1]]
        operands = list(node.all_input_nodes)
        if node.target in COMMUTES:
            return sorted(operands, key=lambda one: self.digests[one])
        return operands

    def slice_of(self, node: fx.Node) -> list[fx.Node]:
        """What `node` is computed from, in the order of the graph."""
        seen: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting.extend(self.operands(one))
        return [one for one in self.program.graph.nodes if one in seen]

    def place(self, node: fx.Node) -> str:
        """A node in words: the operation, and the module it is in."""
        program = self.program
        if node in program.parameters:
            return f"the parameter {program.parameters[node]} {'×'.join(map(str, self.held(node)[1]))}"
        call = program.owner.get(node)
        where = call.path if call is not None and call.path else "the model's own code"
        return f"{getattr(node.target, '__name__', node.target)} in {where}"


class Quoted(str):
    """Text that is its own `repr`."""

    def __repr__(self) -> str:
        return str(self)


def hashed(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def call_of(program: Program, path: str) -> Call:
    """The one call of a module; raises `LookupError` where it is called never or twice."""
    calls = [call for call in program.calls if call.path == path]
    if len(calls) != 1 or not calls[0].inputs or not calls[0].outputs:
        raise LookupError(f"{path} is called {len(calls)} times")
    return calls[0]


def logits_in(program: Program) -> fx.Node:
    """The output that a model is for."""
    return program.outputs.get(LOGITS) or next(iter(program.outputs.values()))


def first_difference(one: Surroundings, other: Surroundings) -> str:
    """What of the one graph is the first that the other does not compute, and the reverse; "" where the graphs are equal."""
    ours, theirs = (side.slice_of(logits_in(side.program)) for side in (one, other))
    known, there = {one.digests[node] for node in ours}, {other.digests[node] for node in theirs}
    if one.digests[logits_in(one.program)] == other.digests[logits_in(other.program)]:
        return ""
    first = next((node for node in ours if one.digests[node] not in there), None)
    its = next((node for node in theirs if other.digests[node] not in known), None)
    here = one.place(first) if first is not None else "nothing"
    return f"{here} is not in it; it has {other.place(its) if its is not None else 'nothing'} there"


def matched_parameters(one: Surroundings, other: Surroundings) -> dict[str, str]:
    """For each parameter of `other` outside its mixtures the one of `one` at its place; raises `LookupError` for two at one place.

    The graphs are equal.
    """
    found: dict[str, str] = {}
    seen: set[tuple[fx.Node, fx.Node]] = set()
    waiting = [(logits_in(one.program), logits_in(other.program))]
    while waiting:
        pair = waiting.pop()
        if pair in seen:
            continue
        seen.add(pair)
        ours, theirs = pair
        if ours in one.program.parameters:
            name = other.program.parameters[theirs]
            if found.setdefault(name, one.program.parameters[ours]) != one.program.parameters[ours]:
                raise LookupError(f"{name} would have to be two parameters at once")
        waiting.extend(zip(one.operands(ours), other.operands(theirs), strict=True))
    return found
