"""Weights that a model's code reads in parts only, such as the layers' shares of one stacked tensor, as parameters of their own.

A part is a parameter in the memory that it has in the whole, called after the whole and its number among the parts: `w.3` of `w`.
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
    """The nodes that pick parts of parameters, where nothing reads the whole and no two parts overlap.

    A stack of matrices is one only where no layer reads two of them: else it is a layer's own, experts for one.
    """
    found: WeightSlices = {}
    for held, name in flow.program.parameters.items():
        ends: dict[fx.Node, Any] = {}
        counts: dict[fx.Node, Any] = {}
        whole = model.get_parameter(name)
        if not picked(held, whole.detach(), ends) or len(ends) < 2 or not all(isinstance(part, Tensor) for part in ends.values()):
            continue
        read = torch.zeros(whole.shape, device="cpu")
        picked(held, read, counts)
        for part in counts.values():
            part += 1
        if read.max() > 1 or (whole.dim() > 2 and not are_read_by_distinct_layers(list(ends), flow, anatomy)):
            continue
        for number, (node, part) in enumerate(ends.items()):
            found[node] = f"{name}.{number}", nn.Parameter(part, requires_grad=whole.requires_grad)
    return found


def picked(node: fx.Node, value: Any, ends: dict[fx.Node, Any]) -> bool:
    """Whether everything that reads the node, whose value is given, picks constant places of it; `ends` are what others read."""
    inner = [user for user in node.users if op(user) in SELECTING and user.all_input_nodes == [node]]
    if node.op != "placeholder" and len(inner) < len(node.users):
        ends[node] = value
        return not inner
    if not inner or len(inner) < len(node.users):
        return False
    return all(picked(user, user.target(value, *user.args[1:], **user.kwargs), ends) for user in inner)  # type: ignore[operator]


def are_read_by_distinct_layers(parts: list[fx.Node], flow: Dataflow, anatomy: Anatomy | None) -> bool:
    """Whether no layer reads two of the parts."""
    if anatomy is None:
        return False
    nodes = flow.named
    for layer in anatomy.layers:
        inside = flow.between(nodes[layer.entry], nodes[layer.exit])
        read = [part for part in parts if any(flow.reaches(part, one) for node in inside for one in weight_operands(node, flow))]
        if len(read) > 1:
            return False
    return True


def weight_operands(node: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """What a node reads that does not depend on the inputs."""
    return [one for one in node.all_input_nodes if one not in flow.depends and one in flow.position]


def replace_by_parameters(program: Program, slices: WeightSlices) -> WeightSlices:
    """In the program each part is a placeholder of its own; the same parts by their placeholders."""
    first = next(iter(program.graph.nodes))
    made: WeightSlices = {}
    for node, (name, parameter) in slices.items():
        with program.graph.inserting_before(first):
            place = program.graph.placeholder(f"p_{name.replace('.', '_')}")
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place)
        program.parameters[place] = name
        made[place] = name, parameter
        while not node.users and node.op != "placeholder":
            (source,) = node.all_input_nodes
            program.graph.erase_node(node)
            program.owner.pop(node, None)
            node = source
        program.parameters.pop(node, None)
    return made
