"""The requirements on a layer that sees only every k-th token, and the relation of its arguments to the tokens.

Each requirement raises `DoesNotFitError` with the reason. A requirement on the layer alone takes a `Candidate`, a layer's call in
the larger of two captures. Masks among the arguments are inferred from the graph, not from names: the model's own mask enters them,
other than through a running count, which makes positions.

A strided layer's values exist for its anchors only. A layer with the same stride can use them directly; anything else needs a value
for every token. A cast to a value's own dtype and device computes nothing: torch returns the value itself, which from there on is
the cast's node in the graph.

A layer that numbers the tokens it receives would number every k-th token differently. A table cut to the number of tokens may still
be stride-invariant, the same for every k-th token as for as many in a row: which of two tokens is earlier is invariant, their
distance is not. A causal mask in a buffer is such a table; a sliding window or a table of positions is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.passes.sequence_altup.arguments import ArgumentPath, MaskArgument, Shapes, TokenDims, argument_path, infer_token_dims
from retrofit.passes.sequence_altup.captured_arguments import ArgumentCaptures, CapturedArguments
from retrofit.passes.sequence_altup.strided_layers import StridedLayer
from retrofit.sdk import Layer, Stack, unfit
from retrofit.sdk.anatomy import modules_around
from retrofit.sdk.program import CAST, SCAN, Call, Dataflow, Key, op, shape

# ── Requirements by the anatomy ──────────────────────────────────────────────────────────────────────────────────────────────────


def is_inside_strided(model: nn.Module, path: str) -> bool:
    """Return whether the module at the path is part of a strided layer."""
    return any(isinstance(outer, StridedLayer) for outer in modules_around(model, path)[:-1])


def require_unstrided(model: nn.Module, path: str) -> None:
    if is_inside_strided(model, path) or any(isinstance(part, StridedLayer) for part in model.get_submodule(path).modules()):
        raise unfit("it is strided already", "start from the dense model to use other options; layers= names other depths")


def require_all_calls(stack: Stack, layer: Layer, depths: set[int]) -> None:
    """Require that all depths of a shared module are to be strided, and nothing is stored for decoding."""
    own = [depth for depth, other in enumerate(stack.layers) if other.name == layer.name]
    if not depths.issuperset(own):
        raise unfit("its module also runs at depths that are not selected", remedy="use layers=all to stride the module everywhere")
    if stack.causal and len(own) > 1:
        raise unfit("its module runs at several depths, whose stored states would be mixed up in decoding")


# ── Requirements by captures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layer that may be strided, and the captures of its arguments."""

    stack: Stack
    layer: Layer
    module: nn.Module
    k: int
    captures: ArgumentCaptures

    @property
    def captured(self) -> CapturedArguments:
        """The larger capture, whose graph the nodes belong to."""
        return self.captures.larger

    @property
    def call(self) -> Call:
        return self.captured.call_of(self.layer)

    @property
    def stream(self) -> ArgumentPath:
        return argument_path(self.module, self.layer.stream_places()[0])

    @property
    def tokens_first(self) -> bool:
        return self.captures.is_tokens_first(self.layer, self.stream) is True

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of tokens in the stream, in the first and in the larger capture."""
        dim = 0 if self.tokens_first else 1
        before, after = (captured.shapes(self.layer)[self.stream][dim] for captured in (self.captures.first, self.captured))
        return before, after

    @property
    def exit(self) -> fx.Node:
        """The stream that the layer returns."""
        return self.call.outputs[self.layer.stream_places()[1]]

    @property
    def argument_nodes(self) -> dict[ArgumentPath, fx.Node]:
        """The graph's nodes of the arguments; values inside containers have none."""
        return {argument_path(self.module, key): node for key, node in self.call.inputs.items() if key is not None}


def require_one_stream_argument(candidate: Candidate) -> None:
    """Require that the stream is the same argument in both captures, and that no argument's sizes depend on values."""
    first, second = candidate.captures.first.shapes(candidate.layer), candidate.captured.shapes(candidate.layer)
    if candidate.stream not in first or candidate.stream not in second:
        raise unfit("it does not receive the stream by the same argument every time")
    if any(isinstance(size, torch.SymInt) for size in (*first[candidate.stream], *second[candidate.stream])):
        raise unfit("the number of its tokens depends on the values of tensors")
    for path, size in (*first.items(), *second.items()):
        if any(isinstance(length, torch.SymInt) for length in size):
            raise unfit(f"the length of its argument {'.'.join(map(str, path))} depends on the values of tensors")


