"""What a layer must fulfil to see every k-th token only, and how its arguments follow the tokens.

Each requirement raises `DoesNotFitError` with the reason. A requirement on the layer alone takes a `Candidate`, a layer's call in
the larger of two captures. Which arguments are masks is inferred from the graph, by no argument's name: the model's own mask enters
them, and not by a running count, which makes positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx, nn

from retrofit.passes.sequence_altup.arguments import ArgumentPath, MaskArgument, Shapes, TokenDims, argument_path, infer_token_dims
from retrofit.passes.sequence_altup.captured_arguments import ArgumentCaptures, CapturedArguments
from retrofit.passes.sequence_altup.strided_layers import StridedLayer
from retrofit.passes.sequence_altup.token_flow import (
    CrossLayerValue,
    has_gradient,
    is_mask_of_inputs,
    is_read_at_fixed_tokens_only,
    is_stride_invariant,
    length_cut_tables,
    nodes_inside,
    numbers_tokens,
    reads_padding,
    reads_past_its_arguments,
    shows_padding,
)
from retrofit.sdk import DoesNotFitError, Layer, Stack
from retrofit.sdk.program import Call, shape


def unfit(why: str, remedy: str = "") -> DoesNotFitError:
    """Return the refusal of one layer."""
    return DoesNotFitError("the layer cannot be strided", why=why, remedy=remedy)


# ── As far as the anatomy says ───────────────────────────────────────────────────────────────────────────────────────────────────


def is_inside_strided(model: nn.Module, path: str) -> bool:
    """Return whether the module at the path is part of a strided layer."""
    steps = path.split(".")
    return any(isinstance(model.get_submodule(".".join(steps[:count])), StridedLayer) for count in range(1, len(steps)))


def require_unstrided(model: nn.Module, path: str) -> None:
    if is_inside_strided(model, path) or any(isinstance(part, StridedLayer) for part in model.get_submodule(path).modules()):
        raise unfit("it is strided already", "other options need a model that was not rewritten so; layers= names other depths")


def require_all_calls(stack: Stack, layer: Layer, depths: set[int]) -> None:
    """Where the module runs at several depths, all of them are to be strided, and nothing is stored for decoding."""
    own = [depth for depth, other in enumerate(stack.layers) if other.name == layer.name]
    if not depths.issuperset(own):
        raise unfit(
            "its module runs at other depths too, which are not to be strided", remedy="layers=all strides the module everywhere"
        )
    if stack.causal and len(own) > 1:
        raise unfit("its module runs at several depths, and what these store when decoding would be mixed up")


# ── As far as captures say ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layer that may be strided, and the captures that say what it receives."""

    stack: Stack
    layer: Layer
    module: nn.Module
    k: int
    captures: ArgumentCaptures

    @property
    def captured(self) -> CapturedArguments:
        """The larger capture, which graph nodes are of."""
        return self.captures.larger

    @property
    def call(self) -> Call:
        return self.captured.call_of(self.layer)

    @property
    def stream(self) -> ArgumentPath:
        """The argument by which the layer receives the stream."""
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
        """The graph's nodes of the arguments; what is inside a container has none."""
        return {argument_path(self.module, key): node for key, node in self.call.inputs.items() if key is not None}


def require_one_stream_argument(candidate: Candidate) -> None:
    """The stream enters by the same argument in both captures, and no argument's sizes depend on values."""
    first, second = candidate.captures.first.shapes(candidate.layer), candidate.captured.shapes(candidate.layer)
    if candidate.stream not in first or candidate.stream not in second:
        raise unfit("it does not receive the stream by the same argument every time")
    if any(isinstance(size, torch.SymInt) for size in (*first[candidate.stream], *second[candidate.stream])):
        raise unfit("how many tokens it receives depends on the values of tensors")
    for path, size in (*first.items(), *second.items()):
        if any(isinstance(length, torch.SymInt) for length in size):
            raise unfit(f"how long its argument {'.'.join(map(str, path))} is depends on the values of tensors")


