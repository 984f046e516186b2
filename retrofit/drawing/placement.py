"""Positions along the residual streams: inputs of stacks, users of stem modules, places of norms.

All positions are read from the data flow. A part that is not in the graph is not placed; names are not used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import networkx

from retrofit.anatomy import Anatomy
from retrofit.anatomy.parts import Branch, Layer


@dataclasses.dataclass(frozen=True)
class Norms:
    """The norms of a layer by the place where they act; branches are numbered by their position in the layer."""

    before: dict[int, tuple[str, ...]]  # between the stream and the branch
    after: dict[int, tuple[str, ...]]  # between the branch and its addition
    stream: dict[int, tuple[str, ...]]  # on the stream itself, after the addition of that branch; -1: before the first
    unplaced: tuple[str, ...]


class Placement:
    """The positions of the parts of `anatomy`, found in its graph."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.graph = anatomy.graph
        self.stacks = anatomy.stacks

    @functools.cached_property
    def order(self) -> dict[str, int]:
        return {node: position for position, node in enumerate(self.graph)}

    @functools.cached_property
    def nodes_of(self) -> dict[str, list[str]]:
        """Return the nodes computed in each module and its children, in order."""
        found: dict[str, list[str]] = {}
        for node, module in self.graph.nodes(data="module"):
            parts = (module or "").split(".")
            for depth in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:depth]), []).append(node)
        return found

    @functools.cached_property
    def before_entry(self) -> list[set[str]]:
        """Return for each stack the ancestors of its stream, down to the layers of other stacks."""
        return [self.ancestors(stack.entry, set(self.layer_boundaries(index))) for index, stack in enumerate(self.stacks)]

    @functools.cached_property
    def after_exit(self) -> list[set[str]]:
        """Return for each stack the nodes computed from its result."""
        return [self.descendants(stack.exit) for stack in self.stacks]

    def ancestors(self, node: str, stop: Iterable[str] = ()) -> set[str]:
        """Return the backward slice of `node` up to and including the nodes in `stop`."""
        return reachable(self.graph.pred, node, set(stop))

    def descendants(self, node: str) -> set[str]:
        return reachable(self.graph.succ, node, set())

    def layer_boundaries(self, index: int) -> dict[str, int]:
        """Return the nodes between the layers of all stacks but `index`, each with its stack."""
        others = [(other, stack) for other, stack in enumerate(self.stacks) if other != index]
        return {node: other for other, stack in others for node in (stack.exit, *(layer.exit for layer in stack.layers))}

    def stacks_feeding(self, index: int) -> list[int]:
        """Return the stacks from which the stream of stack `index` starts."""
        boundaries = self.layer_boundaries(index)
        return sorted({boundaries[node] for node in self.before_entry[index] & boundaries.keys()})

    def nodes_from_stack(self, index: int, source: int) -> set[str]:
        """Return the nodes from which the stream of stack `index` starts that are computed from stack `source`."""
        before, boundaries = self.before_entry[index], self.layer_boundaries(index)
        starts = [node for node in before if boundaries.get(node) == source]
        return {node for start in starts for node in self.descendants(start) & before if node != start}

    def stacks_read_by(self, index: int, branch: Branch) -> list[int]:
        """Return the stacks that a cross-attention reads; the previous one if the graph does not show it."""
        if branch.output not in self.graph:
            return [index - 1] if index else []
        boundaries = self.layer_boundaries(index)
        return sorted(
            {boundaries[node] for node in self.ancestors(branch.output, {*boundaries, branch.source}) & boundaries.keys()}
        )

    def stacks_computed_from(self, nodes: Iterable[str]) -> tuple[int, ...]:
        """Return the stacks whose streams are computed from `nodes`."""
        targets = set(nodes)
        return tuple(index for index, before in enumerate(self.before_entry) if before & targets)

    def last_stack_before(self, nodes: Iterable[str]) -> int | None:
        """Return the last stack from which `nodes` are computed."""
        targets = set(nodes)
        return max((index for index, after in enumerate(self.after_exit) if after & targets), default=None)

    def inputs_of(self, index: int) -> list[str]:
        """Return the model's inputs from which the stream of stack `index` starts."""
        return [
            node
            for node in sorted(self.before_entry[index] & self.graph.nodes, key=self.order.__getitem__)
            if not self.graph.pred[node] and self.graph.nodes[node].get("depends") and not self.graph.nodes[node].get("parameter")
        ]

    def norms(self, layer: Layer) -> Norms:
        """Return where each norm of `layer` acts, except norms inside a branch, between its matrices."""
        before: dict[int, tuple[str, ...]] = {}
        after: dict[int, tuple[str, ...]] = {}
        stream: dict[int, tuple[str, ...]] = {}
        unplaced = []
        local = self.between(layer.entry, layer.exit)
        for norm in layer.norms:
            nodes = [node for node in self.nodes_of.get(norm, [norm]) if node in local]
            if not nodes:
                unplaced.append(norm)
                continue
            outlet = nodes[-1]
            up = reachable(local.pred, outlet, set())
            down = reachable(local.succ, outlet, set())
            branches = [
                index
                for index, branch in enumerate(layer.branches)
                if branch.source in up and branch.source != outlet and branch.output in down
            ]
            for index in branches:
                weights = self.weight_products(layer.branches[index])
                if not (weights & up - self.ancestors(layer.branches[index].source)):
                    before[index] = (*before.get(index, ()), norm)
                elif not weights & down:
                    after[index] = (*after.get(index, ()), norm)
            if not branches:
                last = max((index for index, branch in enumerate(layer.branches) if branch.add in up), default=-1)
                stream[last] = (*stream.get(last, ()), norm)
        return Norms(before, after, stream, tuple(unplaced))

    def between(self, early: str, late: str) -> networkx.DiGraph:
        """Return the part of the graph on the paths from `early` to `late`, including both."""
        if early not in self.graph or late not in self.graph:
            return networkx.DiGraph()
        after = self.descendants(early)
        return self.graph.subgraph({node for node in self.ancestors(late) if node in after})

    def weight_products(self, branch: Branch) -> set[str]:
        """Return the nodes that multiply by the weights of `branch`."""
        names = {projection.name for projection in branch.projections if projection.name}
        pending = [node for node, name in self.parameter_nodes if name in names]
        found: set[str] = set()
        while pending:
            for user in self.graph.succ[pending.pop()]:
                if self.graph.nodes[user].get("depends", True):
                    found.add(user)
                else:
                    pending.append(user)
        return found

    @functools.cached_property
    def parameter_nodes(self) -> list[tuple[str, str]]:
        return [(node, name) for node, name in self.graph.nodes(data="parameter") if name]


def reachable(neighbours: networkx.classes.coreviews.AdjacencyView, start: str, stop: set[str]) -> set[str]:
    """Return `start` and all nodes reachable from it without passing through a node in `stop`; empty if it is not a node."""
    if start not in neighbours:
        return set()
    seen, pending = {start}, [start]
    while pending:
        node = pending.pop()
        if node in stop and node != start:
            continue
        for neighbour in neighbours[node]:
            if neighbour not in seen:
                seen.add(neighbour)
                pending.append(neighbour)
    return seen