def require_one_position_per_token(candidate: Candidate) -> None:
    """Require that the stream has a dimension of tokens, with several of them, and one position for each."""
    if candidate.captures.is_tokens_first(candidate.layer, candidate.stream) is None:
        size = tuple(candidate.captures.first.shapes(candidate.layer)[candidate.stream])
        raise unfit(f"its stream {size} is not laid out as (batch, tokens, width)")
    before, length = candidate.lengths
    if candidate.k > 1 and length == 1:
        raise unfit("with the example inputs it receives one token only", remedy="pass larger example_inputs=")
    ids_before, ids = candidate.captures.first.length, candidate.captured.length
    if ids and ids - ids_before < length - before:
        raise unfit("its stream has several positions a token, and which of them are anchors is not defined")


def require_stream_returned(candidate: Candidate) -> None:
    """Require that the returned stream has the shape of the one received."""
    stream_in, stream_out = candidate.layer.stream_places()
    entry, exit_ = candidate.call.inputs.get(stream_in), candidate.call.outputs.get(stream_out)
    if entry is None or exit_ is None or shape(entry) != shape(exit_):
        raise unfit("it returns a stream of another shape")


def require_readable_arguments(candidate: Candidate) -> None:
    """Require that no object among the arguments holds tensors that the layer reads."""
    shapes = {tuple(size) for size in candidate.captured.shapes(candidate.layer).values()}
    for name, kind in candidate.captured.objects.get(candidate.layer.name, {}).items():
        if reads_past_its_arguments(candidate.captured.flow, candidate.call, shapes):
            raise unfit(f"it receives {name}, a {kind}, whose content per token is unknown")


def require_known_cache_arguments(layer: Layer, new: dict[str, str]) -> None:
    """Require that decoding brings no tensors that the layer does not receive otherwise; `new`: such arguments by layer."""
    if layer.name in new:
        raise unfit(f"in decoding it receives {new[layer.name]}, whose content per token is unknown")


def require_gradient(candidate: Candidate) -> None:
    if not has_gradient(candidate.captured.flow, candidate.exit):
        raise unfit("the outputs depend on it only through selection, so nothing would be learned")


def require_all_tokens_read(candidate: Candidate) -> None:
    """Require that something after the layer reads tokens between anchors."""
    is_last = candidate.layer.exit == candidate.stack.layers[-1].exit
    if is_last and is_read_at_fixed_tokens_only(candidate.captured.flow, candidate.exit):
        raise unfit("only some of its tokens are read in the end, and none of those between anchors")


def numberings_inside(candidate: Candidate) -> list[fx.Node]:
    """Return the operations by which the layer itself numbers the tokens and which enter its result."""
    flow, (_, length) = candidate.captured.flow, candidate.lengths
    inside = nodes_inside(flow, candidate.call)
    return [node for node in inside if numbers_tokens(node, flow, length) and flow.reaches(node, candidate.exit)]


def require_no_numbering(candidate: Candidate, replayed: bool) -> None:
    """Require that the layer does not number tokens itself, except by stride-invariant tables.

    A recipe `replayed` on a model without values names the layers whose tables were found to be so.
    """
    for node in numberings_inside(candidate):
        if not is_invariant_cut(candidate, node, replayed):
            why = "its own code numbers the tokens it receives, and the anchors would lose their positions"
            raise unfit(why, "apply the pass that put such code there after this one; layers= leaves depths out")


def is_invariant_cut(candidate: Candidate, node: fx.Node, replayed: bool) -> bool:
    """Return whether a numbering is cut from tables that are stride-invariant."""
    tables = length_cut_tables(node, candidate.captured.flow, candidate.lengths[1])
    if tables is None:
        return False
    candidate.captures.values_decided = True
    if any(table.is_meta for table, _ in tables):
        return replayed
    return all(is_stride_invariant(table, dims, candidate.k) for table, dims in tables)


