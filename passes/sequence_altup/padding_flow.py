"""Where a model's masks go: which values show which tokens are padding."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from retrofit.passes.sequence_altup.cross_layer_values import values_read
from retrofit.sdk import SCAN, Call, Dataflow, op

LOGIC = frozenset("bitwise_and bitwise_or logical_and logical_or __and__ __or__".split())


def reads_padding(flow: Dataflow, call: Call, entry: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Whether the call reads a value that shows padding, the stream, which enters at `entry`, apart."""
    return any(shows_padding(flow, node, masks) for node in values_read(flow, call) - {entry})


def shows_padding(flow: Dataflow, node: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Whether one of the `masks` enters the value other than by counting, which makes it positions.

    A boolean value, or numbers in four dimensions, is a mask even if a count enters it as well.
    """
    value = node.meta.get("val")
    is_mask_like = isinstance(value, torch.Tensor) and (
        value.dtype == torch.bool or (value.is_floating_point() and value.dim() == 4)
    )
    for mask in masks:
        between = flow.between(mask, node) if flow.reaches(mask, node) else []
        if not between and mask is not node:
            continue
        if enters_uncounted(mask, node, between) if is_mask_like else not any(map(is_count, between)):
            return True
    return False


def is_count(node: fx.Node) -> bool:
    return op(node) in SCAN


def enters_uncounted(mask: fx.Node, node: fx.Node, between: Collection[fx.Node]) -> bool:
    """Whether one of the paths from the mask to the value, made of the nodes `between`, has no count on it."""
    reached = {mask}
    for step in between:  # in order
        if not is_count(step) and any(part in reached for part in step.all_input_nodes):
            reached.add(step)
    return node in reached


def is_mask_of_inputs(flow: Dataflow, node: fx.Node) -> bool:
    """Whether the value is a mask that the model's own code computes from its inputs: yes or no, without any weight."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node not in flow.depends:
        return False
    if value.dtype != torch.bool and not any(op(step) in LOGIC for step in flow.carried_chain(node)):
        return False
    return not any(flow.reaches(weight, node) for weight in flow.program.parameters if weight in flow.position)
