"""`export_onnx`: export a model as ONNX files for ONNX Runtime, with dynamic batch and length, and its cache as inputs and outputs.

The plan determines the files for a model, and whether their states reproduce the outputs for whole sequences. Each part is traced,
optimized and compared with torch on inputs of other shapes than the traced ones before any file gets its name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from retrofit.errors import CaptureError, DoesNotFitError, RetrofitError, first_line
from retrofit.files.atomic_writes import require_place, whole_files
from retrofit.files.model_folders import as_path
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import accepts, can_generate, has_two_sides, ids_name, logits_of
from retrofit.inputs.usable_models import require_module, require_values, transformer_inside
from retrofit.numerics.agreement import Arithmetic, Comparison
from retrofit.onnx.exporter.cache_states import states_of
from retrofit.onnx.exporter.export_parts import (
    LENGTH,
    PAST_KEY_VALUES,
    PRESENT,
    Decoder,
    Encoder,
    ExportPart,
    FirstStep,
    NextStep,
    WholeModel,
    missing_packages,
)
from retrofit.onnx.exporter.optimization import (
    RewriteStep,
    branch_file,
    count_nodes,
    fuse_operators,
    not_fused,
    optimize,
    remove_unused_inputs,
    separate_padding_from_pooling,
    take_weights,
    weight_bytes,
)
from retrofit.onnx.exporter.parity import (
    Parity,
    QuantizedParity,
    compare_quantized,
    compare_with_torch,
    matching,
    other_sizes,
    parameters_by_value,
    torch_rounding,
    why_incomparable,
)
from retrofit.onnx.exporter.tracing import trace_part
from retrofit.onnx.exporter.weight_quantization import quantize_weights
from retrofit.process import serialized
from retrofit.provenance import provenance_of
from retrofit.surgery.dequantization import refuse_packed

if TYPE_CHECKING:
    import onnx_ir


CacheMode: TypeAlias = Literal["auto", "past", "none"]


# ── The plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """The parts that a model is exported as, and why they have no cache although they could."""

    parts: tuple[ExportPart, ...]
    why_no_cache: str = ""

    @property
    def cached(self) -> bool:
        return any(name.startswith(PRESENT) for part in self.parts for name in part.outputs)


@torch.no_grad()
def plan_export(model: nn.Module, inputs: Mapping[str, Any], cache: CacheMode) -> ExportPlan:
    """Return the parts of the model, with its cache as tensors if it has one; for `auto` otherwise without, with the reason.

    Raises `CaptureError` for `past` if there is no such cache.
    """
    is_encoder_decoder = (
        has_two_sides(inputs) and accepts(model, "encoder_outputs") and callable(getattr(model, "get_encoder", None))
    )
    has_ids = ids_name(inputs) is not None
    if cache == "past" and not has_ids:
        raise no_cache(model, "it has no input of token ids")
    parts: tuple[ExportPart, ...]
    why = ""
    if cache != "none" and has_ids and (is_encoder_decoder or can_generate(model, inputs) or cache == "past"):
        try:
            parts = encoder_decoder_parts(model, inputs, returns_states=True) if is_encoder_decoder else (Decoder(model, inputs),)
            require_exact_states(parts, Arithmetic(model, {**inputs, "use_cache": False}))
            return ExportPlan(parts)
        except Exception as error:  # of any type, from the model's own code
            why = str(error) if isinstance(error, RetrofitError) else first_line(error)
            if cache == "past":
                raise no_cache(model, why) from error
    parts = encoder_decoder_parts(model, inputs, returns_states=False) if is_encoder_decoder else (WholeModel(model, inputs),)
    return ExportPlan(parts, why)


def no_cache(model: nn.Module, why: str) -> CaptureError:
    return CaptureError(
        f"{type(model).__name__} cannot be exported with its cache",
        why=why,
        remedy="export it with cache=none",
        option="cache",
        code="no-cache",
    )


def encoder_decoder_parts(model: nn.Module, inputs: Mapping[str, Any], returns_states: bool) -> tuple[ExportPart, ...]:
    encoder = Encoder(model, inputs)
    first = FirstStep(model, encoder, returns_states)
    return (encoder, first, NextStep(model, encoder)) if returns_states else (encoder, first)


def require_exact_states(parts: tuple[ExportPart, ...], arithmetic: Arithmetic) -> None:
    """Raises `CaptureError` unless each part with states as inputs reproduces the outputs for the whole sequence."""
    for part in parts:
        if isinstance(part, Decoder):
            comparison = compare_decoder(part, arithmetic)
        elif isinstance(part, NextStep):
            comparison = compare_next_step(part, arithmetic)
        else:
            continue
        if not comparison.agrees:
            raise CaptureError(
                "the model's cache holds more than tensors",
                why=f"rebuilt from them, it is {comparison.measured} from the full forward",
                code="cache-state",
            )


def compare_decoder(part: Decoder, arithmetic: Arithmetic) -> Comparison:
    """Compare steps on the states with one forward of all tokens; if they disagree, again with a mask of only the step's tokens.

    Some models' own steps differ from their forward by more than rounding (those that store the decays of a sum in float32); their
    steps are then the reference.
    """
    tokens = part.tokens(2, 12, 1)

    def ways() -> tuple[Tensor, Tensor]:
        return logits_in_steps(part, tokens), logits_of(part.model(**{part.ids: tokens, "use_cache": False}))

    def own_ways() -> tuple[Tensor, Tensor]:
        return logits_in_steps(part, tokens), part.logits_on_own_cache(tokens, ends_of_steps(part))

    comparison = arithmetic.compare(ways)
    if not comparison.agrees and "attention_mask" in part.extras:
        part.masks_new_tokens_only = True
        other = arithmetic.compare(ways)
        part.masks_new_tokens_only = other.agrees
        comparison = other if other.agrees else comparison
    if not comparison.agrees and comparison.gap <= arithmetic.explained:
        return arithmetic.compare(own_ways, in_doubt=True)
    return comparison


def ends_of_steps(part: Decoder) -> Sequence[int]:
    return (7, 12) if LENGTH in part.sizes else range(1, 13)


def logits_in_steps(part: Decoder, tokens: Tensor) -> Tensor:
    """Return the logits of the 12 tokens, computed step by step on the states."""
    states, logits_so_far = part.past(tokens[:, :0]), []
    for start, end in itertools.pairwise((0, *ends_of_steps(part))):
        logits, *after = part({**part.step(tokens[:, :end], start), **states})
        states = {PAST_KEY_VALUES + name: value for name, value in zip(part.states, after, strict=True)}
        logits_so_far.append(logits)
    return torch.cat(logits_so_far, 1)


def compare_next_step(part: NextStep, arithmetic: Arithmetic) -> Comparison:
    """Return the comparison of a step on the states after two tokens with one forward of all tokens."""

    def ways() -> tuple[Tensor, Tensor]:
        start = part.start(part.sizes, 1)
        expected = logits_of(part.output(start))[:, 2:]
        first_tokens = {**start, "input_ids": start["input_ids"][:, :2]}
        states = states_of(part.first_output(first_tokens).past_key_values)
        past = {PAST_KEY_VALUES + name: value for name, value in states.items()}
        return part({**start, "input_ids": start["input_ids"][:, 2:], **past})[0], expected

    return arithmetic.compare(ways)


# ── The export ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


SUFFIX = ".onnx"
NOT_IN_GROUPS = "sizes are dynamic in a file: a model that takes rows in groups, or some lengths only, cannot be exported"
CAPTURE_AGAIN = (
    "sizes are dynamic in a file: capture the graph again with dynamic sizes (dynamic_shapes= of torch.export.export,"
    " dynamic_axes= of torch.onnx.export)"
)
Weights: TypeAlias = Literal["int8", "int4"]
BITS = {"int8": 8, "int4": 4}
MOST_INLINE_BYTES = 2**30  # bytes of weights in one file: protobuf's limit is 2 GiB, and it holds several copies while it writes


@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """The packed weights of a file: the number of matrices, the file's bytes after and before, and the effect on its outputs."""

    matrices: int
    bytes: int
    bytes_before: int
    parity: QuantizedParity | None

    def __str__(self) -> str:
        size = f"{self.matrices} matrices, {self.bytes_before / 2**20:.1f} MiB in {self.bytes / 2**20:.1f}"
        return size if self.parity is None else f"{size}; {self.parity.measured}"


