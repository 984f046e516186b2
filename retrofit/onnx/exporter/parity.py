"""Comparison of an ONNX file with torch, on inputs of other shapes than those of the trace.

ONNX Runtime and torch round differently, more so for a trained model than for a new one. If the gap itself decides nothing, float64
does: the file's outputs may lie a few times as far from torch's float64 outputs as torch's own do, output by output. If a model
cancels large numbers, as on tokens with massive activations, the rounding of one forward is a matter of chance. Then the change of
the outputs is also measured when weights move by a step of their dtype.

A model that chooses (an expert, an active unit) may choose differently between near-ties. The file's choices are made visible: it
is run with its `ArgMax` and `TopK` as additional outputs, torch makes the same choices, and the same must hold. The margin of the
ties is measured in torch, in float64.

A file with packed weights is tested in two steps. First, in float arithmetic (MatMulNBits without an accuracy level, and without
ONNX Runtime's optimizer, which gives one to products with an unpacked matrix) it must agree with torch, whose weights are the
packed ones' values for this test: then only rounding is left, judged as in any file. As it is run, the file also rounds the inputs
of packed matrices to 8 bits, with a scale for each block of 32. Such a step has the size of the weights' own, so the outputs may
lie a few times as far from those of float arithmetic as packing the weights moved the model. If it makes other choices (an active
unit, an expert), that is reported, and not judged by the distance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retrofit.errors import CaptureError, first_line
from retrofit.inputs.example_inputs import dtype_of
from retrofit.numerics.agreement import Choices, OtherChoicesError
from retrofit.numerics.distances import TOLERANCE, distance
from retrofit.numerics.precision import Widened
from retrofit.onnx.exporter.export_parts import ExportPart, OnnxSession, Tensors, other_sizes
from retrofit.onnx.exporter.optimization import CHOOSES, choosing_nodes, largest_gap
from retrofit.onnx.exporter.weight_quantization import QuantizedWeight
from retrofit.process import preserve_attribute

if TYPE_CHECKING:
    import onnx


ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-6, torch.float16: 2e-2}  # gaps that are ignored: 16 roundings of one number
FARTHER = 16  # allowed distance of a file from float64, in multiples of torch's: its kernels differ (a DFT is 11 times as far)
UNSETTLED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2}  # the limit if the code does not support float64
TIE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2}  # relative to the largest candidate
DRAWS, MOVED = 4, 1 / 8  # how often weights are moved by a step, and which share of them: together as much as rounding itself
Context = Callable[[], contextlib.AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True)
class Parity:
    """The distance of a file's outputs from torch's, relative to the largest, and whether rounding explains it."""

    gap: float
    agrees: bool
    limit: float  # of `wide`, or without it of `gap`
    wide: float | None = None  # the distance from torch's float64 outputs of the output closest to its limit, if it was needed
    own: float = 0.0  # that of torch's own outputs
    note: str = ""  # the choices that differ, with which the gap was measured

    @property
    def measured(self) -> str:
        """Return the gaps in words: `2.4e-04 from torch, 2.9e-04 from its float64 (limit 1.4e-03)`."""
        wide = "" if self.wide is None else f", {self.wide:.1e} from its float64 (limit {self.limit:.0e})"
        return f"{self.gap:.1e} from torch{wide}" + (f", {self.note}" if self.note else "")


def why_incomparable(model: nn.Module) -> str:
    """Return why ONNX Runtime does not compute on the CPU what the model does, "" where it does: the dtype of a parameter."""
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next((dtype for dtype in dtypes if dtype not in ROUNDING), None)
    return f"ONNX Runtime does not compute in {str(dtype).removeprefix('torch.')} on the CPU" if dtype else ""


@torch.no_grad()
def compare_with_torch(path: Path, part: ExportPart, *, optimize: bool = True) -> Parity:
    """Return the largest distance of the file from the part at several shapes. Raises `RetrofitError` if it does not run.

    Without `optimize` ONNX Runtime runs the file node by node, as it is.
    """
    session, found = OnnxSession(path, optimize=optimize), []
    for inputs in trial_inputs(part):
        parity = compare_outputs(session(inputs), part, inputs)
        found.append(parity if parity.agrees else compare_choosing_alike(path, part, inputs, parity, optimize=optimize))
    return max(found, key=lambda parity: (not parity.agrees, bool(parity.note), parity.wide is not None, parity.gap))


def trial_inputs(part: ExportPart) -> Iterator[Tensors]:
    """Yield inputs of the sizes at which a file is compared."""
    return (part.example(sizes, seed) for seed, sizes in enumerate(other_sizes(part), start=7))


def compare_outputs(outputs: Tensors, part: ExportPart, inputs: Tensors, choosing: Context = contextlib.nullcontext) -> Parity:
    """Return whether the outputs equal those of the part except for rounding; `choosing` is a context that forces its choices."""
    dtype = dtype_of(part)
    with choosing():
        expected = outputs_of(part, inputs, outputs)
    gap = largest_gap(outputs, expected)
    if gap <= ROUNDING[dtype]:
        return Parity(gap, agrees=True, limit=ROUNDING[dtype])
    try:
        with Widened(torch.float64), choosing():
            wide = outputs_of(part, inputs, outputs)
    except OtherChoicesError:
        raise
    except Exception as error:  # code that does not support float64
        limit = UNSETTLED[dtype]
        return Parity(gap, agrees=gap <= limit, limit=limit, note=f"limit {limit:.0e}; not in float64: {first_line(error)}")
    own = {name: distance(value, wide[name]) for name, value in expected.items()}
    if choosing is contextlib.nullcontext:
        own = rounding_of_same_choices(part, inputs, wide, own)
    far = {name: distance(outputs[name], value) for name, value in wide.items()}

    def worst_output() -> Parity:
        limits = {name: max(ROUNDING[dtype], FARTHER * rounding) for name, rounding in own.items()}
        worst = max(far, key=lambda name: far[name] / limits[name])
        return Parity(gap, far[worst] <= limits[worst], limits[worst], far[worst], own[worst])

    found = worst_output()
    if not found.agrees:
        for name, rounding in rounding_of_weights(part, inputs, wide, choosing).items():
            own[name] = max(own[name], rounding)
        found = worst_output()
    return found


def rounding_of_weights(part: ExportPart, inputs: Tensors, wide: Tensors, choosing: Context) -> dict[str, float]:
    """Return how far the outputs move from `wide`, those in float64, when some weights move by a step: the most in a few draws.

    Choices are made as with the original weights; 0 if the code does not permit that.
    """
    moved = dict.fromkeys(wide, 0.0)
    try:
        with Widened(torch.float64), choosing(), Choices() as recorded:
            part(inputs)
        for seed in range(DRAWS):
            with moved_weights(part, seed), Widened(torch.float64), Choices(recorded.made):
                found = outputs_of(part, inputs, wide)
            moved = {name: max(gap, distance(found[name], wide[name])) for name, gap in moved.items()}
    except OtherChoicesError:
        return dict.fromkeys(wide, 0.0)
    return moved


@contextlib.contextmanager
def moved_weights(part: ExportPart, seed: int) -> Iterator[None]:
    """Within this context some of the weights are the next larger or smaller number of their dtype, or the one after."""
    generator = torch.Generator().manual_seed(seed)
    with preserve_attribute("data", part.parameters()):
        for parameter in part.parameters():
            if parameter.is_floating_point():
                data = parameter.data
                drawn = torch.rand(data.shape, generator=generator).to(data.device)
                direction = (drawn < MOVED / 2).double() - (drawn > 1 - MOVED / 2).double()
                parameter.data = (data.double() * (1 + direction * torch.finfo(data.dtype).eps)).to(data.dtype)
        yield


def outputs_of(part: ExportPart, inputs: Tensors, names: Collection[str]) -> Tensors:
    """Return the part's outputs in torch that the file has too."""
    return {name: value for name, value in zip(part.outputs, part(inputs), strict=True) if name in names}


