"""A choice between two results by one truth value is an `If`: what is not chosen is not computed.

`torch.where` computes both: in a step without an anchor a layer that `sequence-altup` has strided would be computed for nothing.
Here the nodes that only one of the results needs become a branch. All choices by one condition that do not follow from one another
are one `If`, because they mostly share what they need: a layer's output, its keys, its values. An import reads such an `If` as the
choice it was (`CHOICE`).

It comes last, in a file that was compared with torch: fusions, packing, and whatever else looks at nodes sees them in one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from retrofit.errors import first_line
from retrofit.onnx.exporter.export_part import LENGTH, PAST, ExportPart
from retrofit.onnx.exporter.onnxruntime_session import OnnxSession
from retrofit.onnx.exporter.optimization import TOLERANCE, RewriteStep, count_nodes, largest_gap
from retrofit.onnx.exporter.parity import other_sizes
from retrofit.onnx.importer.operators.table import CHOICE

if TYPE_CHECKING:
    import onnx_ir

PRODUCTS = frozenset(("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "Conv"))  # a branch without one is not worth an `If`
THEN, ELSE = 1, 2  # the places of a choice's two results among its inputs
STEPS = range(1, 5)  # numbers of tokens before one more, at which a file with branches is compared with the same without


def branch_file(graph: onnx_ir.Model, path: Path, part: ExportPart) -> RewriteStep | None:
    """The file at `path`, of this graph, has branches for what it chooses between; None where it chooses nothing.

    The account says why not, where ONNX Runtime computes something else with them.
    """
    import onnx_ir

    if not choices(graph.graph):
        return None
    model = onnx_ir.load(path)
    if not make_branches(model):
        return None
    other = path.with_name(f"branched.{path.name}")
    try:
        onnx_ir.save(model, other)  # weights that lie in a file of their own stay there
        gap = gap_between(path, other, part)
        why = "" if gap <= TOLERANCE else f"the outputs move by {gap:.1e}"
        if not why:
            other.replace(path)
    except Exception as error:  # a graph that ONNX Runtime does not take in branches
        why = first_line(error)
    finally:
        other.unlink(missing_ok=True)
    return RewriteStep("branches", count_nodes(graph), count_nodes(model), not why, why)


@torch.no_grad()
def gap_between(path: Path, other: Path, part: ExportPart) -> float:
    """How far the outputs of two files lie apart, at the worst of several sizes, single tokens after a few others among them."""
    sizes = other_sizes(part)
    if PAST in part.sizes:
        sizes += [{**dict.fromkeys(part.sizes, 1), LENGTH: part.least, PAST: past} for past in STEPS]
    inputs = [part.example(extents, seed) for seed, extents in enumerate(sizes, start=7)]
    expected, found = ([session(given) for given in inputs] for session in map(OnnxSession, (path, other)))  # one after the other
    return max(largest_gap(one, two) for one, two in zip(found, expected, strict=True))


def make_branches(model: onnx_ir.Model) -> int:
    """Choices in the model's graph that are worth it are `If`s; returns how many of these were made."""
    groups = [(condition, group) for condition, nodes in choices(model.graph).items() for group in by_depth(model.graph, nodes)]
    return sum(make_branch(model.graph, condition, group) for condition, group in groups)


def choices(graph: onnx_ir.Graph) -> dict[onnx_ir.Value, list[onnx_ir.Node]]:
    """The nodes that choose between two results by one truth value, by that value, in the graph's order."""
    found: dict[onnx_ir.Value, list[onnx_ir.Node]] = {}
    for node in graph:
        if (node.domain, node.op_type) != ("", "Where") or any(value is None or value.shape is None for value in node.inputs):
            continue
        condition, one, other = node.inputs
        shape = node.outputs[0].shape
        if all(extent == 1 for extent in condition.shape) and one.shape == other.shape == shape:  # type: ignore[union-attr]
            found.setdefault(condition, []).append(node)  # type: ignore[arg-type]
    return found


