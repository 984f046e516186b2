"""Emit a graph module from a captured program: its regions become modules, its root has the model's arguments and outputs.

First the program is normalized so that regions can be found:

- A feed-forward becomes one contiguous stretch of the program if other operations lie in between: `x + attention(y) +
down(act(up(y)))` adds the attention's result after `up` and before `down`, two branches in one expression. - Equal operations on
equal operands are merged if the matrices of a feed-forward read their results: `w1(norm(x)) * w3(norm(x))` is a gated feed-forward
of one tensor. - Products of flattened tokens, (batch·length, d), become products of tokens, (batch, length, d). Exporters to ONNX,
and much hand-written code, flatten the tokens before a matrix product and unflatten its result. The product of the unflattened
tokens is the same, and its shape shows the tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.feed_forward_parsing import products_of
from retrofit.anatomy.inspection import read_anatomy
from retrofit.anatomy.weights import operand_chain
from retrofit.emitted.graph_parts import mask_or_ones
from retrofit.emitted.module_builder import EmissionContext, ModuleBuilder, kept_metadata, symbolic_sizes
from retrofit.emitted.regions import Region, feed_forward_span, regions, replace_by_parameters, weight_slices
from retrofit.errors import DoesNotFitError, NoTransformerError
from retrofit.program.aten_ops import op
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program, register_tensor
from retrofit.program.tracing import NO_GRAD, annotation


def make_feed_forwards_contiguous(program: Program, anatomy: Anatomy) -> bool:
    """Make every feed-forward in code contiguous, if possible; return whether the order of the program changed."""
    flow, changed = anatomy.flow, False
    for branch in (branch for layer in anatomy.layers for branch in layer.ffns if branch.role == "ffn"):
        region = flow.between(flow.node(branch.source), flow.node(branch.output))
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
            _, into = products_of(branch, flow.between(source, flow.node(branch.output)), flow)
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
    whole = Region("", "", 0, len(flow.nodes) - 1) if anatomy is None else regions(anatomy, flow)
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