@torch.no_grad()
def torch_rounding(part: ExportPart, inputs: Tensors) -> float:
    """Return the largest distance of torch's outputs from those in float64; 0 if the model's code does not support float64."""
    expected = outputs_of(part, inputs, part.outputs)
    try:
        with Widened(torch.float64):
            wide = outputs_of(part, inputs, part.outputs)
    except Exception:  # of any type, from the model's own code
        return 0.0
    own = {name: distance(value, wide[name]) for name, value in expected.items()}
    return max(rounding_of_same_choices(part, inputs, wide, own).values())


def rounding_of_same_choices(part: ExportPart, inputs: Tensors, wide: Tensors, own: dict[str, float]) -> dict[str, float]:
    """Return the distance of torch's outputs from those in float64 with the choices of float64: a choice is no rounding."""
    if max(own.values()) <= TOLERANCE[dtype_of(part)]:
        return own
    try:
        with Widened(torch.float64), Choices() as recorded:
            part(inputs)
        with Choices(recorded.made):
            same_choices = outputs_of(part, inputs, wide)
    except OtherChoicesError:
        return own
    return {name: min(gap, distance(same_choices[name], wide[name])) for name, gap in own.items()}


def compare_choosing_alike(path: Path, part: ExportPart, inputs: Tensors, found: Parity, *, optimize: bool = True) -> Parity:
    """Return the comparison with the file's choices made in torch too; the earlier one if they are no near-ties, or impossible."""
    outputs, chosen = run_with_choices(path, inputs, optimize=optimize)
    made: list[Choices] = []

    def choosing() -> Choices:
        made.append(Choices(chosen, picks_only=True))
        return made[-1]

    try:
        parity = compare_outputs(outputs, part, inputs, choosing)
    except OtherChoicesError:
        return found
    choices = made[-1]  # in float64, if it was needed
    changed = max(attempt.changed for attempt in made)
    if not changed or choices.margin > TIE[dtype_of(part)] or len(choices.made) != len(chosen):
        return found
    differing = f"{changed} choice{'s' if changed > 1 else ''} within {choices.margin:.1e} of a tie fell otherwise"
    note = f"{differing} (without the same: {found.gap:.1e})"
    return dataclasses.replace(parity, note=f"{note}, {parity.note}" if parity.note else note)


