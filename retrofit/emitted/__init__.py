"""A model or an exported program as an FX graph module: one graph of ATen operations, nested into modules for its parts.

The children of a graph module are the regions of its program: the calls of the model's own modules, under their own names, and
layers, attentions, feed-forwards, embeddings and head if the model's code is one long function. Its parameters are the model's own,
with their own names within the module that reads them. Batch and length are dynamic as far as the model's code allows, dropout
follows `train()` and `eval()`, and constants follow the inputs to another device.

Without a mask most models hide nothing, some hide the padding, which they detect by its ids. Parts of an exported program that are
graphs of their own (code under `torch.no_grad`, or with autocast switched off) are inlined.

Before a graph module is emitted, the program is normalized so that regions can be found:

- A feed-forward becomes one contiguous stretch of the program if other operations lie in between: `x + attention(y) +
down(act(up(y)))` adds the attention's result after `up` and before `down`, two branches in one expression. - Equal operations on
equal operands are merged if the matrices of a feed-forward read their results: `w1(norm(x)) * w3(norm(x))` is a gated feed-forward
of one tensor. - Products of flattened tokens, (batch·length, d), become products of tokens, (batch, length, d). Exporters to ONNX,
and much hand-written code, flatten the tokens before a matrix product and unflatten its result. The product of the unflattened
tokens is the same, and its shape shows the tokens.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from retrofit.anatomy import Anatomy
from retrofit.anatomy.branches import region_of
from retrofit.anatomy.feed_forward_parsing import products_of
from retrofit.anatomy.inspection import read_anatomy
from retrofit.anatomy.weights import operand_chain
from retrofit.emitted.graph_parts import custom_backwards, have_same_gradients, mask_or_ones
from retrofit.emitted.module_builder import EmissionContext, ModuleBuilder, kept_metadata, symbolic_sizes
from retrofit.emitted.regions import Region, feed_forward_span, program_region, replace_by_parameters, weight_slices
from retrofit.errors import CaptureError, DoesNotFitError, NoTransformerError, Remedy, kind_of
from retrofit.inputs.example_inputs import device_of, named_inputs, special_ids, vocabulary_of
from retrofit.inputs.model_memory import without_weights, zeros_for
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import Inputs, named_outputs
from retrofit.numerics.distances import distance, tolerance_of
from retrofit.program.aten_ops import op
from retrofit.program.capture import capture, missing_masks
from retrofit.program.dataflow import Dataflow
from retrofit.program.functionalize import mutates
from retrofit.program.program import Program, calls_from_metadata, read_program, register_tensor
from retrofit.program.tracing import NO_GRAD, annotation
from retrofit.provenance import provenance_of, record_provenance

AS_MODULES = Remedy("rewrite its modules (emit='module')", "module")


@torch.no_grad()
def agrees_without_masks(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Return whether two modules agree on these inputs, without any mask, with special ids at the end of every row.

    Models on the meta device count as agreeing.
    """
    if device_of(model).type == "meta":
        return True
    special = torch.tensor(sorted(token for token in special_ids(model) if 0 <= token < vocabulary_of(model)), dtype=torch.long)
    given = {name: end_with_special_ids(value, special) if name.endswith("input_ids") else value for name, value in inputs.items()}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with preserve_state(model), preserve_state(other):
        theirs, ours = named_outputs(model(**given)), named_outputs(other(**tensors))
    return all(distance(ours[name], value) <= tolerance_of(value) for name, value in theirs.items() if name in ours)


def end_with_special_ids(ids: Any, special: Tensor) -> Any:
    """Return the ids (batch, length) with the special ones at the end of every row."""
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return ids
    count = min(len(special), ids.shape[1] - 1)
    return torch.cat([ids[:, : ids.shape[1] - count], special[:count].to(ids).expand(len(ids), count)], 1)


GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled  # (enabled, graph, *arguments)
AUTOCAST = torch.ops.higher_order.wrap_with_autocast  # (device type, dtype, enabled, with a cache, graph, *arguments)


