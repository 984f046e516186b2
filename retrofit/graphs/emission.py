"""Emit a graph module from a captured program: its regions become modules, its root takes and returns what the model does."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.inspection import read_anatomy
from retrofit.errors import NoTransformerError
from retrofit.graphs.contiguous_parts import make_feed_forwards_contiguous
from retrofit.graphs.emission_context import EmissionContext
from retrofit.graphs.equal_steps import merge_equal_steps
from retrofit.graphs.graph_functions import mask_or_ones
from retrofit.graphs.module_builder import ModuleBuilder, kept_metadata
from retrofit.graphs.module_tree import register_tensor
from retrofit.graphs.regions import Region, regions
from retrofit.graphs.symbolic_sizes import symbolic_sizes
from retrofit.graphs.unflatten import unflatten_products
from retrofit.graphs.weight_slices import replace_by_parameters, weight_slices
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program


def emit_graph_module(model: nn.Module, program: Program) -> fx.GraphModule:
    """The graph module of a program of `model`."""
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
    """The root: it takes the model's arguments by name and returns what the model returns."""
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
    """The outputs in the structure that the model returns them in."""
    program = builder.context.program
    values = {name: builder.value(node) for name, node in program.outputs.items()}
    return nested(program.layout, (values.get(name, program.constant_outputs.get(name)) for name in program.results), builder.graph)


def nested(layout: Any, flat: Iterator[Any], graph: fx.Graph) -> Any:
    """The values in `flat`, nested as `layout` says; None for a container that can be made of its parts in the graph by no rule."""
    if layout.is_leaf():
        return next(flat)
    parts = [nested(one, flat, graph) for one in layout.children()]
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
    """The model's anatomy, None where it is no transformer."""
    try:
        return read_anatomy(model, program)
    except NoTransformerError:
        return None


def register_other_names(model: nn.Module, graph: nn.Module, slices: set[str]) -> None:
    """Every parameter and saved buffer of the model has its name in the graph module too, tied and unused ones included.

    Not those that became parameters for each of their `slices`.
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
    """Whether another name of the tied value is `present` in the graph module."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return any(one is value and name in present for name, one in named)
