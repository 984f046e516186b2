"""The arguments that a model's layers receive: of a larger, longer batch, recorded in a capture, and of its example inputs.

Nothing says which sizes of the inputs are the batch and which the length. Certain is that integers of two dimensions are one a
token, and that sizes equal to theirs grow with them. The rest is guessed, and tested by running the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from retrofit.passes.sequence_altup.arguments import (
    ArgumentPath,
    TokenDims,
    argument_path,
    named_arguments,
    positional_names,
    tensors_in,
    token_dims_at_call,
    unpadded_tokens,
)
from retrofit.sdk import CaptureError, DoesNotFitError, Layer
from retrofit.sdk.anatomy import mask_value
from retrofit.sdk.data import accepts, forward_parameters, is_numbering, is_per_token, preserve_state, watched
from retrofit.sdk.program import Call, Dataflow, Program, as_if_traced, capture

Result = TypeVar("Result")
MORE = 8  # tokens


# ── Larger inputs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def length_of(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens of the longest input with one integer for each; 0 if there is none."""
    return max((int(value.shape[1]) for value in inputs.values() if is_per_token(value)), default=0)


def larger_inputs(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield guesses at the inputs for twice the batch and more tokens, the likeliest first."""
    length = length_of(inputs)
    yield resize_inputs(
        inputs, lambda value: {1: value.shape[1] + MORE} if is_per_token(value) or is_as_long(value, length) else {}
    )
    if not length:
        return
    yield resize_inputs(inputs, lambda value: {1: value.shape[1] + MORE} if is_as_long(value, length) else {})
    rest = [tensor for tensor in pytree.tree_leaves(dict(inputs)) if isinstance(tensor, Tensor) and not is_as_long(tensor, length)]
    for dim in range(1, max((tensor.dim() for tensor in rest), default=0)):  # everything twice as long
        yield resize_inputs(inputs, functools.partial(doubled_extents, length=length, dim=dim))


def doubled_extents(value: Tensor, length: int, dim: int) -> dict[int, int]:
    """Return twice the tokens; for a tensor of another length, twice the size along `dim`."""
    along = 1 if is_as_long(value, length) else dim
    return {along: 2 * value.shape[along]} if along < value.dim() else {}


def is_as_long(value: Tensor, length: int) -> bool:
    return value.dim() > 1 and length > 0 and value.shape[1] == length


def resize_inputs(inputs: Mapping[str, Any], extents: Callable[[Tensor], Mapping[int, int]]) -> dict[str, Any]:
    """Return the inputs with each row twice and sizes `extents` by dimension; position ids are continued, other values repeated."""
    leaves = [tensor for tensor in pytree.tree_leaves(dict(inputs)) if isinstance(tensor, Tensor) and tensor.dim()]
    rows = next((int(tensor.shape[0]) for tensor in leaves), 1)

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        numbers = is_per_token(value) and not value.is_meta and is_numbering(value)
        for dim, extent in extents(value).items():
            if dim < value.dim():
                value = value.index_select(dim, torch.arange(extent, device=value.device) % value.shape[dim])
        if numbers:
            value = torch.arange(value.shape[1], dtype=value.dtype, device=value.device).expand(value.shape)
        return torch.cat([value, value]) if value.shape[0] % rows == 0 else value

    return pytree.tree_map(change, dict(inputs))  # type: ignore[no-any-return]


TensorType = tuple[torch.Size, torch.dtype]
MARKER = torch.int32  # dtype of masks, to distinguish them from other integers, which have 64 bits


# ── Runs and captures ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class ReceivedArguments:
    """The arguments of the layers on some inputs."""

    inputs: dict[str, Any]
    batch: int
    length: int  # of the token ids; 0 without any
    mask_inputs: frozenset[str]  # the inputs that show which tokens are real
    tensors: dict[tuple[str, int], dict[ArgumentPath, TensorType]]  # by layer and call
    objects: dict[str, dict[int | str, str]]  # by layer: arguments that are neither tensors nor plain, and their types

    def shapes(self, layer: Layer) -> dict[ArgumentPath, torch.Size]:
        return {path: shape for path, (shape, _) in self.tensors.get((layer.name, layer.call), {}).items()}

    def dtype(self, layer: Layer, path: ArgumentPath) -> torch.dtype:
        return self.tensors[layer.name, layer.call][path][1]

    @property
    def input_shapes(self) -> dict[Any, torch.Size]:
        """The shapes of the tensors among the inputs, by where they are."""
        leaves, _ = pytree.tree_flatten_with_path(self.inputs)
        return {path: value.shape for path, value in leaves if isinstance(value, Tensor)}

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Everything the layers receive, except its extents."""
        kinds = {
            call: {path: (len(shape), dtype) for path, (shape, dtype) in received.items()}
            for call, received in self.tensors.items()
        }
        return kinds, self.objects


@dataclasses.dataclass(frozen=True)
class CapturedArguments(ReceivedArguments):
    """The arguments of the layers in one capture, which has a graph."""

    program: Program
    flow: Dataflow

    def call_of(self, layer: Layer) -> Call:
        return next(call for call in self.program.calls if (call.path, call.index) == (layer.name, layer.call))

    @property
    def masks(self) -> list[fx.Node]:
        """The inputs of the graph that show which tokens are real."""
        return [node for node, name in self.program.inputs.items() if name in self.mask_inputs]


class ArgumentCaptures:
    """Runs and captures of `model` on inputs like `examples`, with the arguments of the modules at `paths`."""

    def __init__(self, model: nn.Module, examples: Mapping[str, Any], paths: list[str]) -> None:
        self.model, self.examples, self.paths = model, dict(examples), paths
        self.mask_answers: dict[tuple[fx.Node, TokenDims], bool] = {}
        self.values_decided = False  # whether values, which a loading model lacks, decided about any layer

    @functools.cached_property
    def first(self) -> ReceivedArguments:
        """The arguments on the example inputs: of a run if its layers receive those of the larger capture, else of a capture."""
        masked = self.with_masks(self.examples)
        for inputs in (self.with_positions(masked), masked, self.examples):
            if inputs.keys() == self.larger.inputs.keys():
                with contextlib.suppress(Exception):  # whatever the model's own code raises without a tracer, or without values
                    received, _ = self.observe(inputs, self.larger.mask_inputs, run_as_traced)
                    if received.kinds == self.larger.kinds:
                        return received
        return self.capture_with_masks(self.examples)

    @functools.cached_property
    def larger(self) -> CapturedArguments:
        """The capture of another batch and length; raises `DoesNotFitError` if the model runs on no other."""
        why = ""
        for inputs in larger_inputs(self.examples):
            try:
                return self.capture_with_masks(inputs)
            except CaptureError as error:
                why = error.why or error.what
        raise DoesNotFitError(
            "the model does not run on a larger batch of longer inputs",
            why=f"the relation of arguments to tokens is inferred from such a run, which fails with {why}",
            remedy="pass example_inputs= in which every dimension that varies with the tokens equals their number",
            code="fixed-size",
        )

    @functools.cached_property
    def marked(self) -> CapturedArguments | None:
        """The capture of the example inputs with masks of a unique dtype; None if the model accepts none of that dtype."""
        inputs = self.with_masks(self.examples)
        marked = {name: value.to(MARKER) if is_mask_name(name) else value for name, value in inputs.items()}
        with contextlib.suppress(CaptureError):
            return self.capture_arguments(marked, frozenset())
        return None

    # What the captures say about a layer.

    def is_tokens_first(self, layer: Layer, stream: ArgumentPath) -> bool | None:
        """Return whether the layer's stream is (tokens, batch, width) instead of (batch, tokens, width); None if it is neither."""
        first, second = self.first.shapes(layer)[stream], self.larger.shapes(layer)[stream]
        if len(first) != 3:
            return None
        rows = [dim for dim in (0, 1) if first[dim] * self.larger.batch == second[dim] * self.first.batch]
        if len(rows) == 2:  # tokens and batch grew by the same factor
            rows = [dim for dim in rows if first[dim] == self.first.batch] or rows
        return bool(rows[0]) if rows else None

    def is_mask_in_container(self, layer: Layer, path: ArgumentPath, dims: TokenDims) -> bool:
        """Return whether a tensor inside a container, which is no argument in the graph, shows which tokens are real."""
        if len(dims.positions) == 2:
            return dims.rank == 4
        if dims.rank != 2 or self.marked is None:
            return False
        received = self.marked.tensors.get((layer.name, layer.call), {}).get(path)
        return received is not None and received[1] in (torch.bool, MARKER)

    def reads_as_unpadded(self, node: fx.Node | None, dims: TokenDims) -> bool:
        """Return whether a mask of the larger capture, which has no padding, reads as unpadded; some models have other masks.

        True is assumed for a mask computed from tables without values, as those of a loading model.
        """
        if node is None or any(table is None or table.is_meta for table in self.tables_of(node)):
            return True
        if (node, dims) not in self.mask_answers:
            value = mask_value(node, self.larger.flow)
            if value is None or value.dim() != dims.rank:
                self.mask_answers[node, dims] = True
            else:
                length = value.shape[dims.positions[-1]]
                self.mask_answers[node, dims] = bool(unpadded_tokens(value, dims, value.shape[dims.batch or 0], 0, length).any())
        return self.mask_answers[node, dims]

    def tables_of(self, node: fx.Node | None) -> list[Tensor | None]:
        """Return the buffers and constants that a value of the larger capture is computed from."""
        if node is None:
            return []
        program, flow = self.larger.program, self.larger.flow
        named = {**program.buffers, **program.constants}
        return [
            program.values.get(name)
            for node_of_table, name in named.items()
            if node_of_table in flow.position and flow.reaches(node_of_table, node)
        ]

    # Capturing.

    def capture_with_masks(self, inputs: dict[str, Any]) -> CapturedArguments:
        """Return a capture with masks and positions if the model takes any."""
        masked = self.with_masks(inputs)
        mask_inputs = frozenset(filter(is_mask_name, masked))
        for attempt in (self.with_positions(masked), masked):
            with contextlib.suppress(CaptureError):
                return self.capture_arguments(attempt, mask_inputs)
        return self.capture_arguments(inputs, frozenset())

    def with_masks(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs, with masks for the token ids if the model takes any and none is given."""
        known, extended = forward_parameters(self.model), dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and is_per_token(value) and name.endswith("input_ids"):
                mask = name.replace("input_ids", "attention_mask")
                if mask in known:
                    extended.setdefault(mask, torch.ones(value.shape, dtype=torch.long, device=value.device))
        return extended

    def with_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs, with positions if the model takes any and none are given."""
        ids = inputs.get("input_ids")
        if ids is None or ids.dim() != 2 or not accepts(self.model, "position_ids"):
            return inputs
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape), **inputs}

    def capture_arguments(self, inputs: dict[str, Any], mask_inputs: frozenset[str]) -> CapturedArguments:
        received, program = self.observe(inputs, mask_inputs, capture)
        return CapturedArguments(**vars(received), program=program, flow=Dataflow(program))

    def observe(
        self, inputs: dict[str, Any], mask_inputs: frozenset[str], run: Callable[[nn.Module, dict[str, Any]], Result]
    ) -> tuple[ReceivedArguments, Result]:
        """Return what the layers receive while `run` runs the model on the inputs, and what that returns."""
        tensors: dict[tuple[str, int], dict[ArgumentPath, TensorType]] = {}
        objects: dict[str, dict[int | str, str]] = {}
        counts: dict[str, int] = {}

        def record(path: str, arguments: list[tuple[int | str, Any]]) -> None:
            call = counts.get(path, 0)
            counts[path] = call + 1
            found: dict[ArgumentPath, TensorType] = {}
            for name, value in arguments:
                try:
                    found.update((where, (tensor.shape, tensor.dtype)) for where, tensor in tensors_in(value, (name,)))
                except DoesNotFitError:
                    objects.setdefault(path, {})[name] = type(value).__name__
            tensors[path, call] = found

        def begin(*call: Any) -> None:
            """Forget earlier runs: a capture may run the model several times, and the last run counts."""
            for table in (tensors, objects, counts):
                table.clear()

        with watched({"": self.model}, before=begin), recording(self.model, self.paths, record):
            result = run(self.model, inputs)
        batches = [int(value.shape[0]) for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
        if not batches:
            raise DoesNotFitError(
                f"{type(self.model).__name__} does not take its tokens as tensor arguments",
                by="sequence-altup",
                why=f"the arguments' relation to the tokens is inferred from longer inputs; {', '.join(inputs)} is not a tensor",
                remedy="wrap the model in a module that takes tensors",
                code="no-tensors",
            )
        return ReceivedArguments(dict(inputs), batches[0], length_of(inputs), mask_inputs, tensors, objects), result


def run_as_traced(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run the model as a capture does."""
    with preserve_state(model), as_if_traced(model):
        model(**inputs)


def is_mask_name(name: str) -> bool:
    return name.endswith("attention_mask")


@contextlib.contextmanager
def recording(
    model: nn.Module, paths: Collection[str], record: Callable[[str, list[tuple[int | str, Any]]], None]
) -> Iterator[None]:
    """Call `record`, within this context, with the path and named arguments of every call of a module at one of the `paths`."""
    modules = {path: model.get_submodule(path) for path in paths}
    names = {path: positional_names(module) for path, module in modules.items()}

    def see(path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        record(path, list(named_arguments(args, kwargs, names[path])))

    with watched(modules, before=see):
        yield


def new_arguments_with_cache(
    model: nn.Module, inputs: Mapping[str, Any], known: Mapping[str, Collection[ArgumentPath]]
) -> dict[str, str]:
    """Return, by layer, an argument with tensors outside of `known` that it receives only when the model fills a cache."""
    found: dict[str, str] = {}

    def record(path: str, arguments: list[tuple[int | str, Any]]) -> None:
        for name, value in arguments:
            with contextlib.suppress(DoesNotFitError):  # objects that the layer also receives without a cache, and does not read
                tensors = list(tensors_in(value, (name,)))
                if any(where not in known[path] and token_dims_at_call(tensor, None) is None for where, tensor in tensors):
                    found.setdefault(path, str(name))

    with recording(model, known, record), preserve_state(model), torch.no_grad():
        model(**{**inputs, "use_cache": True})
    return found


# ── Modules that make masks ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class MaskSource:
    """The module that makes the masks of `layers`, and those of its arguments that they do not depend on."""

    path: str
    arguments: tuple[int | str, ...]
    layers: tuple[str, ...]


def mask_sources(
    model: nn.Module, flow: Dataflow, layers: Mapping[str, Mapping[ArgumentPath, TokenDims]]
) -> tuple[MaskSource, ...]:
    """Return the innermost module around each layer of which no argument enters the layer's masks.

    A layer has none where the inputs of the capture show padding: they contain masks, or ids that do.
    """
    found: dict[str, tuple[set[int | str], list[str]]] = {}
    for path, dims in layers.items():
        layer, masks = model.get_submodule(path), {argument for argument, known in dims.items() if known.shows_padding}
        sources = [source_of(flow, call, layer, masks) for call in flow.program.calls if call.path == path]
        made = [source for source in sources if source is not None]
        if len(made) < len(sources) or len({source.path for source in made}) != 1:
            continue
        module = model.get_submodule(made[0].path)
        given = [{argument_path(module, key)[0] for key in source.inputs if key is not None} for source in made]
        arguments, inside = found.setdefault(made[0].path, (given[0], []))
        arguments.intersection_update(*given)
        inside.append(path)
    return tuple(MaskSource(path, tuple(sorted(arguments, key=str)), tuple(inside)) for path, (arguments, inside) in found.items())


def source_of(flow: Dataflow, call: Call, layer: nn.Module, masks: Collection[ArgumentPath]) -> Call | None:
    """Return the innermost call around a layer's of which no argument enters the layer's `masks`; None if there is none."""
    nodes = [node for key, node in call.inputs.items() if key is not None and argument_path(layer, key) in masks]
    if any(len(path) > 1 for path in masks) or any(node in flow.depends for node in nodes):
        return None
    around = itertools.islice(call.chain, 1, None)
    entered = [(outer, itertools.product(outer.inputs.values(), nodes)) for outer in around]
    return next((outer for outer, pairs in entered if not any(itertools.starmap(flow.reaches, pairs))), None)