def inline_nested_graphs(module: fx.GraphModule) -> None:
    """Inline the nested graphs of `module` into its graph, with an annotation where gradients are switched off.

    Raises `CaptureError` for other operations that run a graph of their own.
    """
    for node in list(module.graph.nodes):
        if node.target is GRADIENTS:
            enabled, holder, *arguments = node.args
            inline(module, node, holder, arguments, {NO_GRAD: not enabled})
        elif node.target is AUTOCAST and not node.args[2]:
            inline(module, node, node.args[4], node.args[5:], {})
    refuse_subgraphs(module.graph, "the program", "export the model without that operation")
    module.recompile()


def refuse_subgraphs(graph: fx.Graph, what: str, remedy: str) -> None:
    """Raises `CaptureError` if an operation of the graph runs a graph of its own."""
    holder = next((user for node in graph.nodes if node.op == "get_attr" for user in node.users), None)
    if holder is not None:
        raise CaptureError(
            f"{what} cannot be converted to a graph module",
            why=f"{op(holder)} runs part of it as a subgraph",
            remedy=remedy,
            code="subgraph",
        )


def inline(module: fx.GraphModule, node: fx.Node, holder: fx.Node, arguments: Any, annotations: dict[str, Any]) -> None:
    """Replace `node`, a call of the graph named by `holder`, by the operations of that graph, with the annotations."""
    nested = module.get_submodule(str(holder.target))
    assert isinstance(nested, fx.GraphModule)
    inline_nested_graphs(nested)
    placeholders = [inner for inner in nested.graph.nodes if inner.op == "placeholder"]
    copies = dict(zip(placeholders, arguments, strict=True))
    with module.graph.inserting_before(node):
        results: Any = module.graph.graph_copy(nested.graph, copies)
    for original, copied in copies.items():
        if original.op != "placeholder" and annotation(copied, NO_GRAD) is None:
            copied.meta["custom"] = (copied.meta.get("custom") or {}) | annotations
    for user in list(node.users):  # each takes one of the results
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not holder.users:
        module.graph.erase_node(holder)


def graph_module(model: nn.Module, example_inputs: Any = None) -> fx.GraphModule:
    """Return `model` as a graph module on the same parameters. Raises `CaptureError` if it cannot be captured."""
    inputs = named_inputs(model, example_inputs)
    others = ((name, tree_leaves(value)) for name, value in inputs.items() if not isinstance(value, Tensor))
    nested = next((name for name, leaves in others if any(isinstance(leaf, Tensor) for leaf in leaves)), None)
    if nested is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be converted to a graph module",
            why=f"its argument {nested} is {kind_of(inputs[nested])}, not a tensor",
            remedy=("wrap it in a module that takes tensors", AS_MODULES),
            code="type",
        )
    program = capture_dynamic(model, inputs)
    refuse_subgraphs(program.graph, type(model).__name__, AS_MODULES)
    graph = emit_graph_module(model, program)
    masks = {name: mask for name, mask in missing_masks(model, inputs).items() if name in program.inputs.values()}
    if masks and not agrees_without_masks(model, graph, inputs):
        return graph_module(model, inputs | masks)  # with masks as required arguments
    custom = custom_backwards(program)
    if custom and not have_same_gradients(model, graph, inputs):
        raise CaptureError(
            f"{type(model).__name__} cannot be converted to a graph with the same gradients",
            why=f"{custom[0]} has a custom backward, which is not the derivative of its operations",
            remedy=AS_MODULES,
            code="custom-backward",
        )
    record_provenance(graph, examples={name: value for name, value in inputs.items() if isinstance(value, Tensor)})
    return graph


