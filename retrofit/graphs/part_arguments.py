"""What a part of a graph takes as arguments: the tensors it reads, and the sizes that it cannot read off one of these."""

from __future__ import annotations

from torch import fx

from retrofit.graphs.emission_context import EmissionContext
from retrofit.graphs.symbolic_sizes import is_size_value


def part_arguments(own: list[fx.Node], context: EmissionContext) -> tuple[list[fx.Node], list[fx.Node]]:
    """The arguments of a part that computes the nodes `own`, and those of them that it computes itself.

    A size that one of its tensors has is read off that tensor, not passed: a part whose tensors are shorter than they were at
    capture still computes with the right sizes.
    """
    inside = {node for node in own if not is_size_value(node)}
    tensors = dict.fromkeys(
        one
        for node in own
        if node in inside
        for one in non_weight_operands(node, context)
        if one not in inside and not is_size_value(one)
    )
    entering = list(tensors)
    computed_sizes: set[fx.Node] = set()
    sizes: dict[fx.Node, None] = {}
    pending = [one for node in own if node in inside for one in non_weight_operands(node, context) if is_size_value(one)]
    pending += [node for node in own if is_size_value(node) and any(user not in own for user in node.users)]
    while pending:
        size = pending.pop()
        if size in computed_sizes or size in sizes or is_computable_from(size, entering, context):
            continue
        if size not in own:
            sizes[size] = None
            continue
        computed_sizes.add(size)
        pending += [one for one in non_weight_operands(size, context) if is_size_value(one)]
        tensors |= dict.fromkeys(one for one in non_weight_operands(size, context) if one not in inside and not is_size_value(one))
    return [*tensors, *sizes], [node for node in own if node in inside or node in computed_sizes]


def is_computable_from(size: fx.Node, tensors: list[fx.Node], context: EmissionContext) -> bool:
    """Whether the size is a dimension of one of the tensors, or computed from such sizes only."""
    if dimension_of_size(size, tensors, context) is not None:
        return True
    operands = non_weight_operands(size, context)
    return bool(operands) and all(is_size_value(one) and is_computable_from(one, tensors, context) for one in operands)


def dimension_of_size(size: fx.Node, tensors: list[fx.Node], context: EmissionContext) -> tuple[fx.Node, int] | None:
    """The first of the tensors with a dynamic dimension of this size, and that dimension; None where there is none."""
    symbols = context.sizes.get(size, ())
    if not is_size_value(size) or len(symbols) != 1 or isinstance(symbols[0], int):
        return None
    for one in tensors:
        for dim, symbol in enumerate(context.sizes.get(one, ())):
            if not isinstance(symbol, int) and symbol == symbols[0]:
                return one, dim
    return None


def non_weight_operands(node: fx.Node, context: EmissionContext) -> list[fx.Node]:
    """The operands of the node that are no weights."""
    return [part for part in node.all_input_nodes if not context.is_weight(part)]
