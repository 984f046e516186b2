"""Operations that write into what they read become ones that give a new value.

`torch` can do that for any program, by tracing it once more. Most code writes only into what it has just made (`scores += bias`):
there it is enough to call the operation by its other name, and to read its result wherever what it wrote into was read later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from retrofit.ops import ACTIVATION, ATTENTION, CONVOLUTION, NORM, PRODUCT, op

ANEW = (PRODUCT | CONVOLUTION | ATTENTION | NORM | ACTIVATION) - {"einsum"}  # an einsum of one operand may only turn it


def mutates(node: fx.Node) -> bool:
    """Whether the operation writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def made_functional(graph: fx.Graph) -> bool:
    """Whether no operation of the graph writes into an operand, now.

    Where one writes into memory that a value read later shares, into an input or a weight, the graph is left as it is.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    written = [node for node in graph.nodes if mutates(node)]
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in written:
        groups.setdefault(origin(node), []).append(node)
    if not all(others_do_not_notice(first, nodes, position) for first, nodes in groups.items()):
        return False
    others = {node: without_writing(node) for node in written}
    if any(other is None for other in others.values()):
        return False
    for first, nodes in groups.items():
        before = [first]
        for node in nodes:
            node.target = others[node]  # type: ignore[assignment]
            for one in before:
                for user in [user for user in one.users if position[user] > position[node]]:
                    user.replace_input_with(one, node)
            before.append(node)
    return True


def made_differentiable(graph: fx.Graph) -> None:
    """What was written over whole is what it was written over with: `aten.copy`, its functional form, has no derivative."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not aten.copy.default or not isinstance(node.args[1], fx.Node):
            continue
        source, made = node.args[1], node.meta["val"]
        value = source.meta["val"]
        if (value.dtype, value.device) != (made.dtype, made.device):
            with graph.inserting_before(node):
                source = graph.call_function(aten._to_copy.default, (source,), {"dtype": made.dtype, "device": made.device})
            source.meta["val"] = value.to(device=made.device, dtype=made.dtype)
        if [*map(str, value.shape)] == [*map(str, made.shape)]:
            node.target, node.args, node.kwargs = aten.clone.default, (source,), {}
        else:
            node.target, node.args, node.kwargs = aten.expand_as.default, (source, node.args[0]), {}


def origin(node: fx.Node) -> fx.Node:
    """What was made, before any operation wrote into it."""
    while mutates(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def may_share(node: fx.Node) -> bool:
    """Whether the value may lie in the memory of an operand: it is a view, or what the operation was handed.

    Of an operation that is made of others the schema does not say (`type_as`, and dropout in evaluation).
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return True
    if op(node) in ANEW:
        return False
    made_of_others = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return made_of_others or any(one.alias_info is not None and not one.alias_info.is_write for one in target._schema.arguments)


def others_do_not_notice(first: fx.Node, nodes: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """Whether `first` has memory of its own, and no view of it from before one of the `nodes` that write there is read after it."""
    if may_share(first):
        return False
    family, pending = {first, *nodes}, [first, *nodes]
    while pending:
        for user in pending.pop().users:
            if user not in family and user.op != "output" and may_share(user):
                family.add(user)
                pending.append(user)
    views = family - {first, *nodes}
    return not any(position[view] < position[node] < position[user] for view in views for node in nodes for user in view.users)


def without_writing(node: fx.Node) -> Any:
    """The operation that gives what `node`, `x.add_(y)` say, leaves in its first operand; None where there is none such."""
    target: Any = node.target
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    other = getattr(packet, schema.overload_name or "default", None)
    if other is None or written != [True, *[False] * (len(written) - 1)]:
        return None
    if [one.name for one in other._schema.arguments] != [one.name for one in schema.arguments]:
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta["val"])
    value, left = other(*args, **kwargs), node.meta["val"]
    same = isinstance(value, Tensor) and value.dtype == left.dtype and value.shape == left.shape
    return other if same else None
