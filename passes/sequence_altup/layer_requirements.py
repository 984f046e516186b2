"""What a layer must fulfil to see every k-th token only; each requirement raises `DoesNotFitError` with the reason.

A requirement on the layer alone takes a `Candidate`, a call of a layer in the larger of two captures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import torch
from torch import fx, nn

from retrofit.passes.sequence_altup.argument_paths import ArgumentPath, argument_path
from retrofit.passes.sequence_altup.captured_arguments import ArgumentCaptures, CapturedArguments
from retrofit.passes.sequence_altup.cross_layer_values import CrossLayerValue, nodes_inside, reads_past_its_arguments
from retrofit.passes.sequence_altup.padding_flow import reads_padding
from retrofit.passes.sequence_altup.stream_uses import has_gradient, is_read_at_fixed_tokens_only
from retrofit.passes.sequence_altup.strided_layers import StridedLayer
from retrofit.passes.sequence_altup.token_dims import TokenDims
from retrofit.passes.sequence_altup.token_numbering import is_stride_invariant, length_cut_tables, numbers_tokens
from retrofit.sdk import Call, DoesNotFitError, Layer, Stack, shape


def unfit(why: str, remedy: str = "") -> DoesNotFitError:
    """The refusal of one layer."""
    return DoesNotFitError("the layer cannot be strided", why=why, remedy=remedy)


# ── As far as the anatomy says ───────────────────────────────────────────────────────────────────────────────────────────────────


def is_inside_strided(model: nn.Module, path: str) -> bool:
    """Whether the module at the path is part of a strided layer."""
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
        one, other = (captured.shapes(self.layer)[self.stream][dim] for captured in (self.captures.first, self.captured))
        return one, other

    @property
    def exit(self) -> fx.Node:
        """The stream that the layer returns."""
        return self.call.outputs[self.layer.stream_places()[1]]

    @property
    def argument_nodes(self) -> dict[ArgumentPath, fx.Node]:
        """The graph's nodes of the arguments; what is inside a container has none."""
        return {argument_path(self.module, key): node for key, node in self.call.inputs.items() if key is not None}


def require_one_stream_argument(one: Candidate) -> None:
    """The stream enters by the same argument in both captures, and no argument's sizes depend on values."""
    first, second = one.captures.first.shapes(one.layer), one.captured.shapes(one.layer)
    if one.stream not in first or one.stream not in second:
        raise unfit("it does not receive the stream by the same argument every time")
    if any(isinstance(size, torch.SymInt) for size in (*first[one.stream], *second[one.stream])):
        raise unfit("how many tokens it receives depends on the values of tensors")
    for path, size in (*first.items(), *second.items()):
        if any(isinstance(length, torch.SymInt) for length in size):
            raise unfit(f"how long its argument {'.'.join(map(str, path))} is depends on the values of tensors")


def require_one_position_per_token(one: Candidate) -> None:
    """The stream has a dimension of tokens, with several of them, and one position for each."""
    if one.captures.is_tokens_first(one.layer, one.stream) is None:
        size = tuple(one.captures.first.shapes(one.layer)[one.stream])
        raise unfit(f"its stream {size} is not laid out as (batch, tokens, width)")
    before, length = one.lengths
    if one.k > 1 and length == 1:
        raise unfit("with the example inputs it receives one token only", remedy="pass larger example_inputs=")
    ids_before, ids = one.captures.first.length, one.captured.length
    if ids and ids - ids_before < length - before:
        raise unfit("its stream has several positions a token, and which of them are anchors is not defined")


def require_stream_returned(one: Candidate) -> None:
    """The stream leaves in the shape in which it entered."""
    stream_in, stream_out = one.layer.stream_places()
    entry, exit_ = one.call.inputs.get(stream_in), one.call.outputs.get(stream_out)
    if entry is None or exit_ is None or shape(entry) != shape(exit_):
        raise unfit("it returns a stream of another shape")


def require_readable_arguments(one: Candidate) -> None:
    """No object among the arguments holds tensors that the layer reads."""
    shapes = {tuple(size) for size in one.captured.shapes(one.layer).values()}
    for name, kind in one.captured.objects.get(one.layer.name, {}).items():
        if reads_past_its_arguments(one.captured.flow, one.call, shapes):
            raise unfit(f"it receives {name}, a {kind}, and what that holds of each token is unknown")


def require_known_cache_arguments(layer: Layer, new: dict[str, str]) -> None:
    """While decoding, the layer receives no tensors that it does not receive otherwise; `new` are such arguments by layer."""
    if layer.name in new:
        raise unfit(f"when decoding it receives {new[layer.name]}, and what that holds of each token is unknown")


def require_gradient(one: Candidate) -> None:
    if not has_gradient(one.captured.flow, one.exit):
        raise unfit("the outputs depend on it by choices only, so that nothing would be learnt")


def require_all_tokens_read(one: Candidate) -> None:
    """Tokens between anchors are read by something after the layer."""
    if one.layer.exit == one.stack.layers[-1].exit and is_read_at_fixed_tokens_only(one.captured.flow, one.exit):
        raise unfit("in the end only some of its tokens are read, and nothing would read those between anchors")


def numberings_inside(one: Candidate) -> list[fx.Node]:
    """The operations by which the layer numbers the tokens itself and which enter its result."""
    flow, (_, length) = one.captured.flow, one.lengths
    inside = nodes_inside(flow, one.call)
    return [node for node in inside if numbers_tokens(node, flow, length) and flow.reaches(node, one.exit)]


def require_no_numbering(one: Candidate, replayed: bool) -> None:
    """The layer numbers no tokens itself, or only by stride-invariant tables.

    Where a recipe is `replayed` on a model without values it names the layers whose tables were found to be.
    """
    for node in numberings_inside(one):
        if not is_invariant_cut(one, node, replayed):
            why = "its own code numbers the tokens it receives, and the anchors would lose their positions"
            raise unfit(why, "a pass that put such code there goes after this one; layers= leaves depths out")


def is_invariant_cut(one: Candidate, node: fx.Node, replayed: bool) -> bool:
    """Whether a numbering is cut from tables that are stride-invariant."""
    tables = length_cut_tables(node, one.captured.flow, one.lengths[1])
    if tables is None:
        return False
    one.captures.values_decided = True
    if any(table.is_meta for table, _ in tables):
        return replayed
    return all(is_stride_invariant(table, dims, one.k) for table, dims in tables)


def require_padding_shown(one: Candidate, token_dims: Iterable[TokenDims]) -> None:
    """An argument shows the layer which tokens are padding, if any shows it to other layers of the stack."""
    if any(dims.shows_padding for dims in token_dims):
        return
    captured = one.captured
    for other in one.stack.layers:
        if other.name in ("", one.layer.name):
            continue
        call = captured.call_of(other)
        if other.stream_in in call.inputs and reads_padding(captured.flow, call, call.inputs[other.stream_in], captured.masks):
            raise unfit("it receives no mask, and would count padding among the tokens where other layers do not")


# ── As far as other layers say ───────────────────────────────────────────────────────────────────────────────────────────────────


def require_fitting_consumers(path: str, values: Iterable[CrossLayerValue], strided: Collection[str]) -> None:
    """What the layer at `path` computes next to its stream is read by layers that are `strided` too, and by nothing else."""
    for value in values:
        if value.producer.path != path:
            continue
        if value.consumer is None:
            raise unfit("what it computes next to the stream enters the outputs, which need it of every token")
        if value.consumer.path not in strided or not value.is_argument:
            raise unfit(f"what it computes next to the stream is read by {value.consumer.path}, which needs it of every token")