def capture_dynamic(model: nn.Module, inputs: dict[str, Any]) -> Program:
    """Return the program for any batch size and length; a single example is doubled, as the tracer makes a size of 1 constant."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    if tensors and all(value.shape[0] == 1 for value in tensors.values()):
        with contextlib.suppress(CaptureError):
            return capture(model, inputs | {name: torch.cat([value, value]) for name, value in tensors.items()}, dynamic=True)
    return capture(model, inputs, dynamic=True)


def from_exported(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return an exported program as a graph module on its parameters, with its dynamic shapes, in evaluation mode.

    Nested graphs are inlined in `exported` itself. Raises `CaptureError` for those that cannot be.
    """
    inline_nested_graphs(exported.graph_module)
    model = ExportedState(exported).eval()
    if any(mutates(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})
    return emit_graph_module(model, read_program(exported, calls_from_metadata(exported)))


class ExportedState(nn.Module):
    """The parameters and buffers of an exported program under their names."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = exported.graph_signature
        used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
        read = {name: exported.state_dict[name] for key, name in signature.inputs_to_parameters.items() if key in used}
        for name in signature.parameters:
            register_tensor(self, name, read[name] if name in read else read_alias(exported.state_dict[name], read))
        for name in signature.buffers:
            saved = name not in signature.non_persistent_buffers
            register_tensor(self, name, exported.state_dict[name] if saved else exported.constants[name], saved)


def read_alias(held: Tensor, read: dict[str, Tensor]) -> Tensor:
    """Return the parameter read by the program to which `held`, which it does not read, is tied; else `held`.

    An exported program reads a tied parameter under one of its names, and on disk the tie is lost: equal values, unless zeros, are
    taken as evidence of a tie.
    """
    equal = (tensor for tensor in read.values() if tensor.shape == held.shape and torch.equal(tensor, held))
    return held if any(tensor is held for tensor in read.values()) or not held.any() else next(equal, held)


# ── Dense graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class DenseGraph:
    """A graph that no pass has rewritten: its parameters have no values, its buffers are those of the graph."""

    skeleton: nn.Module  # its parameters are on the meta device

    @classmethod
    def of(cls, graph: fx.GraphModule) -> DenseGraph:
        """Return `graph` as a dense graph."""
        return cls(without_weights(graph, keep_buffers=True))

    def empty(self) -> nn.Module:
        """Return a new graph on the CPU with zeros as parameters, tied as in the graph."""
        graph = copy.deepcopy(self.skeleton, {id(buffer): buffer.to("cpu", copy=True) for buffer in self.skeleton.buffers()})
        made: dict[int, nn.Parameter] = {}
        for module in graph.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = made.setdefault(
                        id(parameter), nn.Parameter(zeros_for(parameter), parameter.requires_grad)
                    )
        return graph


def dense_graph(model: nn.Module) -> DenseGraph | None:
    """Return the dense graph that a rewritten graph was made from; None if unknown, or if there is none."""
    kept: DenseGraph | None = provenance_of(model).dense
    return kept


def as_dense_graph_of(rewritten: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """Return `model` as the graph that `rewritten` was made from, on the same parameters; `model` itself if that is not possible.

    A model that was imported or exported again, or that consisted of modules, has other parameter names than the graph.
    """
    kept = dense_graph(rewritten)
    if kept is None or names_in(kept.skeleton) == names_in(model):
        return model
    try:
        graph = graph_module(model, inputs)
    except CaptureError:
        return model
    return graph if names_in(graph) == names_in(kept.skeleton) else model


def names_in(model: nn.Module) -> set[str]:
    """Return all names of the parameters."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


# ── Emission ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_feed_forwards_contiguous(program: Program, anatomy: Anatomy) -> bool:
    """Make every feed-forward in code contiguous, if possible; return whether the order of the program changed."""
    flow, changed = anatomy.flow, False
    for branch in (branch for layer in anatomy.layers for branch in layer.ffns if branch.role == "ffn"):
        region = region_of(branch, flow)
        span = feed_forward_span(branch, region, flow)
        if span is not None and move_interleaved_nodes(span, set(region), flow):
            flow, changed = Dataflow(program), True
    return changed


