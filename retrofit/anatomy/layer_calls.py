"""The arguments of a layer besides its stream: the mask that shows padding, and the layout of the tokens.

A module inside a layer that mixes tokens needs both. The call is the innermost one that computes all the layer's branches: inside
wrappers that give the layer fewer tokens or a wider stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor, fx, nn

from retrofit.anatomy.attention_cores import Attention, find_attentions
from retrofit.anatomy.attention_parsing import is_batch_first
from retrofit.anatomy.attention_sites import MaskArgument, mask_key, true_hides
from retrofit.anatomy.branches import is_mixer, owner_of
from retrofit.anatomy.causality import is_causal
from retrofit.anatomy.parts import Findings, Layer
from retrofit.anatomy.stacks import token_tables
from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.inputs.example_inputs import forward_parameters
from retrofit.program.aten_ops import SCAN, is_float, op, shape
from retrofit.program.capture import capture, missing_masks
from retrofit.program.dataflow import Dataflow, backward_slice
from retrofit.program.program import Call, Key, Program


def reader_of(layers: Collection[Layer], ends: Collection[fx.Node], program: Program) -> tuple[str, Key] | None:
    """Return the first module outside these layers that is called with one of the nodes, and by which argument; None if none is."""
    inside = tuple(f"{layer.name}." for layer in layers)
    readers = ((call.path, key) for call in program.calls for key, node in call.inputs.items() if node in ends)
    return next(((path, key) for path, key in readers if not f"{path}.".startswith(inside)), None)


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """A call of the module at `path`, which runs one layer."""

    path: str
    stream_in: Key  # the argument that is the stream
    size: tuple[int, ...]  # of the stream in the captured program
    mask: MaskArgument | None  # None if no argument shows padding
    tokens_first: bool  # whether the stream is (length, batch, width)
    times: int  # calls of this module in one forward
    causal: bool  # whether its attentions, if any, hide later tokens
    takes_more: bool  # whether its forward accepts further arguments, such as a cache
    positions: Key = None  # the argument that numbers its tokens, (batch or 1, length); None if there is none


class LayerCalls:
    """The calls of a model's layers, captured with a mask if the model takes one, even if its example inputs have none."""

    def __init__(self, anatomy: Findings) -> None:
        self.anatomy, self.flow = anatomy, anatomy.flow
        model, examples = anatomy.model, anatomy.program.examples
        self.masked = self.flow
        if missing := missing_masks(model, examples):
            with contextlib.suppress(CaptureError):
                self.masked = Dataflow(capture(model, examples | missing))
        self.cores = find_attentions(self.masked)
        self.ids = backward_slice(lookup.all_input_nodes[-1] for _, lookup in token_tables(self.masked))
        self.calls = {(call.path, call.index): call for call in self.masked.program.calls}

    def of_layer(self, layer: Layer) -> LayerCall:
        """Return the call of a layer; raises `DoesNotFitError` if it is no module, or padding is hidden from it."""
        return self.of_module(self.innermost(layer), layer)

    def of_module(self, call: Call, layer: Layer) -> LayerCall:
        """Return a call of a module that runs the layer, and perhaps more; raises `DoesNotFitError` as `of_layer` does."""
        key, node = self.stream(call, layer)
        size = shape(node) or ()
        if len(size) != 3:
            raise unfit(layer, f"its stream is {size}, and not laid out (batch, length, width)")
        if not all(size):
            raise unfit(layer, "the number of tokens it gets depends on their content, so a cache cannot count them")
        masked = self.calls.get((call.path, call.index), call)
        stream = masked.inputs.get(key, node)
        inside = [core for core in self.cores if masked.encloses(self.masked.call_of(core.result))]
        own = [core for core in inside if self.masked.reaches(stream, core.key)]
        tokens_first = is_tokens_first(size, own)
        times = sum(other.path == call.path for other in self.flow.program.calls)
        causal = bool(own) and all(is_causal(core, stream, self.masked) for core in own)
        mask = self.mask(layer, masked, key, own, tokens_first)
        takes_more = has_room(self.anatomy.model.get_submodule(call.path), len(call.inputs))
        positions = self.positions(masked, size[tokens_first], size[not tokens_first])
        return LayerCall(call.path, key, size, mask, tokens_first, times, causal, takes_more, positions)

    def innermost(self, layer: Layer) -> Call:
        """Return the innermost module call that computes all branches of the layer, at least one of which mixes tokens."""
        if not layer.name:
            raise unfit(layer, "no module owns it: its residual additions are in the model's own code")
        outer = next(call for call in self.flow.program.calls if (call.path, call.index) == (layer.name, layer.call))
        if not any(map(is_mixer, layer.branches)):
            return outer
        results = [self.anatomy.node(branch.output) for branch in layer.branches]
        return next((call for call in owner_of(results, self.flow).chain if call.path and outer.encloses(call)), outer)

    def stream(self, call: Call, layer: Layer) -> tuple[Key, fx.Node]:
        """Return the argument of the call that is the stream.

        The first that the layer's branches carry on or are computed from.
        """
        base, flow = self.anatomy.node(layer.branches[0].source), self.flow
        given = [(key, node) for key, node in call.inputs.items() if key is not None and is_float(node)]
        above = set(flow.carried_chain(base))
        found = [pair for pair in given if pair[1] in above] or [pair for pair in given if flow.reaches(pair[1], base)]
        if not found:
            raise unfit(layer, f"{call.path} takes no argument that is its stream")
        return found[0]

    def mask(self, layer: Layer, call: Call, stream: Key, cores: list[Attention], tokens_first: bool) -> MaskArgument | None:
        """Return the argument that shows the layer which tokens are padding.

        Raises `DoesNotFitError` if the layer receives no such argument but the model does.
        """
        flow = self.masked
        masks = [mask for core in cores for mask in core.masks]
        key: Key = None
        if masks:
            keys = [mask_key(call, mask, (stream, None), tokens_first, flow) for mask in masks if mask in flow.depends]
            key = next((found for found in keys if found is not None), None)
            hidden = bool(keys)
            size = shape(call.inputs.get(stream)) or ()
            if key is not None and size and (shape(call.inputs[key]) or ())[-1] != size[not tokens_first]:
                raise unfit(layer, "its mask covers more than its own tokens")
        else:
            key = self.token_mask(call, tokens_first)
            hidden = any(mask in flow.depends for core in self.cores for mask in core.masks) and not cores
        if key is not None:
            return MaskArgument(key, true_hides(call.inputs[key], cores, flow))
        if hidden:
            raise unfit(layer, "the model takes a padding mask, but no argument of the layer carries it")
        return None

    def positions(self, call: Call, batch: int, length: int) -> Key:
        """Return an argument (batch or 1, length) of integers from an `arange`, not from the contents."""
        for key, node in call.inputs.items():
            if key is None or node in self.masked.depends or shape(node) not in ((1, length), (batch, length)):
                continue
            is_integer = isinstance(held := node.meta.get("val"), Tensor) and held.dtype in (torch.int64, torch.int32)
            if is_integer and any(op(above) == "arange" for above in backward_slice([node])):
                return key
        return None

    def token_mask(self, call: Call, tokens_first: bool) -> Key:
        """Return an argument with a number or boolean for each token, from the inputs, that is neither a position nor an id."""
        flow = self.masked
        for key, node in call.inputs.items():
            size, streams = shape(node) or (), [shape(stream) or () for stream in call.inputs.values()]
            rows = [stream[1::-1] if tokens_first else stream[:2] for stream in streams if len(stream) == 3]
            if key is None or len(size) != 2 or is_float(node) or node not in flow.depends or size not in rows:
                continue
            ancestors = [earlier for earlier in flow.nodes if flow.reaches(earlier, node)]
            if not any(op(part) in SCAN or part in flow.program.parameters or part in self.ids for part in ancestors):
                return key
        return None


def is_tokens_first(size: tuple[int, ...], cores: list[Attention]) -> bool:
    """Return whether a stream of this size is (length, batch, width).

    Judged by the keys that masks have columns for, else by the queries.
    """
    masks = [shape(mask) or () for core in cores for mask in core.masks]
    columns = {mask[-1] for mask in masks if len(mask) == 4} & {size[0], size[1]}
    if len(columns) == 1 and size[0] != size[1] and 1 not in columns:
        return columns == {size[0]}
    queries = [shape(core.query) or () for core in cores]
    return bool(queries) and not is_batch_first(size, queries[0]) and is_batch_first((size[1], size[0], size[2]), queries[0])


def has_room(module: nn.Module, given: int) -> bool:
    """Return whether a module's forward takes more arguments than so many."""
    parameters = forward_parameters(module).values()
    return len(parameters) > given or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def unfit(layer: Layer, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"the call of layer {layer.name or layer.exit} does not expose its stream and padding",
        why=why,
        site=layer.name,
        code="other-arguments",
    )
