"""Whether an ONNX file computes what torch does: on inputs of other shapes than it was traced with.

ONNX Runtime and torch round differently, a trained model more than a fresh one. What is not settled by the gap itself is settled in
float64: the file's outputs may lie a few times as far from torch's float64 outputs as torch's own do, output by output. Where a
model cancels large numbers, as on tokens with massive activations, one forward's rounding is a matter of luck: then it is also
measured how far the outputs move where weights move by a step of their dtype.

A model that chooses (an expert, an active unit) may choose differently where two candidates nearly tie. What the file chose is
known: it is run with its `ArgMax` and `TopK` as further outputs, torch makes the same choices, and the same must hold. How near the
ties were is measured in torch, in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from retrofit.errors import first_line
from retrofit.onnx.exporter.export_part import LENGTH, ExportPart, Tensors
from retrofit.onnx.exporter.onnxruntime_session import OnnxSession
from retrofit.onnx.exporter.optimization import CHOOSES, choosing_nodes, largest_gap
from retrofit.runtime.choices import Choices, OtherChoicesError
from retrofit.runtime.precision import Widened
from retrofit.runtime.probes import TOLERANCE, distance

ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-6, torch.float16: 2e-2}  # gaps that say nothing: 16 roundings of one number
FARTHER = 16  # times as far from float64 as torch's outputs, a file's may lie: its kernels are others (a DFT is 11 times as far)
UNSETTLED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2}  # the limit where the model's code refuses float64
TIE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2}  # relative to the largest candidate
DRAWS, MOVED = 4, 1 / 8  # how often the weights are moved by a step, and which share of them: of rounding's own size together
Context = Callable[[], contextlib.AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True)
class Parity:
    """How far a file's outputs lie from torch's, relative to the largest, and whether rounding explains that."""

    gap: float
    agrees: bool
    limit: float  # of `wide`, and where there is none of `gap`
    wide: float | None = None  # how far the output nearest to its limit lies from torch's in float64, where that was needed
    own: float = 0.0  # how far torch's does
    note: str = ""  # which choices fell otherwise, with which the gap is what it is

    @property
    def measured(self) -> str:
        """The gaps in words: `2.4e-04 from torch, 2.9e-04 from its float64 (limit 1.4e-03)`."""
        wide = "" if self.wide is None else f", {self.wide:.1e} from its float64 (limit {self.limit:.0e})"
        return f"{self.gap:.1e} from torch{wide}" + (f", {self.note}" if self.note else "")


def is_comparable(dtype: torch.dtype) -> bool:
    """Whether ONNX Runtime computes in that dtype on the CPU."""
    return dtype in ROUNDING


def part_dtype(part: ExportPart) -> torch.dtype:
    return next((value.dtype for value in part.parameters() if value.is_floating_point()), torch.float32)


def other_sizes(part: ExportPart) -> list[dict[str, int]]:
    """Sizes that the part was not traced with: larger and smaller ones, the least that it runs at, and none before."""
    nothing = {size: 0 if size.startswith("past") else extent + 3 for size, extent in part.sizes.items()}
    larger = {size: extent + 1 + place for place, (size, extent) in enumerate(part.sizes.items())}
    least = {size: part.least if size == LENGTH else 1 for size in part.sizes}
    return [larger, nothing, least] if any(size.startswith("past") for size in part.sizes) else [larger, least]


@torch.no_grad()
def compare_with_torch(path: Path, part: ExportPart, *, optimize: bool = True) -> Parity:
    """How far the file lies from the part, on the worst of several shapes; raises `RetrofitError` where it does not run.

    Without `optimize` ONNX Runtime runs the file node by node, as it is.
    """
    running, found = OnnxSession(path, optimize=optimize), []
    for seed, sizes in enumerate(other_sizes(part), start=7):
        inputs = part.example(sizes, seed)
        parity = compare_outputs(running(inputs), part, inputs)
        found.append(parity if parity.agrees else compare_choosing_alike(path, part, inputs, parity, optimize=optimize))
    return max(found, key=lambda one: (not one.agrees, bool(one.note), one.wide is not None, one.gap))


def compare_outputs(outputs: Tensors, part: ExportPart, inputs: Tensors, choosing: Context = contextlib.nullcontext) -> Parity:
    """Whether the outputs are those of the part but for rounding; `choosing` makes the choices of the part within it."""
    dtype = part_dtype(part)
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
    except Exception as error:  # code that refuses float64
        limit = UNSETTLED[dtype]
        return Parity(gap, agrees=gap <= limit, limit=limit, note=f"limit {limit:.0e}; not in float64: {first_line(error)}")
    own = {name: distance(value, wide[name]) for name, value in expected.items()}
    if choosing is contextlib.nullcontext:
        own = rounding_of_same_choices(part, inputs, wide, own)
    far = {name: distance(outputs[name], value) for name, value in wide.items()}

    def judged() -> Parity:
        limits = {name: max(ROUNDING[dtype], FARTHER * one) for name, one in own.items()}
        worst = max(far, key=lambda name: far[name] / limits[name])
        return Parity(gap, far[worst] <= limits[worst], limits[worst], far[worst], own[worst])

    found = judged()
    if not found.agrees:
        for name, one in rounding_of_weights(part, inputs, wide, choosing).items():
            own[name] = max(own[name], one)
        found = judged()
    return found


def rounding_of_weights(part: ExportPart, inputs: Tensors, wide: Tensors, choosing: Context) -> dict[str, float]:
    """How far the outputs lie from `wide`, those in float64, where some weights move by a step; the most of a few draws.

    Choices are made as with the weights as they are; 0 where the code does not let them be.
    """
    moved = dict.fromkeys(wide, 0.0)
    try:
        with Widened(torch.float64), choosing(), Choices() as recorded:
            part(inputs)
        for seed in range(DRAWS):
            with moved_weights(part, seed), Widened(torch.float64), Choices(recorded.made):
                found = outputs_of(part, inputs, wide)
            moved = {name: max(one, distance(found[name], wide[name])) for name, one in moved.items()}
    except OtherChoicesError:
        return dict.fromkeys(wide, 0.0)
    return moved


@contextlib.contextmanager
def moved_weights(part: ExportPart, seed: int) -> Iterator[None]:
    """Within this context some of the weights are the next larger or smaller number of their dtype, or the one after."""
    generator, own = torch.Generator().manual_seed(seed), [(one, one.data) for one in part.parameters()]
    try:
        for parameter, data in own:
            if data.is_floating_point():
                drawn = torch.rand(data.shape, generator=generator).to(data.device)
                way = (drawn < MOVED / 2).double() - (drawn > 1 - MOVED / 2).double()
                parameter.data = (data.double() * (1 + way * torch.finfo(data.dtype).eps)).to(data.dtype)
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


def outputs_of(part: ExportPart, inputs: Tensors, names: Collection[str]) -> Tensors:
    """What the part returns in torch, as far as the file returns it too."""
    return {name: value for name, value in zip(part.outputs, part(inputs), strict=True) if name in names}


@torch.no_grad()
def torch_rounding(part: ExportPart, inputs: Tensors) -> float:
    """How far torch's outputs lie from those in float64, the worst of them; 0 where the model's code refuses float64."""
    expected = outputs_of(part, inputs, part.outputs)
    try:
        with Widened(torch.float64):
            wide = outputs_of(part, inputs, part.outputs)
    except Exception:  # whatever the model's own code raises
        return 0.0
    own = {name: distance(value, wide[name]) for name, value in expected.items()}
    return max(rounding_of_same_choices(part, inputs, wide, own).values())


def rounding_of_same_choices(part: ExportPart, inputs: Tensors, wide: Tensors, own: dict[str, float]) -> dict[str, float]:
    """How far torch's outputs lie from those in float64 where it chooses as there: else a choice would pass for rounding."""
    if max(own.values()) <= TOLERANCE[part_dtype(part)]:
        return own
    try:
        with Widened(torch.float64), Choices() as recorded:
            part(inputs)
        with Choices(recorded.made):
            choosing_so = outputs_of(part, inputs, wide)
    except OtherChoicesError:
        return own
    return {name: min(one, distance(choosing_so[name], wide[name])) for name, one in own.items()}


