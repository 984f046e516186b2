"""Matching and replacing: where a graph computes what a function does, and another function in its place.

A pattern is a function of tensors as one writes it in PyTorch. It is captured as models are, so that it has the form that graphs
have, whichever of its names an operation was called by, its defaults filled in. What stands in a graph and is nearly the pattern is
said too, with the node at which it differs and how.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.alike import attribute, same_value
from retrofit.capture import Program, capture
from retrofit.dataflow import computed_from
from retrofit.errors import DoesNotFitError
from retrofit.graph_module import KEPT, GraphPart
from retrofit.ops import op
from retrofit.outlining import finish

Owner = fx.GraphModule | GraphPart
Bound = dict[fx.Node, Any]  # what stands for each node of the pattern
COMMUTING = frozenset("add mul maximum minimum".split())


@dataclasses.dataclass(frozen=True)
class Match:
    """A place where the graph computes the pattern."""

    result: fx.Node
    nodes: tuple[fx.Node, ...]  # the operations, the result's the last
    arguments: dict[str, fx.Node]  # of the pattern, by name


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A place where at least half of the pattern's operations are what it says."""

    result: fx.Node
    agree: int
    of: int
    why: str

    def __str__(self) -> str:
        return f"{self.result.name}: {self.agree} of {self.of} operations agree; {self.why}"


@dataclasses.dataclass(frozen=True)
class Found:
    """The places of a pattern in a graph; no two matches share an operation."""

    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]


def find(owner: Owner, pattern: Callable[..., Tensor], example_inputs: Mapping[str, Tensor]) -> Found:
    """Where the graph of `owner` computes the pattern, and where nearly.

    `example_inputs` are arguments of the pattern, by name, with as many dimensions as in the graph, of any size from 2 on; sizes
    that hang on theirs may be any in the graph, numbers that the pattern writes out are compared. Raises `DoesNotFitError` for a
    pattern of more than one result, `CaptureError` for one that cannot be captured.
    """
    return places(owner, *captured(pattern, example_inputs))


def places(owner: Owner, program: Program, result: fx.Node) -> Found:
    """Where the graph of `owner` computes the program's result, and where nearly."""
    matches: list[Match] = []
    misses: list[NearMiss] = []
    taken: set[fx.Node] = set()
    read = computed_from([result])
    operations = [node for node in program.graph.nodes if is_operation(node) and node in read]
    for node in owner.graph.nodes:
        if node.op != "call_function" or op(node) != op(result):
            continue
        search = Search(owner, program)
        for bound in search.agree(result, node, {}):
            nodes = {bound[one] for one in operations}
            outside = next(((one, user) for one in nodes - {node} for user in one.users if user not in nodes), None)
            if outside is not None:
                search.note(bound, f"{outside[0].name} is read by {outside[1].name} too, which is outside the pattern")
            elif nodes & taken:
                search.note(bound, "some of them belong to another place of the pattern")
            else:
                taken |= nodes
                arguments = {name: bound[one] for one, name in program.inputs.items() if one in bound}
                matches.append(Match(node, tuple(one for one in owner.graph.nodes if one in nodes), arguments))
                break
        else:
            if 2 * search.furthest >= len(operations) > 1:
                misses.append(NearMiss(node, search.furthest, len(operations), search.why))
    return Found(tuple(matches), tuple(misses))


def replace(owner: Owner, pattern: Callable[..., Tensor], by: Callable[..., Tensor], example_inputs: Mapping[str, Tensor]) -> Found:
    """Wherever the graph of `owner` computed the pattern it computes `by`, a function of the same arguments.

    The new result has the shape, the dtype and the line of code of the old, the nodes before it the line, and their shapes once
    `retrofit.propagation.propagate` has told them; the graph is without dead code and well-formed. What was matched is returned,
    its nodes gone, and what was nearly. Raises as `find` does, before anything is changed, and where `by` reads what the pattern
    does not.
    """
    sought, (program, result) = captured(pattern, example_inputs), captured(by, example_inputs)
    unknown = sorted(arguments_of(program, result) - arguments_of(*sought))
    if unknown:
        why, remedy = "the pattern does not, so nothing stands for it", "let both read the same arguments"
        raise DoesNotFitError(f"the replacement reads {unknown[0]}", why=why, remedy=remedy)
    found = places(owner, *sought)
    new: dict[fx.Node, fx.Node] = {}  # by the result that it stands for: what the next match is handed may be one of these
    for match in found.matches:
        new[match.result] = put(owner, match, program, result, new)
    finish(owner)
    return found


