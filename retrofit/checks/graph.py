"""The graph and cost checks: the operations, outputs and cost of the captured graph.

Graph: captured again, the model equals the dense one outside of the announced rewrites, and its outputs have the same layout at
other batch sizes and lengths. Code that branches on values may take another branch for other values.

A module is whole if all of its parameters are kept, or moved together. The operations of each call of such a module form a graph:
operations, operands and real constants. Sizes are left out, because a layer may run on fewer tokens, and so is the number of calls,
because a module may run block by block. Operations that only change the layout in memory (`contiguous`, or whether a reshape is a
view) are left out because they follow the strides of the inputs; casts between floating-point types because they follow the inputs'
dtype. Two calls agree if their graphs have the same Weisfeiler-Lehman hash: isomorphic graphs do, and others hardly ever.

Cost: parameters and FLOPs of the graph are those that the rewrites claim, and an exact rewrite omits no work.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import networkx
from torch import Tensor, fx, nn

from retrofit.checks.divergence import unchanged_modules
from retrofit.checks.report import Finding, Raised, attempt, failed, format_layout, passed
from retrofit.checks.subject import Context, Layout, Subject
from retrofit.errors import first_few
from retrofit.inputs.optional_inputs import adds_arguments
from retrofit.inputs.probes import Inputs, describe, extent_of, is_per_token
from retrofit.passbase.protocol import Rewrite
from retrofit.program.aten_ops import CAST, op
from retrofit.program.cost import Cost, cost_of
from retrofit.program.dataflow import backward_slice
from retrofit.program.program import Call, Program
from retrofit.surgery import Fate
from retrofit.surgery.wrappers import Wrapper

Layouts = dict[str, Layout]


@dataclasses.dataclass(frozen=True)
class GraphMeasurement:
    """A captured graph and the layouts of the model's outputs."""

    capture_error: str  # why there is no graph; "" if there is one
    nodes: int
    branches: bool  # whether the code branches on the values of tensors
    hashes: GraphHashes  # of the calls of its modules
    layouts: tuple[Layouts | Raised, ...]  # for inputs of each shape


def measure_graph(subject: Subject, before: GraphMeasurement | None = None, context: Context | None = None) -> GraphMeasurement:
    """Return the graph and the layouts; modules are hashed if there is another model to compare them with."""
    program = attempt(lambda: subject.program)
    runs = [attempt(subject.run, shape) for shape in range(len(subject.shapes))]
    layouts = tuple(ran if isinstance(ran, Raised) else ran.layouts for ran in runs)
    if isinstance(program, Raised):
        return GraphMeasurement(program.error, 0, True, {}, layouts)
    compared = context is None or (context.has_reference and context.rewrites is not None)
    operations = sum(node.op == "call_function" for node in program.graph.nodes)
    return GraphMeasurement("", operations, program.branches, hash_modules(program) if compared else {}, layouts)


def judge_graph(now: GraphMeasurement, before: GraphMeasurement | None, context: Context) -> Finding:
    if now.capture_error:
        return failed("", now.capture_error)
    nodes = f"{now.nodes} nodes"
    if now.branches and before is not None and not before.branches:
        return failed(nodes, "it branches on the values of tensors, and the dense model does not")
    shapes = context.subject.shapes
    expected = before.layouts if before is not None else [layouts_for(now, shapes[0], shape, at) for at, shape in enumerate(shapes)]
    for inputs, layouts, right in zip(shapes, now.layouts, expected, strict=True):
        if isinstance(layouts, Raised):
            return failed(nodes, f"it does not run on {describe(inputs)}: {layouts.error}")
        assert not isinstance(right, Raised)  # the dense model ran on every shape
        wrong = [
            f"{name} is {format_or_missing(layouts.get(name))}, not {format_or_missing(layout)}"
            for name, layout in right.items()
            if layouts.get(name) != layout
        ]
        if wrong:
            return failed(nodes, f"on {describe(inputs)}, {'; '.join(wrong)}")
    other_branches = now.branches and not context.exact  # other values may take other branches
    if before is not None and context.rewrites is not None and not other_branches:
        changed = changed_modules(before.hashes, now.hashes, context.fates, context.rewrites, opened_modules(context.subject.model))
        if changed:
            return failed(nodes, f"changed, but not declared by the edit: {first_few(changed)}")
    return passed(f"{nodes}, {len(shapes)} shapes of inputs")


