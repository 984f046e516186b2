"""Rewrite an ONNX graph with the standard rewriters; keep a step only if ONNX Runtime computes the same with it.

`optimize` folds constants, merges equal computations and drops unused ones. The fusions replace norms, GELU, rotary embeddings and
attention by ONNX Runtime's own operators. They match the form of a graph, not its meaning, so each is tried on a copy: the copy
must load, and agree on inputs of two other shapes.

Last, in a file that was compared with torch, a choice between two results by one truth value becomes an `If` (`branch_file`).
`torch.where` computes both results: in a step without an anchor, a layer strided by `sequence-altup` would be computed for nothing.
Here the nodes that only one of the results needs become a branch. All choices by one condition that do not depend on one another
become one `If`, because they mostly share operands: a layer's output, its keys, its values. An import reads such an `If` as the
original choice (`CHOICE`). Fusions, packing, and all other analyses of nodes come earlier, and see one graph.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy
import torch
from torch import Tensor

from retrofit.errors import first_line
from retrofit.numerics.distances import distance
from retrofit.onnx.exporter.attention_fusion import attend_on_cache, rotate_by_token
from retrofit.onnx.exporter.export_parts import LENGTH, PAST, ExportPart, OnnxSession, missing_packages, other_sizes
from retrofit.onnx.importer.operators import CHOICE
from retrofit.process import replace_attributes

if TYPE_CHECKING:
    import onnx_ir


Tensors: TypeAlias = Mapping[str, Tensor]
LITTLE = 2**10  # bytes; smaller weights are copied
LARGEST = 2**30  # bytes of weights; a larger model is not copied and run to test a fusion
PAIRWISE_RULES = {"SlicesSplit"}  # of the optimizer: tried on every pair of slices, which takes minutes for a graph with hundreds
CHOOSES = {"ArgMax": 0, "ArgMin": 0, "TopK": 1}  # operators that choose → the index of the output with the choice
GIVEN = "_given"  # suffix of the name of a choice that a graph gets as input
TOLERANCE = 1e-5  # relative to the largest output; a model that rounds more may differ by a multiple of its own rounding:
FARTHER = 4  # the graphs before and after a fusion both round, each up to twice as much as another forward


@dataclasses.dataclass(frozen=True)
class RewriteStep:
    """One rewriting step: the number of nodes before and after, and whether it was kept, or why not."""

    name: str
    before: int
    after: int
    kept: bool
    why: str = ""


def optimize(model: onnx_ir.Model, rounds: int = 2) -> onnx_ir.Model:
    """Return the model with constants folded, equal computations merged and unused ones removed.

    First every value gets a unique name: a weight from an ONNX file may have a name that the exporter uses for a value.
    """
    from onnx_ir.passes.common import NameFixPass
    from onnxscript import optimizer, rewriter

    NameFixPass()(model)
    rules = tuple(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name not in PAIRWISE_RULES)
    with replace_attributes(rewriter, _DEFAULT_REWRITE_RULES=rules):
        optimizer.optimize_ir(model, num_iterations=rounds)
    return model


def separate_padding_from_pooling(model: onnx_ir.Model) -> None:
    """Keep the padding before a max pooling apart from it.

    ONNX Runtime's optimizer merges the padding into the pooling (`Pad_Fusion`), which pads with values below all others. A maximum
    with such a value in between changes nothing, and separates the two.
    """
    import onnx_ir

    for node in [node for node in model.graph.all_nodes() if node.op_type == "MaxPool"]:
        value = node.inputs[0]
        padding = None if value is None else value.producer()
        if padding is None or padding.op_type != "Pad" or value is None or value.dtype is None or node.graph is None:
            continue
        lowest = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(-math.inf, dtype=value.dtype)})
        maximum = onnx_ir.node("Max", [value, lowest.outputs[0]])
        maximum.outputs[0].shape, maximum.outputs[0].type = value.shape, value.type
        node.graph.insert_before(node, (lowest, maximum))
        node.replace_input_with(0, maximum.outputs[0])


def fusions() -> dict[str, Callable[[onnx_ir.Model], int]]:
    """Return ONNX Runtime's fused operators by name, in an order in which earlier ones prepare later ones.

    Each function returns the number of its matches.
    """
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.ort_fusions import _core as ort

    def in_turn(*fuse: Callable[[onnx_ir.Model], int]) -> Callable[[onnx_ir.Model], int]:
        return lambda model: sum(fusion(model) for fusion in fuse)

    find = functools.partial(ort.fuse_sdpa, apply_shape_inference=True)
    place = (ort.fuse_gqa, ort.fuse_mha1, ort.fuse_mha2, ort.fuse_mha_scale, ort.fuse_mha_bias, ort.replace_sdpa_by_mha)
    return {
        "norms": in_turn(ort.fuse_rms_normalization, ort.fuse_skip_layer_normalization, ort.fuse_skip_rms_normalization),
        "rotary embeddings": in_turn(ort.fuse_rotary_embedding, rotate_by_token, ort.fuse_partial_rotary_embedding),
        "attention": in_turn(find, attend_on_cache, *place),
        "attention, its cache apart": in_turn(find, *place),  # where the one before was not kept
        "GELU": in_turn(ort.fuse_erfgelu, ort.fuse_gelu, ort.fuse_bias_gelu),
        "products": RewriteRuleSet(ort.ORT_PATTERN_REWRITE_RULES).apply_to_model,
    }


def fuse_operators(
    model: onnx_ir.Model, examples: Sequence[Tensors], rounding: Callable[[], float] = lambda: 0.0
) -> tuple[onnx_ir.Model, list[RewriteStep]]:
    """Return the model with every fusion that keeps the outputs for the examples, and an account of all.

    `rounding` measures how far the model's own rounding moves its outputs; it is called if a fusion moves them.
    """
    if missing_packages("onnxruntime"):
        return model, [not_fused(model, "ONNX Runtime is not installed")]
    if weight_bytes(model) > LARGEST:
        return model, [not_fused(model, f"more than {LARGEST / 2**30:.0f} GiB of weights")]
    trial = SameChoices(model, examples)
    account = []
    for name, fuse in fusions().items():
        candidate, before = model.clone(), count_nodes(model)
        try:
            if fuse(candidate):  # the optimizer takes longer than the search
                optimize(candidate, rounds=1)
            after = count_nodes(candidate)
            why = "" if after < before else "nothing to fuse"
            if not why:
                gap = trial.gap(candidate)
                why = "" if gap <= TOLERANCE or gap <= FARTHER * rounding() else f"the outputs move by {gap:.1e}"
        except Exception as error:  # of any type: a rewriter or a kernel may not support this graph
            after, why = before, first_line(error)
        account.append(RewriteStep(name, before, after, not why, why))
        model = model if why else candidate
    return model, account


def not_fused(model: onnx_ir.Model, why: str) -> RewriteStep:
    return RewriteStep("fusions", count_nodes(model), count_nodes(model), False, why)


class SameChoices:
    """A model's outputs, and those of other models with the same choices.

    Two kernels of one operation round differently, and if a model chooses (an active unit, an expert) between near-ties, its
    outputs may move by much more. The other model gets this model's choices as inputs, and the numbers that each chooses by become
    additional outputs, which must agree too.
    """

    def __init__(self, model: onnx_ir.Model, examples: Sequence[Tensors]) -> None:
        clone, chosen = model.clone(), []
        for node in choosing_nodes(clone):
            chosen.append(str(node.outputs[CHOOSES[node.op_type]].name))
            self.return_too(clone, node.inputs[0], node.outputs[CHOOSES[node.op_type]])
        session = session_of(clone)
        self.examples = examples
        self.expected = [session(example) for example in examples]
        self.choices = [{f"{name}{GIVEN}": outputs.pop(name) for name in chosen} for outputs in self.expected]

    def gap(self, other: onnx_ir.Model) -> float:
        """Return how far another model's outputs lie from this one's, with the same choices."""
        session = self.session(other)
        results = [session({**example, **chosen}) for example, chosen in zip(self.examples, self.choices, strict=True)]
        return max(map(largest_gap, results, self.expected))

    def session(self, other: onnx_ir.Model) -> OnnxSession:
        """Return a session of another model, which gets the choices as inputs."""
        import onnx_ir

        clone = other.clone()
        for node in choosing_nodes(clone):
            chosen = node.outputs[CHOOSES[node.op_type]]
            given = onnx_ir.Value(name=f"{chosen.name}{GIVEN}", shape=chosen.shape, type=onnx_ir.TensorType(onnx_ir.DataType.INT64))
            clone.graph.inputs.append(given)
            self.return_too(clone, node.inputs[0])
            if node.op_type == "TopK":
                picked = onnx_ir.node("GatherElements", [node.inputs[0], given], {"axis": node.attributes["axis"].as_int()})
                clone.graph.insert_after(node, picked)
                node.outputs[0].replace_all_uses_with(picked.outputs[0], replace_graph_outputs=True)
            chosen.replace_all_uses_with(given, replace_graph_outputs=True)
        return session_of(clone)

    @staticmethod
    def return_too(model: onnx_ir.Model, *values: onnx_ir.Value | None) -> None:
        model.graph.outputs.extend(value for value in values if value is not None and not value.is_graph_output())


def choosing_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Return the nodes that choose by the largest or smallest numbers, except those in branches, in the graph's order.

    Only rounded numbers are meant: the largest of integers is the same in any arithmetic.
    """
    return [node for node in model.graph if node.op_type in CHOOSES and not node.domain and not is_integral(node.inputs[0])]