def run_with_choices(path: Path, inputs: Tensors, *, optimize: bool = True) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the file's outputs, and the choices of its operators, in their order."""
    import onnx
    import onnx_ir

    model = onnx.load(path, load_external_data=False)
    names = [str(node.outputs[CHOOSES[node.op_type]].name) for node in choosing_nodes(onnx_ir.from_proto(model))]
    own = {value.name for value in model.graph.output}
    for name in names:
        if name not in own:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    with saved_next_to(path, model) as variant:
        outputs = OnnxSession(variant, optimize=optimize)(inputs)
    return {name: value for name, value in outputs.items() if name in own}, [outputs[name] for name in names]


@contextlib.contextmanager
def saved_next_to(path: Path, model: onnx.ModelProto) -> Iterator[Path]:
    """Save a variant of the model in the file at `path`, within this context, where its external weights are found."""
    import onnx

    variant = path.with_name(f".{uuid.uuid4().hex}.onnx")
    try:
        onnx.save(model, variant)
        yield variant
    finally:
        variant.unlink(missing_ok=True)


# ── Packed weights ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


FARTHER_QUANTIZED = 8  # allowed effect of rounding the inputs, in multiples of the effect of packing the weights
LEAST_LIMIT = 1e-2  # relative to the largest output: 8 bits have steps of 1/127 of a block's largest number


@dataclasses.dataclass(frozen=True)
class QuantizedParity:
    """The parity of a file with packed weights; distances are relative to the largest output."""

    exact: Parity  # the file in float arithmetic against torch with the packed weights' values
    moved: float  # the distance by which packing the weights moved torch's outputs
    rounded: float  # the distance by which rounding the inputs of packed matrices moves the file's
    choices: int  # the number of choices that differ because of it

    @property
    def measured(self) -> str:
        """Return the distances in words."""
        fell = f", {self.choices} choices fall otherwise" if self.choices else ""
        return f"packing the weights moves the outputs by {self.moved:.1e}, rounding what they multiply by {self.rounded:.1e}{fell}"


