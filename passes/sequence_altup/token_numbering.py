"""Layers that number the tokens themselves, by how many tokens they receive: of every k-th token the numbers would be others.

A table cut to the number of tokens may still be stride-invariant, the same for every k-th token as for as many in a row: which of
two tokens is earlier is, how far apart they are is not. A causal mask that a layer keeps as a buffer is such a table; a sliding
window or a table of positions is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from retrofit.sdk import Dataflow, op, shape

CUTS = ("slice", "narrow")


def numbers_tokens(node: fx.Node, flow: Dataflow, length: int) -> bool:
    """Whether the operation computes a value for each of `length` tokens from nothing but their number."""
    if node in flow.depends or length not in (shape(node) or ()):
        return False
    if op(node) in CUTS:
        return length not in (shape(node.args[0]) or ())  # the beginning of a longer table
    tables = [part for part in node.all_input_nodes if part in flow.program.buffers or part in flow.program.parameters]
    return op(node) in ("arange", "linspace") or (op(node) in ("index", "index_select", "embedding") and bool(tables))


def length_cut_tables(node: fx.Node, flow: Dataflow, length: int) -> list[tuple[Tensor, tuple[int, ...]]] | None:
    """The longer tables of which a numbering is the beginning, and for each the dimensions that are cut to the number of tokens.

    None where it is no such cut, or where weights or inputs enter the tables. On the meta device they have no values.
    """
    if op(node) not in CUTS:
        return None
    found = []
    for end in last_cuts(node, flow):
        table = value_before_cut(end, flow, length)
        if table is None or table.dim() != len(shape(end) or ()):
            return None
        found.append((table, tuple(dim for dim, extent in enumerate(shape(end) or ()) if extent == length != table.shape[dim])))
    return found


def last_cuts(node: fx.Node, flow: Dataflow) -> Iterator[fx.Node]:
    """The cut `node` where anything but a further cut reads it, and the last of the further cuts."""
    further = [user for user in flow.uses[node] if op(user) in CUTS]
    if len(further) < len(flow.uses[node]):
        yield node
    for user in further:
        yield from last_cuts(user, flow)


def value_before_cut(node: fx.Node, flow: Dataflow, length: int) -> Tensor | None:
    """The node's value without the cuts to `length`, computed from buffers and constants; None where anything else enters it."""
    program = flow.program
    if node in flow.depends:
        return None
    if node.op == "placeholder":
        return program.values.get(program.buffers.get(node, program.constants.get(node, "")))
    operands: dict[fx.Node, Any] = {part: value_before_cut(part, flow, length) for part in node.all_input_nodes}
    if any(one is None for one in operands.values()):
        return None
    if op(node) in CUTS and (length, True) in zip(shape(node) or (), cut_dims(node), strict=True):
        return operands[node.args[0]]  # type: ignore[index,no-any-return]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value if isinstance(value, Tensor) else None


def cut_dims(node: fx.Node) -> list[bool]:
    """For each dimension whether the cut made it shorter."""
    return [one != other for one, other in zip(shape(node) or (), shape(node.args[0]) or (), strict=True)]


def is_stride_invariant(table: Tensor, dims: tuple[int, ...], k: int) -> bool:
    """Whether the table is the same for every k-th token as for as many in a row."""
    every = first = table
    for dim in dims:
        size = table.shape[dim]
        every = every.index_select(dim, torch.arange(0, size, k, device=table.device))
        first = first.narrow(dim, 0, -(-size // k))
    return bool(dims) and torch.equal(every, first)
