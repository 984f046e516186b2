"""Values that layers compute next to the stream and other layers read: which keys a layer chose, values that are mixed in later.

What a strided layer computes it computes for its anchors. A layer with the same stride can use that as it is; anything else needs a
value for every token. A cast to the dtype and device that a value has computes nothing: torch returns the value itself, which in
the graph is that cast from there on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from torch import fx

from retrofit.sdk import CAST, Call, Dataflow, Key, op, shape


@dataclasses.dataclass(frozen=True)
class CrossLayerValue:
    """A value that one layer computes next to its stream, and one place where it is read."""

    producer: Call
    consumer: Call | None  # the call of another layer; None: the outputs
    is_argument: bool  # the consumer receives it as an argument, unchanged


def cross_layer_values(flow: Dataflow, streams: Mapping[Call, fx.Node]) -> list[CrossLayerValue]:
    """What the calls of layers, given with the `streams` that they return, compute for others or for the outputs."""
    output = next(iter(flow.program.outputs.values()), None)
    found: list[CrossLayerValue] = []
    for node in flow.nodes:
        producer = layer_of(flow, node, streams)
        if producer is not None and node in flow.depends and node is not streams[producer] and value_before_casts(node) is node:
            found += uses_elsewhere(flow, node, producer, streams, output)
    return found


def layer_of(flow: Dataflow, node: fx.Node, layers: Collection[Call]) -> Call | None:
    """The innermost layer that computes the node."""
    return next((call for call in flow.call_of(node).chain if call in layers), None) if node.op == "call_function" else None


def uses_elsewhere(
    flow: Dataflow, node: fx.Node, producer: Call, layers: Collection[Call], output: fx.Node | None
) -> Iterator[CrossLayerValue]:
    """The uses of the node's value outside of the call that computed it."""
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
    """The value that the node is, where casts that change neither its dtype nor its device returned it."""
    while op(node) in CAST and isinstance(operand := node.args[0], fx.Node) and is_of_same_kind(node, operand):
        node = operand
    return node


def is_of_same_kind(one: fx.Node, other: fx.Node) -> bool:
    ours, theirs = one.meta["val"], other.meta["val"]
    return (ours.dtype, ours.device, ours.shape) == (theirs.dtype, theirs.device, theirs.shape)


def arguments_from_layers(flow: Dataflow, call: Call, streams: Mapping[Call, fx.Node]) -> dict[Key, Call]:
    """The arguments of a call that layers computed next to their streams, and which layers."""
    entered = {key: value_before_casts(node) for key, node in call.inputs.items()}
    producers = {key: layer_of(flow, node, streams) for key, node in entered.items()}
    return {
        key: producer
        for key, producer in producers.items()
        if producer is not None and entered[key] is not value_before_casts(streams[producer])
    }


def reads_past_its_arguments(flow: Dataflow, call: Call, known: Collection[tuple[int, ...]]) -> bool:
    """Whether the call reads a value that is no argument of it, and of none of the `known` shapes that are inside its arguments."""
    arguments = set(call.inputs.values())
    return any(node in flow.depends and node not in arguments and shape(node) not in known for node in values_read(flow, call))


def values_read(flow: Dataflow, call: Call) -> set[fx.Node]:
    """The values computed elsewhere that the call's operations read."""
    inside = nodes_inside(flow, call)
    read = {part for node in inside for part in node.all_input_nodes if part in flow.position}
    return {part for part in read if part.op != "call_function" or not call.encloses(flow.call_of(part))}


def nodes_inside(flow: Dataflow, call: Call) -> list[fx.Node]:
    """The operations of the call and of the calls inside it, in order."""
    return [node for node in flow.nodes if node.op == "call_function" and call.encloses(flow.call_of(node))]
