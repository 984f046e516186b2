"""Whether an ONNX file computes what torch does: on inputs of other shapes than it was traced with, near-ties of choices apart.

ONNX Runtime and torch round differently, so a model that chooses (an expert, an active unit) may choose differently in them where
two candidates nearly tie. What the file chose is known: it is run with its `ArgMax` and `TopK` as further outputs, torch makes the
same choices, and the outputs must agree. How near the ties were is measured in torch.
"""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

import torch
from torch import Tensor

from retrofit.onnx.exporter.export_part import LENGTH, ExportPart, Tensors
from retrofit.onnx.exporter.onnxruntime_session import OnnxSession
from retrofit.onnx.exporter.optimization import largest_gap
from retrofit.runtime.choices import Choices, OtherChoicesError

PARITY = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2}  # relative to the largest output
TIE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2}  # relative to the largest candidate
CHOOSES = {"ArgMax": 0, "ArgMin": 0, "TopK": 1}  # operators by the place of the output that says what was chosen


@dataclasses.dataclass(frozen=True)
class Parity:
    """How far a file's outputs lie from torch's, relative to the largest."""

    gap: float
    limit: float
    note: str = ""  # which choices fell otherwise, with which the gap is what it is

    @property
    def agrees(self) -> bool:
        return self.gap <= self.limit

    @property
    def measured(self) -> str:
        """The gap in words."""
        return f"{self.gap:.1e}{f', {self.note}' if self.note else ''}"


def part_dtype(part: ExportPart) -> torch.dtype:
    return next((value.dtype for value in part.parameters() if value.is_floating_point()), torch.float32)


def other_sizes(part: ExportPart) -> list[dict[str, int]]:
    """Sizes that the part was not traced with: larger and smaller ones, the least that it runs at, and none before."""
    nothing = {size: 0 if size.startswith("past") else extent + 3 for size, extent in part.sizes.items()}
    larger = {size: extent + 1 + place for place, (size, extent) in enumerate(part.sizes.items())}
    least = {size: part.least if size == LENGTH else 1 for size in part.sizes}
    return [larger, nothing, least] if any(size.startswith("past") for size in part.sizes) else [larger, least]


@torch.no_grad()
def compare_with_torch(path: Path, part: ExportPart) -> Parity:
    """How far the file lies from the part, on the worst of several shapes; raises `RetrofitError` where it does not run."""
    running, found = OnnxSession(path), []
    limit = PARITY[part_dtype(part)]
    for seed, sizes in enumerate(other_sizes(part), start=7):
        inputs = part.example(sizes, seed)
        outputs = running(inputs)
        gap = gap_to(outputs, part, inputs)
        found.append(Parity(gap, limit) if gap <= limit else compare_choosing_alike(path, part, inputs, Parity(gap, limit)))
    return max(found, key=lambda one: (not one.agrees, bool(one.note), one.gap))


def gap_to(outputs: Tensors, part: ExportPart, inputs: Tensors) -> float:
    """How far the outputs lie from torch's: those of the part that the file has."""
    expected = dict(zip(part.outputs, part(inputs), strict=True))
    return largest_gap(outputs, {name: value for name, value in expected.items() if name in outputs})


def compare_choosing_alike(path: Path, part: ExportPart, inputs: Tensors, found: Parity) -> Parity:
    """The comparison where torch makes the file's choices; as it was where these are no near-ties, or cannot be made."""
    outputs, chosen = run_with_choices(path, inputs)
    choices = Choices(chosen, picks_only=True)
    try:
        with choices:
            gap = gap_to(outputs, part, inputs)
    except OtherChoicesError:
        return found
    if not choices.changed or choices.margin > TIE[part_dtype(part)] or len(choices.made) != len(chosen):
        return found
    changed = f"{choices.changed} choice{'s' if choices.changed > 1 else ''} within {choices.margin:.1e} of a tie fell otherwise"
    return Parity(gap, found.limit, f"{changed} (without the same: {found.gap:.1e})")


def run_with_choices(path: Path, inputs: Tensors) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The file's outputs, and what its operators chose, in their order."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type in CHOOSES and not node.domain]
    names = [node.output[CHOOSES[node.op_type]] for node in nodes]
    own = {value.name for value in model.graph.output}
    for name in names:
        if name not in own:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    beside = path.with_name(f".{uuid.uuid4().hex}.onnx")  # where its weights are found
    try:
        onnx.save(model, beside)
        outputs = OnnxSession(beside)(inputs)
    finally:
        beside.unlink(missing_ok=True)
    return {name: value for name, value in outputs.items() if name in own}, [outputs[name] for name in names]