@dataclasses.dataclass(frozen=True)
class ExportedFile:
    """One ONNX file: its nodes, its optimization steps, and its distance from torch (None if it was not run)."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: int
    steps: tuple[RewriteStep, ...]
    parity: Parity | None
    weights: PackedWeights | None = None

    @property
    def gap(self) -> float | None:
        """Return the largest distance between the file's outputs and torch's, relative to the largest output."""
        return None if self.parity is None else self.parity.gap

    @property
    def note(self) -> str:
        """Return the note on choices between near-ties that differ: how many, and the margin."""
        return "" if self.parity is None else self.parity.note

    @property
    def measured(self) -> str:
        """Return the file's distance from torch in words."""
        return "not run" if self.parity is None else self.parity.measured


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """The files written by `export_onnx`, whether they include the model's cache, and why not if the model generates."""

    files: tuple[ExportedFile, ...]
    cached: bool
    why_no_cache: str = ""

    def __str__(self) -> str:
        lines = []
        for file in self.files:
            kept = [step.name for step in file.steps if step.kept]
            lines.append(f"{file.path}  {file.nodes} nodes, {file.measured}" + (f", fused: {', '.join(kept)}" if kept else ""))
            lines.extend([f"  packed: {file.weights}"] if file.weights else [])
        return "\n".join(lines + ([f"without its cache: {self.why_no_cache}"] if self.why_no_cache else []))


