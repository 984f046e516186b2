"""The data flow of a captured program: who depends on whom, and what a heavy operation lies between.

Sets of ancestors are bit masks (Python integers), one bit a node, so that every question below is one `&`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import networkx
from torch import fx

from retrofit.program.aten_ops import LIKE, carried, is_heavy, op, shape
from retrofit.program.capture import Call, Program


class Dataflow:
    """Ancestors, heavy ancestors and carried operands of every node of `program`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.ancestors: dict[fx.Node, int] = {}  # the node itself included
        self.heavy_ancestors: dict[fx.Node, int] = {}  # those with a heavy operation on the way, the node's own included
        self.depends: set[fx.Node] = set()  # on what the inputs contain, not only on their shapes
        self.carries: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            self.visit(node)
        self.uses = {node: [user for user in node.users if not op(user).startswith("_assert")] for node in self.nodes}
        held = (node for node in self.nodes if node in self.depends and node.op == "call_function")
        self.computed = [node for node in held if not op(node).startswith("_assert")]  # what is made of the inputs' contents

    def visit(self, node: fx.Node) -> None:
        operands = [] if op(node) in LIKE else [part for part in node.all_input_nodes if part in self.position]
        bits, heavy = 1 << self.position[node], 0
        for part in operands:
            bits |= self.ancestors[part]
            heavy |= self.ancestors[part] if is_heavy(node) else self.heavy_ancestors[part]
        self.ancestors[node], self.heavy_ancestors[node] = bits, heavy
        if node in self.program.inputs or any(part in self.depends for part in operands):
            self.depends.add(node)
        self.carries[node] = carried(node, self.depends)

    @functools.cached_property
    def named(self) -> dict[str, fx.Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> fx.Node:
        """The node called `name`."""
        return self.named[name]

    def bit(self, node: fx.Node) -> int:
        return 1 << self.position[node]

    def reaches(self, early: fx.Node, late: fx.Node) -> bool:
        """Whether the value of `late` is computed from that of `early`."""
        return bool(self.ancestors[late] & self.bit(early))

    def heavily_reaches(self, early: fx.Node, late: fx.Node) -> bool:
        return bool(self.heavy_ancestors[late] & self.bit(early))

    def between(self, early: fx.Node, late: fx.Node) -> list[fx.Node]:
        """The nodes on the ways from `early` (left out) to `late` (included), in order."""
        wanted, bit = self.ancestors[late], self.bit(early)
        first, last = self.position[early], self.position[late]
        return [node for node in self.nodes[first + 1 : last + 1] if wanted & self.bit(node) and self.ancestors[node] & bit]

    def upward(self, node: fx.Node) -> list[fx.Node]:
        """`node` and what it carries, as far up as there is exactly one carried operand."""
        chain = [node]
        while len(self.carries[chain[-1]]) == 1:
            chain.append(self.carries[chain[-1]][0])
        return chain

    def call_of(self, node: fx.Node) -> Call:
        return self.program.owner.get(node, self.program.root)

    def parameters_of(self, nodes: list[fx.Node]) -> dict[str, int]:
        """Name and element count of every parameter that enters the computation of `nodes` directly or through layout."""
        found: dict[str, int] = {}
        pending, seen = list(nodes), set(nodes)
        while pending:
            for part in pending.pop().all_input_nodes:
                if part in self.program.parameters:
                    size = 1
                    for extent in shape(part) or ():
                        size *= extent
                    found[self.program.parameters[part]] = size
                elif part not in seen and part not in self.depends and part.op == "call_function":
                    seen.add(part)
                    pending.append(part)
        return found

    def graph(self) -> networkx.DiGraph:
        """The data flow as a `networkx` graph: nodes by name, with operation, shape and module path."""
        graph = networkx.DiGraph()
        for node in self.nodes:
            graph.add_node(
                node.name,
                op=op(node),
                shape=shape(node),
                module=self.call_of(node).path,
                call=self.call_of(node).index,
                parameter=self.program.parameters.get(node),
                depends=node in self.depends,
            )
            graph.add_edges_from((part.name, node.name) for part in node.all_input_nodes if part in self.position)
        return graph


def backward_slice(results: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that the results are computed from, themselves included."""
    found: set[fx.Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def forward_slice(sources: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources, and those of the nodes, which come in order, that are computed from one of them."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