def move_interleaved_nodes(span: Region, inside: set[fx.Node], flow: Dataflow) -> bool:
    """Move nodes of the span that are not `inside` before it, or after it if they depend on it; return whether there were any."""
    stretch = flow.nodes[span.first : span.last + 1]
    own = [node for node in stretch if node in inside]
    others = [node for node in stretch if node not in inside and node.op == "call_function"]
    if not any(node in flow.computations for node in others):
        return False
    mask = sum(flow.bit(node) for node in own)
    after = [node for node in others if flow.ancestors[node] & mask]
    before = [node for node in others if not flow.ancestors[node] & mask]
    early, late = {*flow.nodes[: span.first], *before}, {*flow.nodes[span.last + 1 :], *after}
    for call in {call for node in others for call in flow.call_of(node).chain}:
        computed = [node for node in flow.computations if call.encloses(flow.call_of(node))]
        if not (early.issuperset(computed) or late.issuperset(computed) or set(computed).issuperset(own)):
            return False  # the call would be in two pieces
    for node in before:
        own[0].prepend(node)
    for node in reversed(after):
        own[-1].append(node)
    return True


def merge_equal_steps(program: Program, anatomy: Anatomy) -> bool:
    """Make the matrices of a feed-forward read one tensor if they read equal ones; return whether the program changed."""
    flow, changed = anatomy.flow, False
    for branch in (branch for layer in anatomy.layers for branch in layer.ffns if branch.role == "ffn"):
        source = flow.node(branch.source)
        try:
            _, into = products_of(branch, region_of(branch, flow), flow)
        except DoesNotFitError:
            continue
        read = {operand_chain(product, flow)[-1] for product in into}
        if len(read) > 1:
            changed |= merge_equal_nodes(program, nodes_above(read, source, flow))
    return changed


def nodes_above(read: set[fx.Node], source: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """Return the nodes that those in `read` depend on and `source` does not, including themselves, in order."""
    mask = 0
    for node in read:
        mask |= flow.ancestors[node]
    mask &= ~flow.ancestors[source]
    return [node for node in flow.nodes if mask & flow.bit(node) and node.op == "call_function"]


def merge_equal_nodes(program: Program, nodes: list[fx.Node]) -> bool:
    """Merge nodes, given in order, that compute the same from the same operands, unless random; return whether there were any."""
    first: dict[str, fx.Node] = {}
    merged = False
    for node in nodes:
        same = first.setdefault(str((node.target, node.args, node.kwargs, annotation(node, NO_GRAD))), node)
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if same is not node and not draws:
            program.replace_node(node, same)
            merged = True
    return merged


VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))
PRODUCTS = frozenset(("linear", "matmul"))
SymbolicSizes = Mapping[fx.Node, tuple[Any, ...]]