def compare_choosing_alike(path: Path, part: ExportPart, inputs: Tensors, found: Parity, *, optimize: bool = True) -> Parity:
    """The comparison where torch makes the file's choices; as it was where these are no near-ties, or cannot be made."""
    outputs, chosen = run_with_choices(path, inputs, optimize=optimize)
    made: list[Choices] = []

    def choosing() -> Choices:
        made.append(Choices(chosen, picks_only=True))
        return made[-1]

    try:
        parity = compare_outputs(outputs, part, inputs, choosing)
    except OtherChoicesError:
        return found
    choices = made[-1]  # in float64, where that was needed
    changed = max(one.changed for one in made)
    if not changed or choices.margin > TIE[part_dtype(part)] or len(choices.made) != len(chosen):
        return found
    fell = f"{changed} choice{'s' if changed > 1 else ''} within {choices.margin:.1e} of a tie fell otherwise"
    return dataclasses.replace(parity, note=", ".join(filter(None, (f"{fell} (without the same: {found.gap:.1e})", parity.note))))


def run_with_choices(path: Path, inputs: Tensors, *, optimize: bool = True) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The file's outputs, and what its operators chose, in their order."""
    import onnx
    import onnx_ir

    model = onnx.load(path, load_external_data=False)
    names = [str(node.outputs[CHOOSES[node.op_type]].name) for node in choosing_nodes(onnx_ir.from_proto(model))]
    own = {value.name for value in model.graph.output}
    for name in names:
        if name not in own:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    beside = path.with_name(f".{uuid.uuid4().hex}.onnx")  # where its weights are found
    try:
        onnx.save(model, beside)
        outputs = OnnxSession(beside, optimize=optimize)(inputs)
    finally:
        beside.unlink(missing_ok=True)
    return {name: value for name, value in outputs.items() if name in own}, [outputs[name] for name in names]
