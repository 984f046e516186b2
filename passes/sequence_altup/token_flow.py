"""What the graph says about a layer and the tokens: values read by other layers, masks, uses of the stream, numberings.

What a strided layer computes it computes for its anchors. A layer with the same stride can use that as it is; anything else needs a
value for every token. A cast to the dtype and device that a value has computes nothing: torch returns the value itself, which in
the graph is that cast from there on.

A layer that numbers the tokens itself, by how many it receives, would number every k-th token differently. A table cut to the
number of tokens may still be stride-invariant, the same for every k-th token as for as many in a row: which of two tokens is
earlier is, how far apart they are is not. A causal mask that a layer keeps as a buffer is such a table; a sliding window or a table
of positions is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from retrofit.sdk.program import CAST, SCAN, Call, Dataflow, Key, op, shape

# ── Values that layers compute next to the stream ─────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class CrossLayerValue:
    """A value that one layer computes next to its stream, and one place where it is read."""

    producer: Call
    consumer: Call | None  # the call of another layer; None: the outputs
    is_argument: bool  # the consumer receives it as an argument, unchanged


def cross_layer_values(flow: Dataflow, streams: Mapping[Call, fx.Node]) -> list[CrossLayerValue]:
    """Return what the calls of layers, given with the `streams` that they return, compute for others or for the outputs."""
    output = next(iter(flow.program.outputs.values()), None)
    found: list[CrossLayerValue] = []
    for node in flow.nodes:
        producer = layer_of(flow, node, streams)
        if producer is not None and node in flow.depends and node is not streams[producer] and value_before_casts(node) is node:
            found += uses_elsewhere(flow, node, producer, streams, output)
    return found


def layer_of(flow: Dataflow, node: fx.Node, layers: Collection[Call]) -> Call | None:
    """Return the innermost layer that computes the node."""
    return next((call for call in flow.call_of(node).chain if call in layers), None) if node.op == "call_function" else None


def uses_elsewhere(
    flow: Dataflow, node: fx.Node, producer: Call, layers: Collection[Call], output: fx.Node | None
) -> Iterator[CrossLayerValue]:
    """Yield the uses of the node's value outside of the call that computed it."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        if value is output:
            yield CrossLayerValue(producer, None, False)
        for user in value.users:
            consumer = layer_of(flow, user, layers)
            if user.op != "call_function" or user in seen or (consumer is not None and producer in consumer.chain):
                continue
            if consumer is None or consumer in producer.chain:
                seen.add(user)
                pending.append(user)
            else:
                key = next((key for key, entered in consumer.inputs.items() if entered is value), None)
                yield CrossLayerValue(producer, consumer, value is node and key is not None)


def value_before_casts(node: fx.Node) -> fx.Node:
    """Return the value that the node is, where casts that change neither its dtype nor its device returned it."""
    while op(node) in CAST and isinstance(operand := node.args[0], fx.Node) and is_of_same_kind(node, operand):
        node = operand
    return node


def is_of_same_kind(node: fx.Node, other: fx.Node) -> bool:
    ours, theirs = node.meta["val"], other.meta["val"]
    return (ours.dtype, ours.device, ours.shape) == (theirs.dtype, theirs.device, theirs.shape)


def arguments_from_layers(flow: Dataflow, call: Call, streams: Mapping[Call, fx.Node]) -> dict[Key, Call]:
    """Return the arguments of a call that layers computed next to their streams, and which layers."""
    entered = {key: value_before_casts(node) for key, node in call.inputs.items()}
    producers = {key: layer_of(flow, node, streams) for key, node in entered.items()}
    return {
        key: producer
        for key, producer in producers.items()
        if producer is not None and entered[key] is not value_before_casts(streams[producer])
    }


def reads_past_its_arguments(flow: Dataflow, call: Call, known: Collection[tuple[int, ...]]) -> bool:
    """Return whether the call reads a value that is no argument of it and has none of the `known` shapes inside its arguments."""
    arguments = set(call.inputs.values())
    return any(node in flow.depends and node not in arguments and shape(node) not in known for node in values_read(flow, call))


def values_read(flow: Dataflow, call: Call) -> set[fx.Node]:
    """Return the values computed elsewhere that the call's operations read."""
    inside = nodes_inside(flow, call)
    read = {part for node in inside for part in node.all_input_nodes if part in flow.position}
    return {part for part in read if part.op != "call_function" or not call.encloses(flow.call_of(part))}


def nodes_inside(flow: Dataflow, call: Call) -> list[fx.Node]:
    """Return the operations of the call and of the calls inside it, in order."""
    return [node for node in flow.nodes if node.op == "call_function" and call.encloses(flow.call_of(node))]


# ── Masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


LOGIC = frozenset("bitwise_and bitwise_or logical_and logical_or __and__ __or__".split())