def by_depth(graph: onnx_ir.Graph, chosen: list[onnx_ir.Node]) -> list[list[onnx_ir.Node]]:
    """The choices by how many others lie on the longest way to each: those of a group do not follow from one another."""
    depths: dict[onnx_ir.Node, int] = {}
    groups: dict[int, list[onnx_ir.Node]] = {}
    wanted = set(chosen)
    for node in graph:
        depth = max((depths.get(before, 0) for value in values_read(node) if (before := value.producer()) is not None), default=0)
        if node in wanted:
            depth += 1
            groups.setdefault(depth, []).append(node)
        depths[node] = depth
    return [groups[depth] for depth in sorted(groups)]


def nodes_inside(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The nodes of the node's branches, and of theirs."""
    import onnx_ir

    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def values_read(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """What the node reads, in its branches too."""
    yield from (value for one in (node, *nodes_inside(node)) for value in one.inputs if value is not None)


def make_branch(graph: onnx_ir.Graph, condition: onnx_ir.Value, group: list[onnx_ir.Node]) -> int:
    """The choices of a group are one `If`, apart from those in a branch already; returns 0 where no product would be saved."""
    import onnx_ir

    group = [node for node in group if node.graph is graph]
    sides = [needed_only_by(graph, group, place) for place in (THEN, ELSE)]
    if not any(one.op_type in PRODUCTS for side in sides for node in side for one in (node, *nodes_inside(node))):
        return 0
    names = [str(node.outputs[0].name) for node in group]
    branches = [
        branch_graph(graph, side, [node.inputs[place] for node in group], f"{names[0]}_{word}")
        for side, place, word in zip(sides, (THEN, ELSE), ("then", "else"), strict=True)
    ]
    made = onnx_ir.node(
        "If",
        [condition],
        dict(zip(("then_branch", "else_branch"), branches, strict=True)),
        num_outputs=len(group),
        name=f"{names[0]}_chosen",
    )
    made.metadata_props[CHOICE] = "Where"
    graph.insert_before(group[0], made)
    for node, value, name in zip(group, made.outputs, names, strict=True):
        (chosen,) = node.outputs
        value.shape, value.type = chosen.shape, chosen.type
        chosen.replace_all_uses_with(value, replace_graph_outputs=True)
        chosen.name, value.name = None, name
    graph.remove(group, safe=True)
    graph.sort()
    return 1


def needed_only_by(graph: onnx_ir.Graph, group: list[onnx_ir.Node], place: int) -> list[onnx_ir.Node]:
    """The nodes that nothing reads but the choices at that place, and one another; in the graph's order."""
    around = {inner: node for node in graph for inner in nodes_inside(node)}
    chosen, needed = set(group), set()
    for node in reversed(graph):
        uses = [use for value in node.outputs for use in value.uses()]
        apart = uses and not any(value.is_graph_output() for value in node.outputs)
        if apart and all((user in chosen and at == place) or around.get(user, user) in needed for user, at in uses):
            needed.add(node)
    return [node for node in graph if node in needed]


def branch_graph(graph: onnx_ir.Graph, nodes: list[onnx_ir.Node], results: list[onnx_ir.Value | None], name: str) -> onnx_ir.Graph:
    """The nodes as a graph of their own that returns the results; what comes from elsewhere passes through it."""
    import onnx_ir

    graph.remove(nodes)
    own, outputs = list(nodes), []
    for place, value in enumerate(results):
        assert value is not None
        if value.producer() not in nodes or value in outputs:
            same = onnx_ir.node("Identity", [value], name=f"{name}_{place}")
            same.outputs[0].shape, same.outputs[0].type, same.outputs[0].name = value.shape, value.type, f"{name}_{place}"
            own.append(same)
            value = same.outputs[0]
        outputs.append(value)
    return onnx_ir.Graph([], outputs, nodes=own, name=name)
