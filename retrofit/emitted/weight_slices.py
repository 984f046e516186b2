"""Weights that a model's code reads in parts only, such as the layers' shares of one stacked tensor, as parameters of their own.

A part is a parameter in the memory that it has in the whole, named after the whole and its number among the parts: `w.3` of `w`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.program.aten_ops import op
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program

SELECTING = frozenset("select slice split split_with_sizes chunk unbind getitem".split())
WeightSlices = dict[fx.Node, tuple[str, nn.Parameter]]


def weight_slices(model: nn.Module, flow: Dataflow, anatomy: Anatomy | None) -> WeightSlices:
    """Return the nodes that select parts of parameters, where nothing reads the whole and no two parts overlap.

    Of a stack of matrices no layer may read two: otherwise it is the weight of one layer, such as its experts.
    """
    found: WeightSlices = {}
    for held, name in flow.program.parameters.items():
        whole = model.get_parameter(name)
        parts = selected_parts(held, whole.detach())
        if len(parts) < 2 or not all(isinstance(part, Tensor) for part in parts.values()):
            continue
        reads = torch.zeros(whole.shape, device="cpu")
        for part in selected_parts(held, reads).values():
            part += 1  # a view: counts how often each element is read
        if reads.max() > 1 or (whole.dim() > 2 and not are_read_by_distinct_layers(list(parts), flow, anatomy)):
            continue
        for number, (node, part) in enumerate(parts.items()):
            found[node] = f"{name}.{number}", nn.Parameter(part, requires_grad=whole.requires_grad)
    return found


def selected_parts(node: fx.Node, value: Any) -> dict[fx.Node, Any]:
    """Return the parts of a parameter that are read, by the nodes that select them; none where they are not all that is read.

    `value` is that of `node`, and the parts are views of it. A part is the result of selections at constant places, and is read
    by other operations only.
    """
    selections = [user for user in node.users if op(user) in SELECTING and user.all_input_nodes == [node]]
    if node.op != "placeholder" and len(selections) < len(node.users):
        return {} if selections else {node: value}
    if not selections or len(selections) < len(node.users):
        return {}
    parts: dict[fx.Node, Any] = {}
    for user in selections:
        inner = selected_parts(user, user.target(value, *user.args[1:], **user.kwargs))  # type: ignore[operator]
        if not inner:
            return {}
        parts |= inner
    return parts


def are_read_by_distinct_layers(parts: list[fx.Node], flow: Dataflow, anatomy: Anatomy | None) -> bool:
    """Return whether no layer reads two of the parts."""
    if anatomy is None:
        return False
    nodes = flow.named
    for layer in anatomy.layers:
        inside = flow.between(nodes[layer.entry], nodes[layer.exit])
        read = [
            part for part in parts if any(flow.reaches(part, operand) for node in inside for operand in weight_operands(node, flow))
        ]
        if len(read) > 1:
            return False
    return True


def weight_operands(node: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """Return the operands of a node that do not depend on the inputs."""
    return [operand for operand in node.all_input_nodes if operand not in flow.depends and operand in flow.position]


def replace_by_parameters(program: Program, slices: WeightSlices) -> WeightSlices:
    """Each part is a placeholder of the program, and a parameter of its own; returns the parts by these placeholders."""
    first = next(iter(program.graph.nodes))
    placeholders: WeightSlices = {}
    for node, (name, parameter) in slices.items():
        with program.graph.inserting_before(first):
            place = program.graph.placeholder(f"p_{name.replace('.', '_')}")
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place)
        program.parameters[place] = name
        placeholders[place] = name, parameter
        while not node.users and node.op != "placeholder":
            (source,) = node.all_input_nodes
            program.graph.erase_node(node)
            program.owner.pop(node, None)
            node = source
        program.parameters.pop(node, None)
    return placeholders