def is_integral(value: onnx_ir.Value | None) -> bool:
    """Return whether a value is known to consist of integers."""
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def session_of(model: onnx_ir.Model) -> OnnxSession:
    """Return a session of the model without a file; it reads the weights in place, and `model` no longer holds them."""
    import onnx_ir

    weights = {name: numpy.ascontiguousarray(tensor.numpy()) for name, tensor in take_weights(model).items()}
    return OnnxSession(onnx_ir.to_proto(model).SerializeToString(), 1, weights=weights)


def take_weights(model: onnx_ir.Model) -> dict[str, onnx_ir.TensorProtocol]:
    """Return the larger weights by name; the model names them as external data afterwards."""
    import onnx_ir

    taken: dict[str, onnx_ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= LITTLE or value.is_graph_input() or tensor.numpy().dtype.isbuiltin != 1:
            continue  # numpy has neither bfloat16 nor half bytes
        taken[name] = tensor
        value.const_value = onnx_ir.ExternalTensor(
            "weights", 0, tensor.nbytes, tensor.dtype, name=name, shape=onnx_ir.Shape(tensor.shape.numpy())
        )
    return taken


def largest_gap(outputs: Tensors, others: Tensors) -> float:
    """Return the largest distance between outputs of the same name."""
    return max(distance(outputs[name], other) for name, other in others.items())


def remove_unused_inputs(model: onnx_ir.Model) -> None:
    """Remove unused inputs."""
    graph = model.graph
    for value in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
        graph.inputs.remove(value)


def count_nodes(model: onnx_ir.Model) -> int:
    """Return the number of nodes of the graph, including its branches."""
    return sum(1 for _ in model.graph.all_nodes())


def weight_bytes(model: onnx_ir.Model) -> int:
    """Return the bytes of the model's weights."""
    held = [value.const_value for value in model.graph.initializers.values()]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


# ── Branches ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


PRODUCTS = frozenset(("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "Conv"))  # a branch without one is not worth an `If`
THEN, ELSE = 1, 2  # the indices of a choice's two results among its inputs
STEPS = range(1, 5)  # numbers of tokens before one more, for the comparison of a file with branches and the same without


def branch_file(graph: onnx_ir.Model, path: Path, part: ExportPart) -> RewriteStep | None:
    """Write the file at `path` for this graph, with branches for its choices; return None if it has none.

    If ONNX Runtime computes something else with the branches, the account says so.
    """
    import onnx_ir

    if not choices(graph.graph):
        return None
    model = onnx_ir.load(path)
    if not make_branches(model):
        return None
    other = path.with_name(f"branched.{path.name}")
    try:
        onnx_ir.save(model, other)  # weights in a file of their own stay there
        gap = gap_between(path, other, part)
        why = "" if gap <= TOLERANCE else f"the outputs move by {gap:.1e}"
        if not why:
            other.replace(path)
    except Exception as error:  # of any type: ONNX Runtime may not support the branches
        why = first_line(error)
    finally:
        other.unlink(missing_ok=True)
    return RewriteStep("branches", count_nodes(graph), count_nodes(model), not why, why)


@torch.no_grad()
def gap_between(path: Path, other: Path, part: ExportPart) -> float:
    """Return the largest distance between the outputs of two files at several sizes, including single tokens after others."""
    sizes = other_sizes(part)
    if PAST in part.sizes:
        sizes += [{**dict.fromkeys(part.sizes, 1), LENGTH: part.least, PAST: past} for past in STEPS]
    inputs = [part.example(extents, seed) for seed, extents in enumerate(sizes, start=7)]
    expected, found = ([session(given) for given in inputs] for session in map(OnnxSession, (path, other)))  # one after the other
    return max(map(largest_gap, found, expected))


def make_branches(model: onnx_ir.Model) -> int:
    """Replace the choices in the model's graph that are worth it by `If`s; return their number."""
    groups = [(condition, group) for condition, nodes in choices(model.graph).items() for group in by_depth(model.graph, nodes)]
    return sum(make_branch(model.graph, condition, group) for condition, group in groups)


def choices(graph: onnx_ir.Graph) -> dict[onnx_ir.Value, list[onnx_ir.Node]]:
    """Return the nodes that choose between two results by one truth value, by that value, in the graph's order."""
    found: dict[onnx_ir.Value, list[onnx_ir.Node]] = {}
    for node in graph:
        if (node.domain, node.op_type) != ("", "Where") or any(value is None or value.shape is None for value in node.inputs):
            continue
        condition, chosen, other = node.inputs
        shape = node.outputs[0].shape
        if all(extent == 1 for extent in condition.shape) and chosen.shape == other.shape == shape:  # type: ignore[union-attr]
            found.setdefault(condition, []).append(node)  # type: ignore[arg-type]
    return found


def by_depth(graph: onnx_ir.Graph, chosen: list[onnx_ir.Node]) -> list[list[onnx_ir.Node]]:
    """Return the choices grouped by the number of choices on the longest path to them: those of a group are independent."""
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
    """Yield the nodes in the node's branches, recursively."""
    import onnx_ir

    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def values_read(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """Yield the values that the node reads, also in its branches."""
    yield from (value for reader in (node, *nodes_inside(node)) for value in reader.inputs if value is not None)


def make_branch(graph: onnx_ir.Graph, condition: onnx_ir.Value, group: list[onnx_ir.Node]) -> int:
    """Replace the choices of a group, outside of branches, by one `If`; return their number, 0 if no product would be saved."""
    import onnx_ir

    group = [node for node in group if node.graph is graph]
    sides = [needed_only_by(graph, group, place) for place in (THEN, ELSE)]
    if not any(part.op_type in PRODUCTS for side in sides for node in side for part in (node, *nodes_inside(node))):
        return 0
    names = [str(node.outputs[0].name) for node in group]
    branches = {
        f"{word}_branch": branch_graph(graph, side, [node.inputs[place] for node in group], f"{names[0]}_{word}")
        for side, place, word in zip(sides, (THEN, ELSE), ("then", "else"), strict=True)
    }
    made = onnx_ir.node("If", [condition], branches, num_outputs=len(group), name=f"{names[0]}_chosen")
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
    """Return the nodes that only the choices at that position, and one another, read; in the graph's order."""
    around = {inner: node for node in graph for inner in nodes_inside(node)}
    chosen, needed = set(group), set()
    for node in reversed(graph):
        uses = [use for value in node.outputs for use in value.uses()]
        is_internal = uses and not any(value.is_graph_output() for value in node.outputs)
        if is_internal and all((user in chosen and at == place) or around.get(user, user) in needed for user, at in uses):
            needed.add(node)
    return [node for node in graph if node in needed]


def branch_graph(graph: onnx_ir.Graph, nodes: list[onnx_ir.Node], results: list[onnx_ir.Value | None], name: str) -> onnx_ir.Graph:
    """Return the nodes as a graph of their own that returns the results; values from outside are passed through."""
    import onnx_ir

    graph.remove(nodes)
    own, outputs = list(nodes), []
    for place, value in enumerate(results):
        assert value is not None
        if value.producer() not in nodes or value in outputs:
            identity = onnx_ir.node("Identity", [value], name=f"{name}_{place}")
            (copy,) = identity.outputs
            copy.shape, copy.type, copy.name = value.shape, value.type, f"{name}_{place}"
            own.append(identity)
            value = copy
        outputs.append(value)
    return onnx_ir.Graph([], outputs, nodes=own, name=name)