@serialized
def export_onnx(
    model: nn.Module,
    path: str | Path,
    cache: CacheMode = "auto",
    *,
    example_inputs: Any = None,
    fuse: bool = True,
    weights: Weights | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> ExportResult:
    """Write `model` to the file `path` (`.onnx`), and to others next to it if it needs several, completely or not at all.

    An encoder-decoder becomes `encoder_{name}`, `decoder_{name}` and, with its cache, `decoder_with_past_{name}`. `cache` is `past`
    (a decoder takes and returns its keys and values), `none`, or `auto`: with a cache if the model has one. `fuse` inserts ONNX
    Runtime's own operators, and branches around computations that a step may not need, where the results stay the same. `weights`
    packs the matrices in `int8` or `int4` (`weight_quantization.py`). Weights of more than 1 GiB are written to `{file}_data`.

    Raises `CaptureError` if the model cannot be traced, or ONNX Runtime computes something else; `CheckpointError` if a file exists
    (unless `force`) or cannot be written; `RetrofitError` if packages are missing or ONNX Runtime cannot run the result.
    """
    if missing := missing_packages("onnxscript"):
        raise RetrofitError(
            f"{missing[0]} is not installed",
            why="it translates graphs",
            remedy="pip install 'retrofit-transformers[onnx]'",
            code="not-installed",
        )
    if cache not in ("auto", "past", "none"):
        raise RetrofitError(f"unknown option cache={cache!r}", remedy="choose auto, past or none", option="cache", code="choice")
    if weights not in (None, *BITS):
        raise RetrofitError(
            f"unknown option weights={weights!r}",
            remedy=f"choose {' or '.join(BITS)}, or None to keep them as they are",
            option="weights",
            code="choice",
        )
    path = as_path(path)
    if path.suffix != SUFFIX:
        raise RetrofitError(f"{path} is not the name of an ONNX file", remedy=f"name it {path.name}{SUFFIX}", code="name")
    require_place(path)
    require_module(model)
    require_values(model, "exported", "load its weights first")
    refuse_packed(model, "exported")
    model = transformer_inside(getattr(model, "_orig_mod", model), example_inputs)  # the former is torch.compile's wrapper
    with preserve_state(model):
        progress("looking for the cache")
        plan = plan_export(model, named_inputs(model, example_inputs), cache)
        names = [file_name(part, path) for part in plan.parts]
        with whole_files(path.parent, names, force=force) as draft:
            files = [
                export_part(part, draft / name, model, fuse, progress, weights)
                for part, name in zip(plan.parts, names, strict=True)
            ]
    placed = tuple(dataclasses.replace(file, path=path.parent / file.path.name) for file in files)
    return ExportResult(placed, plan.cached, plan.why_no_cache)


def file_name(part: ExportPart, path: Path) -> str:
    """Return the name of the file of a part: `decoder_model.onnx` if the whole model's is `model.onnx`."""
    return part.name.removesuffix("model") + path.name


def export_part(
    part: ExportPart, path: Path, model: nn.Module, fuse: bool, progress: Callable[[str], None], weights: Weights | None = None
) -> ExportedFile:
    """Write the part to the file at `path`, and compare it with torch. Raises `CaptureError` if it does not agree."""
    progress(f"tracing {path.name}")
    check_other_sizes_run(part)
    graph = trace_part(part)
    progress(f"optimizing {path.name}")
    graph = optimize(graph)
    remove_unused_inputs(graph)
    separate_padding_from_pooling(graph)
    steps: list[RewriteStep] = []
    incomparable = why_incomparable(part)
    comparable = not (incomparable or missing_packages("onnxruntime"))
    if fuse and incomparable:
        steps = [not_fused(graph, incomparable)]
    elif fuse:
        examples = [part.example(sizes, seed) for seed, sizes in enumerate(other_sizes(part)[:2], start=1)]
        rounding = functools.cache(lambda: max(torch_rounding(part, inputs) for inputs in examples))
        graph, steps = fuse_operators(graph, examples, rounding)
    graph.producer_name = "retrofit"
    graph.metadata_props["retrofit.part"] = part.name
    graph.metadata_props["retrofit.recipe"] = "\n".join(provenance_of(model).recipe)
    account: PackedWeights | None = None
    if weights is not None:
        progress(f"packing the weights of {path.name}")
        parity, account = pack_weights(graph, path, part, weights, comparable)
    else:
        progress(f"writing {path.name}")
        save_model(graph, path)
        progress(f"running {path.name}")
        parity = compare_with_torch(path, part) if comparable else None
        require_agreement(parity, path, model)
    nodes = count_nodes(graph)
    if fuse and comparable and (branched := branch_file(graph, path, part)) is not None:
        steps.append(branched)
        nodes = branched.after if branched.kept else nodes
    inputs, outputs = (tuple(str(value.name) for value in values) for values in (graph.graph.inputs, graph.graph.outputs))
    return ExportedFile(path, inputs, outputs, nodes, tuple(steps), parity, account)


def require_agreement(parity: Parity | None, path: Path, model: nn.Module) -> None:
    """Raises `CaptureError` if the file was compared with torch and computes something else."""
    if parity is not None and not parity.agrees:
        raise CaptureError(
            f"{path.name} does not compute the same as {type(model).__name__}",
            why=f"on other shapes than traced, ONNX Runtime's outputs are {parity.measured}",
            remedy="report it; fuse=False and cache='none' export a plainer graph",
            code="differs",
        )


def pack_weights(
    graph: onnx_ir.Model, path: Path, part: ExportPart, weights: Weights, comparable: bool
) -> tuple[Parity | None, PackedWeights]:
    """Write the graph with packed weights to the file at `path`, and compare it with torch if possible."""
    before = weight_bytes(graph)
    parameters = parameters_by_value(part.model)
    done = quantize_weights(graph, BITS[weights], lambda matrix: bool(matching(matrix, parameters)))
    save_model(graph, path)
    found = compare_quantized(path, part, done) if comparable else None
    account = PackedWeights(len(done), weight_bytes(graph), before, found)
    return (None if found is None else found.exact), account


def check_other_sizes_run(part: ExportPart) -> None:
    """Raises `CaptureError` if the model itself does not run at the sizes used for the comparison."""
    for seed, sizes in enumerate(other_sizes(part), start=7):
        try:
            with torch.no_grad():
                part(part.example(sizes, seed))
        except Exception as error:  # of any type, from the model's own code
            raise CaptureError(
                f"{type(part.model).__name__} does not run at {', '.join(f'{size} {extent}' for size, extent in sizes.items())}",
                why=f"{error.what}: {error.why}" if isinstance(error, DoesNotFitError) else first_line(error),
                remedy=CAPTURE_AGAIN if isinstance(error, DoesNotFitError) else NOT_IN_GROUPS,
                code="does-not-run",
            ) from error


def save_model(graph: onnx_ir.Model, path: Path) -> None:
    """Write the graph to the file, with weights inside or, if one file cannot hold them, in `{name}_data`."""
    import onnx_ir

    if weight_bytes(graph) > MOST_INLINE_BYTES:
        onnx_ir.save(graph, path, external_data=f"{path.name}_data")
    else:
        write_in_one_file(graph.clone(), path)


def write_in_one_file(graph: onnx_ir.Model, path: Path) -> None:
    """Write the graph, with its weights one after another as fields of the message; `graph` no longer holds them.

    protobuf would hold all of them twice while it writes.
    """
    import onnx
    import onnx_ir

    weights = take_weights(graph)
    for name in weights:
        del graph.graph.initializers[name]
    proto = onnx_ir.to_proto(graph)
    rest = proto.graph.SerializeToString()
    proto.ClearField("graph")
    headers = {}
    for name, tensor in weights.items():
        header = onnx.TensorProto(name=name, dims=tensor.shape.numpy(), data_type=tensor.dtype.value).SerializeToString()
        header += field_start(onnx.TensorProto.RAW_DATA_FIELD_NUMBER, tensor.nbytes)
        headers[name] = field_start(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(header) + tensor.nbytes) + header
    size = len(rest) + sum(len(header) + weights[name].nbytes for name, header in headers.items())
    with path.open("wb") as file:
        file.write(proto.SerializeToString() + field_start(onnx.ModelProto.GRAPH_FIELD_NUMBER, size) + rest)
        for name, header in headers.items():
            file.write(header)
            file.write(weights[name].tobytes())


def field_start(number: int, size: int) -> bytes:
    """Return the bytes before those of a field in a protobuf message: its number and kind, then its length, 7 bits a byte."""
    found = bytearray([number << 3 | 2])
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes([*found, size])