def require_padding_shown(candidate: Candidate, token_dims: Iterable[TokenDims]) -> None:
    """Require an argument that shows the layer which tokens are padding, if other layers of the stack have one."""
    if any(dims.shows_padding for dims in token_dims):
        return
    captured = candidate.captured
    for other in candidate.stack.layers:
        if other.name in ("", candidate.layer.name):
            continue
        call = captured.call_of(other)
        if other.stream_in in call.inputs and reads_padding(captured.flow, call, call.inputs[other.stream_in], captured.masks):
            raise unfit("it receives no mask, and would count padding among the tokens where other layers do not")


# ── Requirements by other layers ─────────────────────────────────────────────────────────────────────────────────────────────────


def require_fitting_consumers(path: str, values: Iterable[CrossLayerValue], strided: Collection[str]) -> None:
    """Raise if anything but `strided` layers reads a value that the layer at `path` computes next to its stream."""
    for value in values:
        if value.producer.path != path:
            continue
        if value.consumer is None:
            raise unfit("what it computes next to the stream enters the outputs, which need it for every token")
        if value.consumer.path not in strided or not value.is_argument:
            raise unfit(f"what it computes next to the stream is read by {value.consumer.path}, which needs it for every token")


# ── Relation of the arguments to the tokens ───────────────────────────────────────────────────────────────────────────────────────


Dims = dict[ArgumentPath, TokenDims]


def infer_arguments(candidate: Candidate) -> Dims:
    """Return the token dimensions of every argument but the stream; raises `DoesNotFitError` if they cannot be strided."""
    shapes = candidate.captures.first.shapes(candidate.layer), candidate.captured.shapes(candidate.layer)
    found = infer_token_dims(*shapes, candidate.stream, candidate.tokens_first)
    del found[candidate.stream]
    nodes = candidate.argument_nodes
    require_entries_for_single_tokens(candidate, shapes, found)
    for path, dims in found.items():
        if len(dims.positions) > 2:
            raise unfit(f"{path[0]} follows the tokens along {len(dims.positions)} dimensions")
        if dims.positions and is_mask(candidate, path, dims, nodes.get(path)):
            found[path] = dataclasses.replace(dims, shows_padding=True)
    found = with_inverted_masks(candidate, without_query_masks(found), nodes)
    require_readable_masks(candidate, found, nodes)
    return found


def require_entries_for_single_tokens(candidate: Candidate, shapes: tuple[Shapes, Shapes], paths: Iterable[ArgumentPath]) -> None:
    """Require, if all inputs follow the same tokens, that no argument has one entry for several of them, or several for one.

    With another side's tokens, such as an encoder's, the entries may be theirs.
    """
    if has_other_tokens(candidate):
        return
    for path in paths:
        extents = zip(shapes[0][path], shapes[1][path], strict=False)
        if any(is_other_count(candidate, *pair) for pair in extents):
            raise unfit(f"it receives {path[0]}, which has no single entry for each token", "exclude its depth with layers=")


def has_other_tokens(candidate: Candidate) -> bool:
    """Return whether some input of the model has other tokens than the stream."""
    first, second = candidate.captures.first.input_shapes, candidate.captured.input_shapes
    pairs = (zip(first.get(path, ()), after, strict=False) for path, after in second.items())
    return any(is_other_count(candidate, *pair) for extents in pairs for pair in extents)


def is_other_count(candidate: Candidate, before: int, after: int) -> bool:
    """Return whether a size in the two captures follows the inputs, but neither the stream's tokens nor the batch."""
    batches = candidate.captures.first.batch, candidate.captured.batch
    return before != after and (before, after) != candidate.lengths and before * batches[1] != after * batches[0]


def is_mask(candidate: Candidate, path: ArgumentPath, dims: TokenDims, node: fx.Node | None) -> bool:
    """Return whether an argument, with value `node` in the graph, shows which tokens are padding."""
    if node is None:
        return candidate.captures.is_mask_in_container(candidate.layer, path, dims)
    flow = candidate.captured.flow
    return shows_padding(flow, node, candidate.captured.masks) or (len(dims.positions) == 2 and is_mask_of_inputs(flow, node))


