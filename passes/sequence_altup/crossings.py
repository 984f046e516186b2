"""What the layers of a captured model tell one another beside the stream, and who reads the stream in the end.

A strided layer computes its anchors only. What it hands on beside the stream (which keys it chose, values that later layers mix in)
is of the anchors as well: a layer strided like it is handed that as it is, anything else needs it of every token. And where some
tokens only are read after the last layer (a class token), a strided last layer would leave the others unread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx

from retrofit.sdk import SCAN, Call, Dataflow, Key, op, shape

LOGIC = frozenset("bitwise_and bitwise_or logical_and logical_or __and__ __or__".split())


# ── From layer to layer ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A value that a layer hands on beside the stream, and what reads it: another layer's call, or None, the model's own code."""

    maker: Call
    reader: Call | None
    key: Key  # the argument it is read from
    plain: bool  # it is an argument of the reader, as it was made


def crossings(flow: Dataflow, layers: Mapping[Call, fx.Node]) -> list[Crossing]:
    """What goes from each of the calls `layers`, of which the streams are known that they return, to others or to the outputs."""
    output = next(iter(flow.program.outputs.values()), None)
    found: list[Crossing] = []
    for node in flow.nodes:
        maker = layer_of(flow, node, layers)
        if maker is not None and node in flow.depends and node is not layers[maker]:
            found += readers(flow, node, maker, layers, output)
    return found


def layer_of(flow: Dataflow, node: fx.Node, layers: Collection[Call]) -> Call | None:
    """The innermost layer that computes the node."""
    return next((call for call in flow.call_of(node).chain if call in layers), None) if node.op == "call_function" else None


def readers(
    flow: Dataflow, node: fx.Node, maker: Call, layers: Mapping[Call, fx.Node], output: fx.Node | None
) -> Iterator[Crossing]:
    """Who reads the value of `node` outside of the call it was made in."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        if value is output:
            yield Crossing(maker, None, None, False)
        for user in value.users:
            reader = layer_of(flow, user, layers)
            if user.op != "call_function" or user in seen or (reader is not None and maker in reader.chain):
                continue
            if reader is None or reader in maker.chain:
                seen.add(user)
                pending.append(user)
            else:
                key = next((key for key, entered in reader.inputs.items() if entered is value), None)
                yield Crossing(maker, reader, key, value is node and key is not None)


def handed_over(flow: Dataflow, call: Call, layers: Mapping[Call, fx.Node]) -> dict[Key, Call]:
    """The arguments of a call that other layers made beside their streams, and which did."""
    makers = {key: layer_of(flow, node, layers) for key, node in call.inputs.items()}
    return {key: maker for key, maker in makers.items() if maker is not None and call.inputs[key] is not layers[maker]}


def reads_by_another_way(flow: Dataflow, call: Call, known: Collection[tuple[int, ...]]) -> bool:
    """Whether the call reads what is no argument of it, nor of one of the `known` shapes that lie in its arguments' containers."""
    entered = set(call.inputs.values())
    return any(node in flow.depends and node not in entered and shape(node) not in known for node in read_from_outside(flow, call))


def read_from_outside(flow: Dataflow, call: Call) -> set[fx.Node]:
    """The values computed elsewhere that the call's operations read."""
    inside = [node for node in flow.nodes if node.op == "call_function" and call.encloses(flow.call_of(node))]
    read = {part for node in inside for part in node.all_input_nodes if part in flow.position}
    return {part for part in read if part.op != "call_function" or not call.encloses(flow.call_of(part))}


# ── Padding ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def hears_of_padding(flow: Dataflow, call: Call, entry: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Whether the call reads anything, the stream apart, that a mask has entered other than by counting."""
    outside = read_from_outside(flow, call) - {entry}
    return any(tells_padding(flow, node, masks) for node in outside)


def tells_padding(flow: Dataflow, node: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Whether a mask enters the value other than by counting: what was also counted is a mask still if it is no whole number."""
    value = node.meta.get("val")
    whole = not isinstance(value, torch.Tensor) or not (
        value.dtype == torch.bool or (value.is_floating_point() and value.dim() == 4)
    )
    for mask in masks:
        between = flow.between(mask, node) if flow.reaches(mask, node) else []
        if (between or mask is node) and (enters_uncounted(mask, node, between) if not whole else not any(map(counts, between))):
            return True
    return False


def counts(node: fx.Node) -> bool:
    return op(node) in SCAN


def enters_uncounted(mask: fx.Node, node: fx.Node, between: Collection[fx.Node]) -> bool:
    """Whether one of the ways `between` the mask and the value has no count on it."""
    reached = {mask}
    for step in between:  # in order
        if not counts(step) and any(part in reached for part in step.all_input_nodes):
            reached.add(step)
    return node in reached


def is_made_of_ids(flow: Dataflow, node: fx.Node) -> bool:
    """Whether the value says yes or no of the inputs without any weight: a mask that the model's own code makes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node not in flow.depends:
        return False
    if value.dtype != torch.bool and not any(op(step) in LOGIC for step in flow.carried_chain(node)):
        return False
    return not any(flow.reaches(weight, node) for weight in flow.program.parameters if weight in flow.position)


# ── Who reads the stream in the end ──────────────────────────────────────────────────────────────────────────────────────────────


def learns(flow: Dataflow, exit_: fx.Node) -> bool:
    """Whether an output hangs on the value by more than choices: only through numbers of which each can be moved a little."""
    outputs, pending, seen = set(flow.program.outputs.values()), [exit_], {exit_}
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


def reads_some_only(flow: Dataflow, exit_: fx.Node) -> bool:
    """Whether all that is read of the stream (batch, tokens, width) is tokens at fixed places, before anything joins the tokens."""
    length = (shape(exit_) or (0, 0))[1]
    pending, seen, picked = [exit_], {exit_}, False
    while pending:
        for user in flow.uses[pending.pop()]:
            size = shape(user)
            if user in seen:
                continue
            seen.add(user)
            if op(user) == "getitem" or (size is not None and len(size) == 3 and size[1] == length):
                pending.append(user)
            elif op(user) == "select":
                picked = True
            elif op(user) != "sym_size":
                return False
    return picked