def reads_padding(flow: Dataflow, call: Call, entry: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Return whether the call reads a value that shows padding, the stream, which enters at `entry`, apart."""
    return any(shows_padding(flow, node, masks) for node in values_read(flow, call) - {entry})


def shows_padding(flow: Dataflow, node: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Return whether one of the `masks` enters the value other than by counting, which makes it positions.

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
    """Return whether one of the paths from the mask to the value, made of the nodes `between`, has no count on it."""
    reached = {mask}
    for step in between:  # in order
        if not is_count(step) and any(part in reached for part in step.all_input_nodes):
            reached.add(step)
    return node in reached


def is_mask_of_inputs(flow: Dataflow, node: fx.Node) -> bool:
    """Return whether the value is a mask that the model's own code computes from its inputs: yes or no, without any weight."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node not in flow.depends:
        return False
    if value.dtype != torch.bool and not any(op(step) in LOGIC for step in flow.carried_chain(node)):
        return False
    return not any(flow.reaches(weight, node) for weight in flow.program.parameters if weight in flow.position)


# ── Uses of the stream ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def has_gradient(flow: Dataflow, stream: fx.Node) -> bool:
    """Return whether an output depends on the stream through real numbers all the way, and not by choices only."""
    outputs, pending, seen = set(flow.program.outputs.values()), [stream], {stream}
    while pending:
        value = pending.pop()
        if value in outputs:
            return True
        for user in flow.uses[value]:
            example = user.meta.get("val")
            parts = example if isinstance(example, (tuple, list)) else (example,)
            if user not in seen and any(isinstance(part, torch.Tensor) and part.is_floating_point() for part in parts):
                seen.add(user)
                pending.append(user)
    return False


def is_read_at_fixed_tokens_only(flow: Dataflow, stream: fx.Node) -> bool:
    """Return whether only fixed tokens of the stream (batch, tokens, width) are read, before anything joins the tokens."""
    length = (shape(stream) or (0, 0))[1]
    pending, seen, selects = [stream], {stream}, False
    while pending:
        for user in flow.uses[pending.pop()]:
            size = shape(user)
            if user in seen:
                continue
            seen.add(user)
            if op(user) == "getitem" or (size is not None and len(size) == 3 and size[1] == length):
                pending.append(user)
            elif op(user) == "select":
                selects = True
            elif op(user) != "sym_size":
                return False
    return selects


# ── Numberings ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


CUTS = ("slice", "narrow")


def numbers_tokens(node: fx.Node, flow: Dataflow, length: int) -> bool:
    """Return whether the operation computes a value for each of `length` tokens from nothing but their number."""
    if node in flow.depends or length not in (shape(node) or ()):
        return False
    if op(node) in CUTS:
        return length not in (shape(node.args[0]) or ())  # the beginning of a longer table
    tables = [part for part in node.all_input_nodes if part in flow.program.buffers or part in flow.program.parameters]
    return op(node) in ("arange", "linspace") or (op(node) in ("index", "index_select", "embedding") and bool(tables))


def length_cut_tables(node: fx.Node, flow: Dataflow, length: int) -> list[tuple[Tensor, tuple[int, ...]]] | None:
    """Return the longer tables from which a numbering is cut, each with the dimensions that are cut to the number of tokens.

    None where it is no such cut, or where weights or inputs enter the tables. On the meta device they have no values.
    """
    if op(node) not in CUTS:
        return None
    found = []
    for end in last_cuts(node, flow):
        table = value_before_cut(end, flow, length)
        if table is None or table.dim() != len(shape(end) or ()):
            return None
        found.append((table, tuple(dim for dim, extent in enumerate(shape(end) or ()) if extent == length != table.shape[dim])))
    return found


def last_cuts(node: fx.Node, flow: Dataflow) -> Iterator[fx.Node]:
    """Yield the cut `node` where anything but a further cut reads it, and the last of the further cuts."""
    further = [user for user in flow.uses[node] if op(user) in CUTS]
    if len(further) < len(flow.uses[node]):
        yield node
    for user in further:
        yield from last_cuts(user, flow)


def value_before_cut(node: fx.Node, flow: Dataflow, length: int) -> Tensor | None:
    """Return the node's value without the cuts to `length`; None where anything but buffers and constants enters it."""
    program = flow.program
    if node in flow.depends:
        return None
    if node.op == "placeholder":
        return program.values.get(program.buffers.get(node, program.constants.get(node, "")))
    operands: dict[fx.Node, Any] = {part: value_before_cut(part, flow, length) for part in node.all_input_nodes}
    if any(operand is None for operand in operands.values()):
        return None
    if op(node) in CUTS and (length, True) in zip(shape(node) or (), cut_dims(node), strict=True):
        return operands[node.args[0]]  # type: ignore[index,no-any-return]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value if isinstance(value, Tensor) else None


def cut_dims(node: fx.Node) -> list[bool]:
    """For each dimension whether the cut made it shorter."""
    return [size != size_before for size, size_before in zip(shape(node) or (), shape(node.args[0]) or (), strict=True)]


def is_stride_invariant(table: Tensor, dims: tuple[int, ...], k: int) -> bool:
    """Return whether the table is the same for every k-th token as for as many in a row."""
    every = first = table
    for dim in dims:
        size = table.shape[dim]
        every = every.index_select(dim, torch.arange(0, size, k, device=table.device))
        first = first.narrow(dim, 0, -(-size // k))
    return bool(dims) and torch.equal(every, first)