def without_query_masks(found: Dims) -> Dims:
    """Return the arguments; a mask by queries next to one by queries and keys shows no padding, as it has no keys."""
    if not any(dims.shows_padding and len(dims.positions) == 2 for dims in found.values()):
        return found
    silent = {path for path, dims in found.items() if dims.rank == 4 and dims.positions == (2,)}
    return {path: dataclasses.replace(dims, shows_padding=False) if path in silent else dims for path, dims in found.items()}


def with_inverted_masks(candidate: Candidate, found: Dims, nodes: dict[ArgumentPath, fx.Node]) -> Dims:
    """Return the arguments; a mask by tokens that reads as all padding without any is marked as zero for real tokens."""
    changed = {}
    for path, dims in found.items():
        inverted = dataclasses.replace(dims, zero_is_real=True)
        by_tokens = dims.shows_padding and len(dims.positions) == 1 and dims.rank == 2
        if by_tokens and not candidate.captures.reads_as_unpadded(nodes.get(path), dims):
            changed[path] = inverted if candidate.captures.reads_as_unpadded(nodes.get(path), inverted) else dims
    return found | changed


def require_readable_masks(candidate: Candidate, found: Dims, nodes: dict[ArgumentPath, fx.Node]) -> None:
    """Require masks of a usual form: real tokens are one or True, or zero if the mask is added."""
    captures = candidate.captures
    unclear = [path for path, dims in found.items() if dims.shows_padding and not captures.reads_as_unpadded(nodes.get(path), dims)]
    if unclear:
        captures.values_decided |= any(captures.tables_of(nodes.get(path)) for path in unclear)
        raise unfit(f"what it receives as {unclear[0][0]} shows padding in an unknown form")


def mask_argument(candidate: Candidate, found: Dims) -> MaskArgument | None:
    """Return the argument that is a mask by queries and keys, and its dtype; None if the layer takes none."""
    for path, dims in found.items():
        if dims.shows_padding and dims.rank == 4 and len(dims.positions) == 2 and len(path) == 1:
            return path, candidate.captures.first.dtype(candidate.layer, path)
    return None


def returned_arguments(candidate: Candidate) -> dict[int | str, ArgumentPath]:
    """Return the arguments that the layer returns unchanged, by their key in its output."""
    arguments: dict[Any, ArgumentPath] = {node: path for path, node in candidate.argument_nodes.items()}
    outputs = candidate.call.outputs.items()
    return {
        key: arguments[node] for key, node in outputs if key is not None and key != candidate.layer.stream_out and node in arguments
    }


# ── Values that layers compute next to the stream ─────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class CrossLayerValue:
    """A value that a layer computes next to its stream, and one place that reads it."""

    producer: Call
    consumer: Call | None  # the call of another layer; None: the outputs
    is_argument: bool  # the consumer receives it as an argument, unchanged


def cross_layer_values(flow: Dataflow, streams: Mapping[Call, fx.Node]) -> list[CrossLayerValue]:
    """Return the values that the calls of layers, given with their returned `streams`, compute for others or for the outputs."""
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
    """Return the value of the node before casts that change neither its dtype nor its device."""
    while op(node) in CAST and isinstance(operand := node.args[0], fx.Node) and is_of_same_kind(node, operand):
        node = operand
    return node


def is_of_same_kind(node: fx.Node, other: fx.Node) -> bool:
    value, same = node.meta["val"], other.meta["val"]
    return (value.dtype, value.device, value.shape) == (same.dtype, same.device, same.shape)


def arguments_from_layers(flow: Dataflow, call: Call, streams: Mapping[Call, fx.Node]) -> dict[Key, Call]:
    """Return the arguments of a call that layers computed next to their streams, and these layers."""
    entered = {key: value_before_casts(node) for key, node in call.inputs.items()}
    producers = {key: layer_of(flow, node, streams) for key, node in entered.items()}
    return {
        key: producer
        for key, producer in producers.items()
        if producer is not None and entered[key] is not value_before_casts(streams[producer])
    }


def reads_past_its_arguments(flow: Dataflow, call: Call, known: Collection[tuple[int, ...]]) -> bool:
    """Return whether the call reads a value that is none of its arguments and has none of the `known` shapes in them."""
    arguments = set(call.inputs.values())
    return any(node in flow.depends and node not in arguments and shape(node) not in known for node in values_read(flow, call))