def put(owner: Owner, match: Match, program: Program, result: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The program's nodes stand before the match's result, and what read that reads theirs."""
    given = {name: new.get(node, node) for name, node in match.arguments.items()}
    made: dict[fx.Node, fx.Node] = {node: given[name] for node, name in program.inputs.items() if name in given}
    old, read = match.result, computed_from([result])
    with owner.graph.inserting_before(old):
        for node in (one for one in program.graph.nodes if one in read):
            if node in program.constants:
                made[node] = owner.graph.get_attr(held(owner, program.values[program.constants[node]]))
            elif node.op == "call_function":
                made[node] = owner.graph.node_copy(node, made.__getitem__)
                if isinstance(node.kwargs.get("device"), torch.device) and given:  # constants are made where the arguments are
                    with owner.graph.inserting_before(made[node]):
                        device = owner.graph.call_function(getattr, (next(iter(given.values())), "device"))
                    made[node].kwargs = {**made[node].kwargs, "device": device}
                made[node].meta = {key: old.meta[key] for key in KEPT if key in old.meta and key != "val"}
    if result.op == "call_function":
        made[result].meta = dict(old.meta)
    old.replace_all_uses_with(made[result])
    owner.graph.erase_node(old)
    return made[result]


def held(owner: nn.Module, value: Tensor) -> str:
    """The name under which `owner` holds the value, a constant, from now on."""
    number = 0
    while hasattr(owner, f"constant_{number}"):
        number += 1
    owner.register_buffer(f"constant_{number}", value, persistent=False)
    return f"constant_{number}"


def captured(function: Callable[..., Tensor], example_inputs: Mapping[str, Tensor]) -> tuple[Program, fx.Node]:
    """The function's program of any sizes, and its result."""
    name = getattr(function, "__name__", "the function")
    module: nn.Module = type(name, (nn.Module,), {"forward": staticmethod(function)})()
    taken = inspect.signature(function).parameters
    program = capture(module, {key: value.clone() for key, value in example_inputs.items() if key in taken}, dynamic=True)
    if len(program.outputs) != 1:
        raise DoesNotFitError(f"{name} is no pattern", why=f"it has {len(program.outputs)} results", remedy="return one tensor")
    (result,) = program.outputs.values()
    return program, result


def arguments_of(program: Program, result: fx.Node) -> set[str]:
    """The arguments that the result is computed from."""
    read = computed_from([result])
    return {name for node, name in program.inputs.items() if node in read}


class Search:
    """The search for a pattern at one node, with how far it came at best and what stopped it there."""

    def __init__(self, owner: Owner, program: Program) -> None:
        self.owner, self.program = owner, program
        self.furthest, self.why = 0, ""

    def note(self, bound: Bound, why: str) -> None:
        """What is bound agrees, and no more, because of `why`."""
        agree = sum(map(is_operation, bound))
        if agree > self.furthest:
            self.furthest, self.why = agree, why

    def agree(self, ours: fx.Node, its: Any, bound: Bound) -> Iterator[Bound]:
        """Every way in which `its` is what the node `ours` of the pattern says, given what is bound already."""
        if ours in bound:
            if bound[ours] is its:
                yield bound
            else:
                self.note(bound, f"{name_of(its)} should be {bound[ours].name}, as the pattern reads one value twice")
        elif is_size(ours):
            if isinstance(its, int) or (isinstance(its, fx.Node) and is_size(its)):
                yield bound
            else:
                self.note(bound, f"{name_of(its)} should be a size")
        elif not isinstance(its, fx.Node) or is_size(its):
            self.note(bound, f"{name_of(its)} should be {described(ours, self.program)}")
        elif ours in self.program.inputs:
            yield {**bound, ours: its}
        elif ours in self.program.constants:
            if its.op == "get_attr" and same_value(attribute(self.owner, str(its.target)), self.constant(ours)):
                yield {**bound, ours: its}
            else:
                self.note(bound, f"{its.name} should be {described(ours, self.program)}")
        elif its.op != "call_function" or op(its) != op(ours):
            self.note(bound, f"{its.name} should be {described(ours, self.program)}")
        else:
            mine, others = operands(ours), operands(its)
            for turned in orders(op(ours), mine):
                yield from self.all_agree(turned, others, {**bound, ours: its}, its)

    def all_agree(self, mine: list[Any], others: list[Any], bound: Bound, where: fx.Node) -> Iterator[Bound]:
        """Every way in which a list of operands is what the pattern says."""
        if len(mine) != len(others):
            self.note(bound, f"{where.name} has {len(others)} operands or elements where the pattern has {len(mine)}")
        elif not mine:
            yield bound
        else:
            for one in self.one_agrees(mine[0], others[0], bound, where):
                yield from self.all_agree(mine[1:], others[1:], one, where)

    def one_agrees(self, mine: Any, its: Any, bound: Bound, where: fx.Node) -> Iterator[Bound]:
        if isinstance(mine, fx.Node):
            yield from self.agree(mine, its, bound)
        elif isinstance(mine, (list, tuple)) and isinstance(its, (list, tuple)):
            yield from self.all_agree(list(mine), list(its), bound, where)
        elif type(mine) is type(its) and mine == its:
            yield bound
        else:
            self.note(bound, f"{where.name} is given {name_of(its)} where the pattern has {mine}")

    def constant(self, node: fx.Node) -> Tensor:
        return self.program.values[self.program.constants[node]]


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number; that of a weight, of which nothing is noted, is none."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def is_operation(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_size(node)


def operands(node: fx.Node) -> list[Any]:
    """What the operation is given, in the order of its schema, with its defaults."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [*node.args, *node.kwargs.values()]
    return [
        node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(node.target._schema.arguments)
    ]


def orders(name: str, mine: list[Any]) -> Iterator[list[Any]]:
    """The orders in which the operands may come."""
    yield mine
    if name in COMMUTING and len(mine) > 1:
        yield [mine[1], mine[0], *mine[2:]]


def described(node: fx.Node, program: Program) -> str:
    """A node of the pattern, to a reader."""
    if node in program.inputs:
        return f"a tensor, {program.inputs[node]} of the pattern"
    if node in program.constants:
        return "a constant of the pattern's value"
    return f"the result of {op(node)}"


def name_of(value: Any) -> str:
    return f"{value.name}, of {op(value)}," if isinstance(value, fx.Node) and value.op == "call_function" else str(value)