def parameters_by_value(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Return the matrices among the model's parameters by a sum of their bits."""
    found: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.dim() == 2:
            found.setdefault(checksum(parameter), []).append(parameter)
    return found


def checksum(matrix: Tensor) -> int:
    """Return a number that is equal for a matrix and its transpose."""
    return int(matrix.detach().float().contiguous().view(torch.int32).sum(dtype=torch.int64))


def matching(matrix: Tensor, parameters: dict[int, list[nn.Parameter]]) -> list[tuple[nn.Parameter, bool]]:
    """Return the parameters equal to the matrix of a graph, each with whether it is its transpose."""
    found = []
    for parameter in parameters.get(checksum(matrix), []):
        for transposed in (False, True):
            if torch.equal(parameter.detach().t() if transposed else parameter.detach(), matrix):
                found.append((parameter, transposed))
                break
    return found


@contextlib.contextmanager
def representing(weights: Sequence[QuantizedWeight], model: nn.Module) -> Iterator[None]:
    """Within this context the model's weights have the values that the packed ones represent."""
    parameters = parameters_by_value(model)
    replaced = [
        (parameter, weight.after.t() if transposed else weight.after)
        for weight in weights
        for parameter, transposed in matching(weight.before, parameters)
    ]
    with preserve_attribute("data", [parameter for parameter, _ in replaced]):
        for parameter, value in replaced:
            parameter.data = value.contiguous().to(parameter.dtype)
        yield


@torch.no_grad()
def compare_quantized(path: Path, part: ExportPart, weights: Sequence[QuantizedWeight]) -> QuantizedParity:
    """Return the comparison for the file at `path`. Raises `CaptureError` if it computes something else than the model."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    compute_in_float(graph.graph)
    before = [outputs_of(part, inputs, part.outputs) for inputs in trial_inputs(part)]
    with saved_next_to(path, graph) as in_float:
        with representing(weights, part.model):
            exact = compare_with_torch(in_float, part, optimize=False)
            after = [outputs_of(part, inputs, part.outputs) for inputs in trial_inputs(part)]
        if not exact.agrees:
            raise CaptureError(
                f"{path.name} does not compute the same as {type(part.model).__name__} with the dequantized weights",
                why=f"in float arithmetic ONNX Runtime's outputs are {exact.measured}",
                remedy="report it; fuse=False exports a plainer graph, and weights=None leaves the weights as they are",
                code="differs",
            )
        rounded, choices = compare_files(path, in_float, part)
    moved = max(map(largest_gap, after, before))
    limit = max(LEAST_LIMIT, FARTHER_QUANTIZED * moved)
    if not choices and not rounded <= limit:
        raise CaptureError(
            f"{path.name} differs too much from {type(part.model).__name__}",
            why=f"quantizing the inputs of the packed matrices moves the outputs by {rounded:.1e}, more than {limit:.1e}",
            remedy="export it without --weights",
            code="too-far",
            option="weights",
        )
    return QuantizedParity(exact, moved, rounded, choices)


def compute_in_float(graph: onnx.GraphProto) -> None:
    """Make all products in the graph and its branches multiply without rounding their inputs."""
    for node in graph.node:
        for attribute in list(node.attribute):
            if attribute.name == "accuracy_level":
                node.attribute.remove(attribute)
            elif attribute.HasField("g"):
                compute_in_float(attribute.g)


def compare_files(path: Path, other: Path, part: ExportPart) -> tuple[float, int]:
    """Return the largest distance between the outputs of two files at several sizes, and the number of differing choices."""
    import onnx

    gaps, differing = [], 0
    chooses = any(node.op_type in CHOOSES for node in onnx.load(path, load_external_data=False).graph.node)
    for inputs in trial_inputs(part):
        if chooses:
            outputs, choices = run_with_choices(path, inputs)
            expected, expected_choices = run_with_choices(other, inputs, optimize=False)
            differing += sum(int((a != b).sum()) for a, b in zip(choices, expected_choices, strict=True))
        else:
            outputs, expected = OnnxSession(path)(inputs), OnnxSession(other, optimize=False)(inputs)
        gaps.append(largest_gap(outputs, expected))
    return max(gaps), differing