def unflatten_products(program: Program, extents: SymbolicSizes) -> dict[fx.Node, fx.Node]:
    """Rewrite products of tokens that are flattened before and unflattened by all users; return them, each with a removed user.

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
    """Return the users of a product of flattened tokens if all of them are views that unflatten the tokens; else none."""
    flat = node.args[0] if node.args else None
    if op(node) not in PRODUCTS or not isinstance(flat, fx.Node) or op(flat) not in VIEWS:
        return []
    source = flat.args[0]
    assert isinstance(source, fx.Node)
    laid, made = extents[source], extents[node]
    if len(extents[flat]) != 2 or len(laid) < 3 or laid[-1] != extents[flat][-1]:
        return []
    readers = list(node.users)
    return readers if all(op(reader) in VIEWS and extents[reader] == (*laid[:-1], made[-1]) for reader in readers) else []


def emit_graph_module(model: nn.Module, program: Program) -> fx.GraphModule:
    """Return the graph module for a program of `model`."""
    sizes = {node: symbolic_sizes(node) for node in program.graph.nodes}  # before anything else: comparing symbols adds guards
    sizes |= {product: sizes[reader] for product, reader in unflatten_products(program, sizes).items()}
    anatomy = anatomy_or_none(model, program)
    flow = Dataflow(program)
    slices = replace_by_parameters(program, weight_slices(model, flow, anatomy))
    if slices:
        sizes |= {part: symbolic_sizes(part) for part in slices}
        flow, anatomy = Dataflow(program), anatomy_or_none(model, program)
    if anatomy is not None and merge_equal_steps(program, anatomy):
        flow, anatomy = Dataflow(program), anatomy_or_none(model, program)
    if anatomy is not None and make_feed_forwards_contiguous(program, anatomy):
        flow, anatomy = Dataflow(program), anatomy_or_none(model, program)
    whole = Region("", "", 0, len(flow.nodes) - 1) if anatomy is None else program_region(anatomy, flow)
    context = EmissionContext(model, program, flow, slices, sizes, 0 if anatomy is None else anatomy.width)
    graph = build_root(context, whole)
    register_other_names(model, graph, {name for name, _ in slices.values()})
    graph.train(model.training)
    for name in ("config", "generation_config"):
        if hasattr(model, name):
            setattr(graph, name, getattr(model, name))
    return graph


def build_root(context: EmissionContext, region: Region) -> fx.GraphModule:
    """Return the root: it has the model's arguments, by name, and outputs."""
    program = context.program
    inputs = [node for node in context.flow.nodes if node in program.inputs]
    inputs.sort(key=context.is_added_mask)  # optional arguments come last
    builder = ModuleBuilder(context, region, inputs)
    placeholders = {name: builder.env[node] for node, name in program.inputs.items()}
    for node in builder.arguments:
        if context.is_added_mask(node):
            builder.env[node].args = (None,)  # its default
            ids = placeholders[program.inputs[node].replace("attention_mask", "input_ids")]
            builder.env[node] = builder.graph.call_function(mask_or_ones, (builder.env[node], ids))
            builder.env[node].meta |= kept_metadata(node)
        builder.env[node] = builder.size_check(node)
    builder.run()
    builder.graph.output(output_structure(builder))
    return builder.finished("Graph")


def output_structure(builder: ModuleBuilder) -> Any:
    """Return the outputs in the structure of the model's output."""
    program = builder.context.program
    values = {name: builder.value(node) for name, node in program.outputs.items()}
    return nested(program.layout, (values.get(name, program.constant_outputs.get(name)) for name in program.results), builder.graph)


def nested(layout: Any, flat: Iterator[Any], graph: fx.Graph) -> Any:
    """Return the values in `flat`, nested by `layout`; None for a container that cannot be built from its parts in a graph."""
    if layout.is_leaf():
        return next(flat)
    parts = [nested(part, flat, graph) for part in layout.children()]
    kind: Any = layout.type
    if kind in (tuple, list):
        return kind(parts)
    if kind is dict:
        return dict(zip(layout.context, parts, strict=True))
    if kind is collections.namedtuple:
        return graph.call_function(layout.context, tuple(parts))
    if issubclass(kind, Mapping):
        return graph.call_function(kind, (), dict(zip(layout.context, parts, strict=True)))
    if dataclasses.is_dataclass(layout.type):
        given, missing = layout.context
        return graph.call_function(kind, (), dict(zip(given, parts, strict=True)) | dict.fromkeys(missing))
    return None


def anatomy_or_none(model: nn.Module, program: Program) -> Anatomy | None:
    """Return the model's anatomy; None if it is no transformer."""
    try:
        return read_anatomy(model, program)
    except NoTransformerError:
        return None


def register_other_names(model: nn.Module, graph: nn.Module, slices: set[str]) -> None:
    """Register each parameter and saved buffer of the model under all its names, including tied and unused ones.

    Parameters of which the `slices` became parameters are excluded.
    """
    state = set(model.state_dict(keep_vars=True)) - {name.rpartition(".")[0] for name in slices}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    present = {name for name, _ in (*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False))}
    held = {id(value) for value in (*graph.parameters(), *graph.buffers())}
    for name, value in named:
        is_placed = name in present or name not in state
        if not is_placed and (id(value) not in held or is_tied_to_present(model, value, present)):
            register_tensor(graph, name, value)


def is_tied_to_present(model: nn.Module, value: Tensor, present: set[str]) -> bool:
    """Return whether another name of the tied value is `present` in the graph module."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return any(held is value and name in present for name, held in named)
