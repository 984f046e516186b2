"""Products of flattened tokens, (batch·length, d), become products of tokens as they are, (batch, length, d).

Exporters to ONNX, and much hand-written code, flatten the tokens before a matrix product and unflatten its result. The product of
the unflattened tokens is the same, and its shape says what belongs to a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from retrofit.program.aten_ops import op
from retrofit.program.program import Program

VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))
PRODUCTS = frozenset(("linear", "matmul"))
SymbolicSizes = Mapping[fx.Node, tuple[Any, ...]]


def unflatten_products(program: Program, extents: SymbolicSizes) -> dict[fx.Node, fx.Node]:
    """No product of the program flattens tokens that all its users unflatten; returns those rewritten, each with a removed user.

    `extents` are the symbolic sizes of each node's value.
    """
    named = {
        *program.outputs.values(),
        *(node for call in program.calls for table in (call.inputs, call.outputs) for node in table.values()),
    }
    found: dict[fx.Node, fx.Node] = {}
    for node in list(program.graph.nodes):
        readers = unflattening_views(node, extents)
        if not readers or named & {node, node.args[0]}:  # a module takes or returns the flattened tokens
            continue
        flat, found[node] = node.args[0], readers[0]
        node.args = (flat.args[0], *node.args[1:])
        node.meta = {**node.meta, "val": readers[0].meta["val"]}
        for gone in (*readers, *(() if flat.users else (flat,))):
            program.replace_node(gone, node)
    return found


def unflattening_views(node: fx.Node, extents: SymbolicSizes) -> list[fx.Node]:
    """The users of a product of flattened tokens, if they are all views that unflatten the tokens again; else none."""
    flat = node.args[0] if node.args else None
    if op(node) not in PRODUCTS or not isinstance(flat, fx.Node) or op(flat) not in VIEWS:
        return []
    source = flat.args[0]
    assert isinstance(source, fx.Node)
    laid, made = extents[source], extents[node]
    if len(extents[flat]) != 2 or len(laid) < 3 or laid[-1] != extents[flat][-1]:
        return []
    readers = list(node.users)
    return readers if all(op(one) in VIEWS and extents[one] == (*laid[:-1], made[-1]) for one in readers) else []