def layouts_for(now: GraphMeasurement, first_inputs: Inputs, inputs: Inputs, at: int) -> Layouts | Raised:
    """Return the layouts, (batch, length or not, …), for `inputs`, shape number `at`, derived from those for the first inputs.

    A size that was the batch's may be the batch's again, as in similarities of all rows: the actual layout decides.
    """
    first, actual = now.layouts[0], now.layouts[at]
    if isinstance(first, Raised):
        return first
    if adds_arguments(inputs, first_inputs):
        return {}  # unknown how many tokens an image adds
    pairs = [(value, inputs[name]) for name, value in first_inputs.items() if is_per_token(value)]
    lengths = {value.shape[1]: other.shape[1] for value, other in pairs}
    before, rows = extent_of(first_inputs)[0], extent_of(inputs)[0]

    def follows(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        found, _ = ((), None) if isinstance(actual, Raised) else actual.get(name, ((), None))
        leading = rows if shape[0] == before else shape[0]
        expected = (leading, *(lengths.get(extent, extent) for extent in shape[1:2]), *shape[2:])
        if len(found) != len(expected):
            return expected
        is_batch = (extent == before and other == rows for extent, other in zip(shape, found, strict=True))
        return tuple(rows if batch else extent for batch, extent in zip(is_batch, expected, strict=True))

    return {name: (follows(name, shape), dtype) for name, (shape, dtype) in first.items() if shape}


def format_or_missing(layout: Layout | None) -> str:
    return "missing" if layout is None else format_layout(*layout)


# ── Hashes of module calls ───────────────────────────────────────────────────────────────────────────────────────────────────────


IN_MEMORY = frozenset("contiguous clone alias detach lift_fresh lift_fresh_copy expand expand_as".split())
SAME = {"view": "reshape", "_unsafe_view": "reshape", "chunk": "split"}  # aliases of one operation: strides or the capture choose
ROUNDS = 4  # of the hash: radius of an operation's neighbourhood
GraphHashes = dict[str, frozenset[str]]  # module path → the hashes of its calls


def hash_modules(program: Program) -> GraphHashes:
    """Return the hashes of every module that is called."""
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
    """Return the nodes that depend on parameters and not on the inputs.

    Nodes that depend on neither, a position table or a causal mask, may come from the inputs if a layer runs on some tokens only.
    """
    inputs: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for node in program.graph.nodes:
        for found, origins in ((inputs, program.inputs), (weights, program.parameters)):
            if node in origins or any(part in found for part in node.all_input_nodes):
                found.add(node)
    return weights - inputs


def hash_nodes(nodes: list[fx.Node], weights: set[fx.Node]) -> str:
    """Return the hash of the graph of some nodes and their inputs, without names and sizes."""
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
        warnings.simplefilter("ignore", UserWarning)  # networkx warns that other versions of it hash differently
        digest: str = networkx.weisfeiler_lehman_graph_hash(graph, node_attr="label", iterations=ROUNDS)
    return digest


def value_of(node: fx.Node) -> fx.Node:
    """Return the node that computed the values which this node only lays out in memory."""
    while keeps_values(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def keeps_values(node: fx.Node) -> bool:
    """Return whether the operation only lays out its values or casts them between floating-point types."""
    if op(node) in CAST and node.all_input_nodes:
        before, after = (source.meta.get("val") for source in (node.all_input_nodes[0], node))
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            return before.dtype == after.dtype or (before.is_floating_point() and after.is_floating_point())
    return op(node) in IN_MEMORY


def constants(node: fx.Node) -> tuple[Any, ...]:
    """Return the real numbers among the node's arguments."""
    return tuple(value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float))


def opened_modules(model: nn.Module) -> frozenset[str]:
    """Return the paths of the modules whose wrappers substitute parts of them."""
    return frozenset(
        f"{path}.layer" for path, module in model.named_modules() if isinstance(module, Wrapper) and module.opens_layer
    )


def changed_modules(
    before: GraphHashes,
    now: GraphHashes,
    fates: Mapping[str, Fate],
    rewrites: Iterable[Rewrite],
    opened: Collection[str] = frozenset(),
) -> list[str]:
    """Return the modules, by present path, that are whole, outside approximate sites, and compute something else than before.

    For modules in `opened` only the parts are compared.
    """
    approximate = tuple(f"{site.name}." if site.name else "" for rewrite in rewrites if not rewrite.exact for site in rewrite.sites)
    return [
        place
        for path, place in whole_modules(before, fates, opened).items()
        if place in now and now[place] != before[path] and not f"{place}.".startswith(approximate)
    ]


def whole_modules(paths: Iterable[str], fates: Mapping[str, Fate], opened: Collection[str] = frozenset()) -> dict[str, str]:
    """Return the largest whole modules among the dense ones at `paths`: their dense path → their present path."""
    places: dict[str, set[str | None]] = {}
    names = Counter(fate.name for fate in fates.values())  # a weight with several names does not identify its module
    for name, fate in fates.items():
        path = name.rpartition(".")[0]
        while path:
            rest = name[len(path) :]
            moved = fate.kind in ("kept", "moved") and fate.name.endswith(rest) and names[fate.name] == 1
            places.setdefault(path, set()).add(fate.name.removesuffix(rest) if moved else None)
            path = path.rpartition(".")[0]
    alone = ((path, next(iter(places[path]))) for path in paths if len(places.get(path, ())) == 1)
    found = {path: place for path, place in alone if place and place not in opened}
    return {path: place for path, place in found.items() if not any(path.startswith(f"{other}.") for other in found)}


# ── Cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_cost(subject: Subject, before: Cost | None = None, context: Context | None = None) -> Cost:
    return cost_of(subject.program)


def judge_cost(now: Cost, before: Cost | None, context: Context) -> Finding:
    if before is None:
        measured = f"{now.parameters:,} parameters, {now.flops_per_token:,} FLOPs per {now.unit}"
        return passed(measured, "no dense model") if now.flops else failed(measured, "the graph has no matrix product")
    parameters = f"parameters {before.parameters:,} → {now.parameters:,}"
    measured = f"{parameters}, FLOPs per {now.unit} {before.flops_per_token:,} → {now.flops_per_token:,}"
    keeps_all = all(fate.kind != "dropped" for fate in context.fates.values())
    unclaimed = now.parameters - before.parameters - context.claimed
    if unclaimed and not context.exact:
        unclaimed -= newly_read(now, before, context)
    if context.rewrites is not None and keeps_all and unclaimed:
        return failed(measured, f"claimed are {context.claimed:,} new parameters; never read: {unread_parameters(context)}")
    if context.exact and (missing := omitted_work(now, before, context)):
        return failed(measured, f"an exact rewrite must not drop work: {first_few(missing)}")
    return passed(measured)


def newly_read(now: Cost, before: Cost, context: Context) -> int:
    """Return the elements of dense parameters that are newly read, less those no longer read, if the model chose other experts.

    If the dense graph leaves no parameter of a shape unread, nothing is chosen, and each has to be read again.
    """
    parameters = context.subject.parameters
    kept = {name: parameters[fate.name] for name, fate in context.fates.items() if fate.kind in ("kept", "moved")}
    did = {id(value) for name, value in kept.items() if name in before.read}
    does = {id(parameters[name]) for name in now.read}
    single = {id(value): value for value in kept.values()}
    chosen = {value.shape for key, value in single.items() if key not in did}
    return sum(value.numel() * ((key in does) - (key in did)) for key, value in single.items() if value.shape in chosen)


def unread_parameters(context: Context) -> str:
    """Return the parameters that the graph never reads."""
    subject = context.subject
    read = {id(subject.parameters[name]) for node, name in subject.program.parameters.items() if node in subject.reached}
    return first_few(context.place(name) for name, value in subject.model.named_parameters() if id(value) not in read) or "none"


def omitted_work(now: Cost, before: Cost, context: Context) -> list[str]:
    """Return the dense modules that do less work than before."""
    names = unchanged_modules(context.fates, before.by_module)
    modules = dict(context.subject.model.named_modules(remove_duplicate=False))
    keys = {path: weights_key(modules.get(names[path])) for path in before.by_module if path in names}
    did, does = Counter[object](), Counter[object]()
    for path, key in keys.items():
        did[key] += before.by_module[path]
    for path, count in now.by_module.items():
        does[weights_key(modules.get(path))] += count
    less = [
        f"{context.place(names[path])} does {does[key]:,} FLOPs, did {did[key]:,}"
        for path, key in keys.items()
        if does[key] < did[key]
    ]
    return less or (["the whole does less than before"] if now.flops < before.flops else [])


def weights_key(module: nn.Module | None) -> object:
    """Return the key of modules that are counted as one: those with the same weights, under any of their names."""
    weights = tuple(id(parameter) for parameter in module.parameters()) if module is not None else ()
    return weights or id(module)
