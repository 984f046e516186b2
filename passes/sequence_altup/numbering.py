"""Layers that number the tokens they are handed, by how many they are: of every k-th token the numbers would be others.

A table cut to the number of tokens may still say the same of every k-th token as of as many in a row: which of two is earlier does,
how far apart they are does not. A causal mask that a layer keeps as a buffer is such a table, a window of it or positions are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from retrofit.sdk import Dataflow, op, shape

CUTS = ("slice", "narrow")


def is_numbering(node: fx.Node, flow: Dataflow, length: int) -> bool:
    """Whether the operation makes something of each of `length` tokens of nothing but how many they are."""
    if node in flow.depends or length not in (shape(node) or ()):
        return False
    if op(node) in CUTS:
        return length not in (shape(node.args[0]) or ())  # so much of a longer table
    tables = [part for part in node.all_input_nodes if part in flow.program.buffers or part in flow.program.parameters]
    return op(node) in ("arange", "linspace") or (op(node) in ("index", "index_select", "embedding") and bool(tables))


def tables_of(node: fx.Node, flow: Dataflow, length: int) -> list[tuple[Tensor, tuple[int, ...]]] | None:
    """What a numbering cuts from longer tables: each table and the dimensions that are cut to the number of tokens.

    None where it is no such cut, or the tables are made of weights or inputs; on the meta device they have no values.
    """
    if op(node) not in CUTS:
        return None
    found = []
    for end in ends(node, flow):
        table = value(end, flow, length)
        if table is None or table.dim() != len(shape(end) or ()):
            return None
        found.append((table, tuple(dim for dim, extent in enumerate(shape(end) or ()) if extent == length != table.shape[dim])))
    return found


def ends(node: fx.Node, flow: Dataflow) -> Iterator[fx.Node]:
    """`node`, where anything else reads it than a further cut, and the ends of those."""
    further = [user for user in flow.uses[node] if op(user) in CUTS]
    if len(further) < len(flow.uses[node]):
        yield node
    for user in further:
        yield from ends(user, flow)


def value(node: fx.Node, flow: Dataflow, length: int) -> Tensor | None:
    """The node's value before anything was cut to `length`, where buffers and numbers in the code are all it is made of."""
    program = flow.program
    if node in flow.depends:
        return None
    if node.op == "placeholder":
        return program.values.get(program.buffers.get(node, program.constants.get(node, "")))
    known: dict[fx.Node, Any] = {part: value(part, flow, length) for part in node.all_input_nodes}
    if any(one is None for one in known.values()):
        return None
    if op(node) in CUTS and (length, True) in zip(shape(node) or (), changed(node), strict=True):
        return known[node.args[0]]  # type: ignore[index,no-any-return]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    return made if isinstance(made, Tensor) else None


def changed(node: fx.Node) -> list[bool]:
    """Of each dimension of a cut whether it is another extent now."""
    return [one != other for one, other in zip(shape(node) or (), shape(node.args[0]) or (), strict=True)]


def is_same_of_anchors(table: Tensor, dims: tuple[int, ...], k: int) -> bool:
    """Whether the table says the same of every k-th token as of as many in a row."""
    every = first = table
    for dim in dims:
        size = table.shape[dim]
        every = every.index_select(dim, torch.arange(0, size, k, device=table.device))
        first = first.narrow(dim, 0, -(-size // k))
    return bool(dims) and torch.equal(every, first)
