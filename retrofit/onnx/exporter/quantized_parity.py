"""Whether a file with packed weights computes what the model does with the numbers that these stand for.

Two questions, one after the other. With float arithmetic (MatMulNBits without an accuracy level, and without ONNX Runtime's
optimizer, which gives products with an unpacked matrix one) the file must agree with torch, whose weights are
the packed ones' numbers for as long as that takes: then only rounding is left, and `parity` decides as it does for any file. As it
is run, the file rounds what packed matrices multiply to 8 bits as well, a scale for each block of 32. Such a step is of
the size of the weights' own, so its outputs may lie a few times as far from those of float arithmetic as packing the weights moved
the model; where it makes other choices (an active unit, an expert), that is said, and not judged by the distance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retrofit.errors import CaptureError
from retrofit.onnx.exporter.export_part import ExportPart
from retrofit.onnx.exporter.onnxruntime_session import OnnxSession
from retrofit.onnx.exporter.optimization import CHOOSES, largest_gap
from retrofit.onnx.exporter.parity import Parity, compare_with_torch, other_sizes, outputs_of, run_with_choices
from retrofit.onnx.exporter.weight_quantization import QuantizedWeight

if TYPE_CHECKING:
    import onnx

FARTHER = 8  # times as far as packing the weights moved the outputs, rounding what they multiply may move them
LEAST_LIMIT = 1e-2  # relative to the largest output: 8 bits have steps of 1/127 of a block's largest number


@dataclasses.dataclass(frozen=True)
class QuantizedParity:
    """What was found about a file with packed weights; distances are relative to the largest output."""

    exact: Parity  # the file in float arithmetic against torch with the packed weights' numbers
    moved: float  # how far packing the weights moved torch's outputs
    rounded: float  # how far rounding what they multiply moves the file's
    choices: int  # how many choices fall otherwise with that

    @property
    def measured(self) -> str:
        """The distances in words."""
        fell = f", {self.choices} choices fall otherwise" if self.choices else ""
        return f"packing the weights moves the outputs by {self.moved:.1e}, rounding what they multiply by {self.rounded:.1e}{fell}"


def parameters_by_value(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """The matrices among the model's parameters by a sum of their bits."""
    found: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.dim() == 2:
            found.setdefault(checksum(parameter), []).append(parameter)
    return found


def checksum(matrix: Tensor) -> int:
    """The same for a matrix and its transpose."""
    return int(matrix.detach().float().contiguous().view(torch.int32).sum(dtype=torch.int64))


def matching(matrix: Tensor, parameters: dict[int, list[nn.Parameter]]) -> list[tuple[nn.Parameter, bool]]:
    """The parameters that the matrix of a graph is, each with whether it is its transpose."""
    found = []
    for parameter in parameters.get(checksum(matrix), []):
        for transposed in (False, True):
            if torch.equal(parameter.detach().t() if transposed else parameter.detach(), matrix):
                found.append((parameter, transposed))
                break
    return found


@contextlib.contextmanager
def representing(weights: Sequence[QuantizedWeight], model: nn.Module) -> Iterator[None]:
    """Within this context the model's weights are the numbers that the packed ones stand for."""
    parameters = parameters_by_value(model)
    places = [(parameter, turned, one.after) for one in weights for parameter, turned in matching(one.before, parameters)]
    own = [parameter.data for parameter, _, _ in places]
    try:
        for parameter, turned, numbers in places:
            parameter.data = (numbers.t() if turned else numbers).contiguous().to(parameter.dtype)
        yield
    finally:
        for (parameter, _, _), data in zip(places, own, strict=True):
            parameter.data = data


@torch.no_grad()
def compare_quantized(path: Path, part: ExportPart, weights: Sequence[QuantizedWeight]) -> QuantizedParity:
    """How the file at `path` compares; raises `CaptureError` where it computes something else than the model."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    compute_in_float(graph.graph)
    beside = path.with_name(f".{uuid.uuid4().hex}.onnx")
    try:
        onnx.save(graph, beside)
        before = [
            outputs_of(part, part.example(sizes, seed), part.outputs) for seed, sizes in enumerate(other_sizes(part), start=7)
        ]
        with representing(weights, part.model):
            exact = compare_with_torch(beside, part, optimize=False)
            inputs = [part.example(sizes, seed) for seed, sizes in enumerate(other_sizes(part), start=7)]
            moved = max(largest_gap(outputs_of(part, given, part.outputs), old) for given, old in zip(inputs, before, strict=True))
        if not exact.agrees:
            raise CaptureError(
                f"{path.name} would compute something else than {type(part.model).__name__} with the packed weights' numbers",
                why=f"in float arithmetic ONNX Runtime's outputs lie {exact.measured}",
                remedy="report it; fuse=False exports a plainer graph, and weights=None leaves the weights as they are",
            )
        rounded, fell = compare_files(path, beside, part)
    finally:
        beside.unlink(missing_ok=True)
    limit = max(LEAST_LIMIT, FARTHER * moved)
    if not fell and not rounded <= limit:
        raise CaptureError(
            f"{path.name} lies too far from {type(part.model).__name__}",
            why=f"rounding what packed matrices multiply moves the outputs by {rounded:.1e}, more than {limit:.1e}",
            remedy="export it with its weights as they are",
        )
    return QuantizedParity(exact, moved, rounded, fell)


def compute_in_float(graph: onnx.GraphProto) -> None:
    """No product in the graph or its branches rounds what it multiplies."""
    for node in graph.node:
        for attribute in list(node.attribute):
            if attribute.name == "accuracy_level":
                node.attribute.remove(attribute)
            elif attribute.HasField("g"):
                compute_in_float(attribute.g)


def compare_files(path: Path, other: Path, part: ExportPart) -> tuple[float, int]:
    """How far the outputs of two files lie apart at the worst of several sizes, and how many of their choices differ."""
    import onnx

    gaps, fell = [], 0
    chooses = any(node.op_type in CHOOSES for node in onnx.load(path, load_external_data=False).graph.node)
    for seed, sizes in enumerate(other_sizes(part), start=7):
        inputs = part.example(sizes, seed)
        if chooses:
            (one, chosen), (two, expected) = run_with_choices(path, inputs), run_with_choices(other, inputs, optimize=False)
            fell += sum(int((a != b).sum()) for a, b in zip(chosen, expected, strict=True))
        else:
            one, two = OnnxSession(path)(inputs), OnnxSession(other, optimize=False)(inputs)
        gaps.append(largest_gap(one, two))
    return max(gaps), fell