def require_one_position_per_token(candidate: Candidate) -> None:
    """The stream has a dimension of tokens, with several of them, and one position for each."""
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
    """The stream leaves in the shape in which it entered."""
    stream_in, stream_out = candidate.layer.stream_places()
    entry, exit_ = candidate.call.inputs.get(stream_in), candidate.call.outputs.get(stream_out)
    if entry is None or exit_ is None or shape(entry) != shape(exit_):
        raise unfit("it returns a stream of another shape")


def require_readable_arguments(candidate: Candidate) -> None:
    """No object among the arguments holds tensors that the layer reads."""
    shapes = {tuple(size) for size in candidate.captured.shapes(candidate.layer).values()}
    for name, kind in candidate.captured.objects.get(candidate.layer.name, {}).items():
        if reads_past_its_arguments(candidate.captured.flow, candidate.call, shapes):
            raise unfit(f"it receives {name}, a {kind}, and what that holds of each token is unknown")


def require_known_cache_arguments(layer: Layer, new: dict[str, str]) -> None:
    """While decoding, the layer receives no tensors that it does not receive otherwise; `new` are such arguments by layer."""
    if layer.name in new:
        raise unfit(f"when decoding it receives {new[layer.name]}, and what that holds of each token is unknown")


def require_gradient(candidate: Candidate) -> None:
    if not has_gradient(candidate.captured.flow, candidate.exit):
        raise unfit("the outputs depend on it by choices only, so that nothing would be learnt")


def require_all_tokens_read(candidate: Candidate) -> None:
    """Tokens between anchors are read by something after the layer."""
    if candidate.layer.exit == candidate.stack.layers[-1].exit and is_read_at_fixed_tokens_only(
        candidate.captured.flow, candidate.exit
    ):
        raise unfit("in the end only some of its tokens are read, and nothing would read those between anchors")


def numberings_inside(candidate: Candidate) -> list[fx.Node]:
    """Return the operations by which the layer numbers the tokens itself and which enter its result."""
    flow, (_, length) = candidate.captured.flow, candidate.lengths
    inside = nodes_inside(flow, candidate.call)
    return [node for node in inside if numbers_tokens(node, flow, length) and flow.reaches(node, candidate.exit)]


def require_no_numbering(candidate: Candidate, replayed: bool) -> None:
    """The layer numbers no tokens itself, or only by stride-invariant tables.

    Where a recipe is `replayed` on a model without values it names the layers whose tables were found to be.
    """
    for node in numberings_inside(candidate):
        if not is_invariant_cut(candidate, node, replayed):
            why = "its own code numbers the tokens it receives, and the anchors would lose their positions"
            raise unfit(why, "a pass that put such code there goes after this one; layers= leaves depths out")


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
    """An argument shows the layer which tokens are padding, if any shows it to other layers of the stack."""
    if any(dims.shows_padding for dims in token_dims):
        return
    captured = candidate.captured
    for other in candidate.stack.layers:
        if other.name in ("", candidate.layer.name):
            continue
        call = captured.call_of(other)
        if other.stream_in in call.inputs and reads_padding(captured.flow, call, call.inputs[other.stream_in], captured.masks):
            raise unfit("it receives no mask, and would count padding among the tokens where other layers do not")


# ── As far as other layers say ───────────────────────────────────────────────────────────────────────────────────────────────────


def require_fitting_consumers(path: str, values: Iterable[CrossLayerValue], strided: Collection[str]) -> None:
    """Raise where anything but `strided` layers reads a value that the layer at `path` computes next to its stream."""
    for value in values:
        if value.producer.path != path:
            continue
        if value.consumer is None:
            raise unfit("what it computes next to the stream enters the outputs, which need it of every token")
        if value.consumer.path not in strided or not value.is_argument:
            raise unfit(f"what it computes next to the stream is read by {value.consumer.path}, which needs it of every token")


# ── How the arguments follow the tokens ───────────────────────────────────────────────────────────────────────────────────────────


Dims = dict[ArgumentPath, TokenDims]