def values_read(flow: Dataflow, call: Call) -> set[fx.Node]:
    """Return the values from elsewhere that the call's operations read."""
    inside = nodes_inside(flow, call)
    read = {part for node in inside for part in node.all_input_nodes if part in flow.position}
    return {part for part in read if part.op != "call_function" or not call.encloses(flow.call_of(part))}


def nodes_inside(flow: Dataflow, call: Call) -> list[fx.Node]:
    """Return the operations of the call and of the calls inside it, in order."""
    return [node for node in flow.nodes if node.op == "call_function" and call.encloses(flow.call_of(node))]


# ── Masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


LOGIC = frozenset("bitwise_and bitwise_or logical_and logical_or __and__ __or__".split())


def reads_padding(flow: Dataflow, call: Call, entry: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Return whether the call reads a value that shows padding, other than the stream, which enters at `entry`."""
    return any(shows_padding(flow, node, masks) for node in values_read(flow, call) - {entry})


def shows_padding(flow: Dataflow, node: fx.Node, masks: Collection[fx.Node]) -> bool:
    """Return whether one of the `masks` enters the value other than by counting, which makes positions.

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
    """Return whether a path from the mask to the value, through the nodes `between`, has no count on it."""
    reached = {mask}
    for step in between:  # in order
        if not is_count(step) and any(part in reached for part in step.all_input_nodes):
            reached.add(step)
    return node in reached


def is_mask_of_inputs(flow: Dataflow, node: fx.Node) -> bool:
    """Return whether the value is a mask that the model's own code computes from its inputs: boolean, without weights."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node not in flow.depends:
        return False
    if value.dtype != torch.bool and not any(op(step) in LOGIC for step in flow.carried_chain(node)):
        return False
    return not any(flow.reaches(weight, node) for weight in flow.program.parameters if weight in flow.position)


# ── Uses of the stream ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def has_gradient(flow: Dataflow, stream: fx.Node) -> bool:
    """Return whether an output depends on the stream through real numbers all the way, and not only by selection."""
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
    """Return whether only fixed tokens of the stream (batch, tokens, width) are read, before anything mixes tokens."""
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
    """Return whether the operation computes a value for each of `length` tokens from their number alone."""
    if node in flow.depends or length not in (shape(node) or ()):
        return False
    if op(node) in CUTS:
        return length not in (shape(node.args[0]) or ())  # the beginning of a longer table
    tables = [part for part in node.all_input_nodes if part in flow.program.buffers or part in flow.program.parameters]
    return op(node) in ("arange", "linspace") or (op(node) in ("index", "index_select", "embedding") and bool(tables))


def length_cut_tables(node: fx.Node, flow: Dataflow, length: int) -> list[tuple[Tensor, tuple[int, ...]]] | None:
    """Return the longer tables that a numbering is cut from, each with the dimensions that are cut to the number of tokens.

    None if it is no such cut, or if weights or inputs enter the tables. On the meta device they have no values.
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
    """Yield the cut `node` if anything but a further cut reads it, and the last of the further cuts."""
    further = [user for user in flow.uses[node] if op(user) in CUTS]
    if len(further) < len(flow.uses[node]):
        yield node
    for user in further:
        yield from last_cuts(user, flow)


def value_before_cut(node: fx.Node, flow: Dataflow, length: int) -> Tensor | None:
    """Return the node's value without the cuts to `length`; None if anything but buffers and constants enters it."""
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
    """Return, for each dimension, whether the cut made it shorter."""
    return [size != size_before for size, size_before in zip(shape(node) or (), shape(node.args[0]) or (), strict=True)]


def is_stride_invariant(table: Tensor, dims: tuple[int, ...], k: int) -> bool:
    """Return whether the table is the same for every k-th token as for as many in a row."""
    every = first = table
    for dim in dims:
        size = table.shape[dim]
        every = every.index_select(dim, torch.arange(0, size, k, device=table.device))
        first = first.narrow(dim, 0, -(-size // k))
    return bool(dims) and torch.equal(every, first)
