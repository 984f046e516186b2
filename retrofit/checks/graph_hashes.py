"""A hash of the graph of every module call, by which unannounced changes are found.

A module is whole where all of its parameters are kept, or moved together. Of each call of such a module the operations form a
graph: what is computed from what, by which operation, with which real constants. Sizes are left out, for a layer may run on fewer
tokens, and so is how often a module is called, for it may be run block by block. So is what changes no value, only how it lies in
memory (`contiguous`, or whether a reshape is a view), which the strides of what comes in decide, and to which floating-point type
values are cast, which the type of what comes in decides. Two calls agree where their graphs have one Weisfeiler-Lehman hash:
isomorphic graphs do, and others hardly ever.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import networkx
from torch import Tensor, fx

from retrofit.passbase.protocol import Rewrite
from retrofit.program.aten_ops import CAST, op
from retrofit.program.dataflow import backward_slice
from retrofit.program.program import Call, Program
from retrofit.surgery.edit import Fate

IN_MEMORY = frozenset("contiguous clone alias detach lift_fresh lift_fresh_copy expand expand_as".split())
SAME = {"view": "reshape", "_unsafe_view": "reshape", "chunk": "split"}  # one operation: strides or the capture decide which
ROUNDS = 4  # of the hash: the radius of the neighbourhood of an operation
GraphHashes = dict[str, frozenset[str]]  # module path → the hashes of its calls


def hash_modules(program: Program) -> GraphHashes:
    """The hashes of every module that is called."""
    reached, weights = backward_slice(program.outputs.values()), made_of_weights(program)
    inside: dict[Call, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node in reached and node.op == "call_function":
            for call in program.owner[node].chain if node in program.owner else ():
                inside.setdefault(call, []).append(node)
    found: dict[str, set[str]] = {}
    for call, nodes in inside.items():
        if call.path:
            found.setdefault(call.path, set()).add(hash_nodes(nodes, weights))
    return {path: frozenset(hashes) for path, hashes in found.items()}


def made_of_weights(program: Program) -> set[fx.Node]:
    """The nodes that depend on parameters and not on the inputs.

    What depends on neither, a table of positions or a causal mask, may come from the inputs where a layer runs on some tokens only.
    """
    inputs: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for node in program.graph.nodes:
        for found, origins in ((inputs, program.inputs), (weights, program.parameters)):
            if node in origins or any(part in found for part in node.all_input_nodes):
                found.add(node)
    return weights - inputs


def hash_nodes(nodes: list[fx.Node], weights: set[fx.Node]) -> str:
    """The hash of the graph of some nodes and their inputs; names and sizes do not count."""
    graph = networkx.DiGraph()
    own = set(nodes)
    for node in nodes:
        if keeps_values(node):
            continue
        name = SAME.get(op(node), op(node))
        graph.add_node(node, label=f"{name} {constants(node)}")
        for part in map(value_of, node.all_input_nodes):
            source: object = part
            if part not in own:  # one source a use: whether two inputs are one value is decided outside
                source = part, node
                graph.add_node(source, label="weight" if part in weights else "input")
            graph.add_edge(source, node)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # networkx warns that its other versions hash differently
        digest: str = networkx.weisfeiler_lehman_graph_hash(graph, node_attr="label", iterations=ROUNDS)
    return digest


def value_of(node: fx.Node) -> fx.Node:
    """The node that computed the values which this one only lays out in memory."""
    while keeps_values(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def keeps_values(node: fx.Node) -> bool:
    """Whether the operation only lays out its values, or casts them between floating-point types: what comes in decides which."""
    if op(node) in CAST and node.all_input_nodes:
        before, after = (one.meta.get("val") for one in (node.all_input_nodes[0], node))
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            return before.dtype == after.dtype or (before.is_floating_point() and after.is_floating_point())
    return op(node) in IN_MEMORY


def constants(node: fx.Node) -> tuple[Any, ...]:
    """The real numbers among the node's arguments."""
    return tuple(value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float))


def changed_modules(before: GraphHashes, now: GraphHashes, fates: Mapping[str, Fate], rewrites: Iterable[Rewrite]) -> list[str]:
    """The modules, by their path now, that are whole and in no approximate site, and no longer compute what they did."""
    approximate = [f"{site.name}." if site.name else "" for rewrite in rewrites if not rewrite.exact for site in rewrite.sites]
    changed = []
    for path, place in whole_modules(before, fates).items():
        announced = any(f"{place}.".startswith(site) for site in approximate)
        if not announced and place in now and now[place] != before[path]:
            changed.append(place)
    return changed


def whole_modules(paths: Iterable[str], fates: Mapping[str, Fate]) -> dict[str, str]:
    """Of the dense modules at `paths` the largest that are whole: their path in the dense model → their path now."""
    places: dict[str, set[str | None]] = {}
    names = Counter(fate.name for fate in fates.values())  # a weight with several names does not say which module it is in now
    for name, fate in fates.items():
        path = name.rpartition(".")[0]
        while path:
            rest = name[len(path) :]
            moved = fate.kind in ("kept", "moved") and fate.name.endswith(rest) and names[fate.name] == 1
            places.setdefault(path, set()).add(fate.name.removesuffix(rest) if moved else None)
            path = path.rpartition(".")[0]
    found = {path: place for path in paths if len(place_set := places.get(path, set())) == 1 and (place := next(iter(place_set)))}
    return {path: place for path, place in found.items() if not any(path.startswith(f"{other}.") for other in found)}