def infer_arguments(candidate: Candidate) -> Dims:
    """Return the token dimensions of every argument but the stream; raises `DoesNotFitError` where they cannot be strided."""
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
    """Of a model whose inputs all follow the same tokens, no argument has one entry for several of them, or several for one.

    With another side's tokens, an encoder's, it is theirs that the entries may be of.
    """
    if has_other_tokens(candidate):
        return
    for path in paths:
        extents = zip(shapes[0][path], shapes[1][path], strict=False)
        if any(is_other_count(candidate, *pair) for pair in extents):
            raise unfit(f"it receives {path[0]}, which has no single entry for each token", "leave its depth out with layers=…")


def has_other_tokens(candidate: Candidate) -> bool:
    """Return whether some input of the model is of other tokens than the stream."""
    first, second = (
        {name: shape(node) for node, name in each.program.inputs.items()} for each in (candidate.captures.first, candidate.captured)
    )
    pairs = (zip(first.get(name) or (), after or (), strict=False) for name, after in second.items())
    return any(is_other_count(candidate, *pair) for extents in pairs for pair in extents)


def is_other_count(candidate: Candidate, before: int, after: int) -> bool:
    """Return whether an extent in the two captures follows the inputs, and neither the stream's tokens nor the batch."""
    batches = candidate.captures.first.batch, candidate.captured.batch
    return before != after and (before, after) != candidate.lengths and before * batches[1] != after * batches[0]


def is_mask(candidate: Candidate, path: ArgumentPath, dims: TokenDims, node: fx.Node | None) -> bool:
    """Return whether an argument, of which `node` is the value in the graph, shows which tokens are padding."""
    if node is None:
        return candidate.captures.is_mask_in_container(candidate.layer, path, dims)
    flow = candidate.captured.flow
    return shows_padding(flow, node, candidate.captured.masks) or (len(dims.positions) == 2 and is_mask_of_inputs(flow, node))


def without_query_masks(found: Dims) -> Dims:
    """Return the arguments; a mask by queries next to one by queries and keys shows no padding, as it says nothing of keys."""
    if not any(dims.shows_padding and len(dims.positions) == 2 for dims in found.values()):
        return found
    silent = {path for path, dims in found.items() if dims.rank == 4 and dims.positions == (2,)}
    return {path: dataclasses.replace(dims, shows_padding=False) if path in silent else dims for path, dims in found.items()}


def with_inverted_masks(candidate: Candidate, found: Dims, nodes: dict[ArgumentPath, fx.Node]) -> Dims:
    """Return the arguments, in which a mask by tokens that reads as all padding, where there is none, marks real tokens by zero."""
    changed = {}
    for path, dims in found.items():
        inverted = dataclasses.replace(dims, zero_is_real=True)
        by_tokens = dims.shows_padding and len(dims.positions) == 1 and dims.rank == 2
        if by_tokens and not candidate.captures.reads_as_unpadded(nodes.get(path), dims):
            changed[path] = inverted if candidate.captures.reads_as_unpadded(nodes.get(path), inverted) else dims
    return found | changed


def require_readable_masks(candidate: Candidate, found: Dims, nodes: dict[ArgumentPath, fx.Node]) -> None:
    """Every mask says in the usual way which tokens are real: by one or True, or by zero where it is added."""
    captures = candidate.captures
    unclear = [path for path, dims in found.items() if dims.shows_padding and not captures.reads_as_unpadded(nodes.get(path), dims)]
    if unclear:
        captures.values_decided |= any(captures.tables_of(nodes.get(path)) for path in unclear)
        raise unfit(f"what it receives as {unclear[0][0]} says which tokens are padding in a way of its own")


def mask_argument(candidate: Candidate, found: Dims) -> MaskArgument | None:
    """Return the argument that is a mask by queries and keys, and its type; None where the layer takes none."""
    for path, dims in found.items():
        if dims.shows_padding and dims.rank == 4 and len(dims.positions) == 2 and len(path) == 1:
            return path, candidate.captures.first.dtype(candidate.layer, path)
    return None


def returned_arguments(candidate: Candidate) -> dict[int | str, ArgumentPath]:
    """Return the arguments that the layer returns as they are, by their key in its output."""
    arguments: dict[Any, ArgumentPath] = {node: path for path, node in candidate.argument_nodes.items()}
    outputs = candidate.call.outputs.items()
    return {
        key: arguments[node] for key, node in outputs if key is not None and key != candidate.layer.stream_out and node in arguments
    }
