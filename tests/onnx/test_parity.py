"""A file that rounds otherwise, or chooses otherwise where two candidates nearly tie, computes what torch does; others do not."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.tiny_models import llama
from torch import Tensor, nn

import retrofit
from retrofit.checks import onnx, verify_onnx
from retrofit.checks.subject import Context, Subject
from retrofit.errors import CaptureError
from retrofit.inputs.example_inputs import named_inputs
from retrofit.numerics.distances import distance
from retrofit.numerics.precision import Widened
from retrofit.onnx import exporter
from retrofit.onnx.exporter import parity
from retrofit.onnx.exporter.export_parts import ExportPart, WholeModel

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


class Chooses(nn.Module):
    """Of two equal scores, summed up in different orders, the larger one decides which of two far values comes out."""

    def __init__(self, tie: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(31, 96)
        self.score = nn.Parameter(torch.randn(96, generator=generator))
        self.other = nn.Parameter(self.score.detach().flip(0) * tie)
        self.values = nn.Parameter(torch.randn(2, 5, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        scores = torch.stack([x @ self.score, x.flip(-1) @ self.other], -1)
        chosen = scores.argmax(-1)
        return torch.nn.functional.one_hot(chosen, 2).to(x.dtype) @ self.values + x[..., :5]


class Counts(Chooses):
    """The same after the place of the first of some integers, of which no rounding makes another one."""

    def forward(self, ids: Tensor) -> Tensor:
        first = (ids > 15).int().argmax(-1)
        return super().forward(ids) + first[:, None, None]


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [Chooses, Counts])
def test_near_ties_are_told_by_the_same_choices(kind: type[Chooses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, path = kind().eval(), tmp_path / "model.onnx"
    sizes = parity.other_sizes
    monkeypatch.setattr(parity, "other_sizes", lambda part: [dict.fromkeys(part.sizes, 16), *sizes(part)])  # many choices
    made = retrofit.export_onnx(model, path, example_inputs={"ids": torch.randint(31, (2, 11))})
    assert made.files[0].note and made.files[0].gap < 1e-6
    assert list(tmp_path.iterdir()) == [path]


def test_a_difference_that_is_no_tie_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Chooses(tie=1.1).eval(), tmp_path / "model.onnx"
    inputs = {"ids": torch.randint(31, (2, 11))}
    retrofit.export_onnx(model, path, example_inputs=inputs)
    assert verify_onnx(path, model, inputs).ok
    with torch.no_grad():
        model.other.neg_()  # chooses otherwise, and not by rounding
    assert not verify_onnx(path, model, inputs).ok
    with torch.no_grad():
        model.other.neg_()
        model.values.mul_(1.01)
    assert not verify_onnx(path, model, inputs).ok


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the model is traced with other weights: by less than trained models round, and far more than this one does."""
    trace = exporter.trace_part

    def trace_wrong(part: ExportPart) -> Any:
        part = copy.deepcopy(part)
        part.model.values.data.mul_(1 + 2e-5)
        return trace(part)

    model = Chooses(tie=1.1).eval()
    monkeypatch.setattr(exporter, "trace_part", trace_wrong)
    with refused(CaptureError, "Chooses", code="differs"):
        retrofit.export_onnx(model, tmp_path / "model.onnx", example_inputs={"ids": torch.randint(31, (2, 11))})
    assert not list(tmp_path.iterdir())


class Cancels(nn.Module):
    """Large products that cancel but for a rest: what remains in float32 is rounded to a few digits."""

    def __init__(self, size: float = 1e3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        large = size * torch.randn(1000, 5, generator=generator)
        self.embedding = nn.Embedding(31, 1000)
        self.one = nn.Parameter(large)
        self.other = nn.Parameter(torch.randn(1000, 5, generator=generator) - large)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x @ self.one + x.flip(-1) @ self.other.flip(0)


def built(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    return model.eval(), {"ids": torch.randint(31, (2, 11), generator=torch.Generator().manual_seed(1))}


def test_what_rounding_explains_passes_and_what_it_does_not_is_reported(tmp_path: Path) -> None:
    """The gap is far beyond what other models round, the file computes what torch does, and a fault of its size is still seen."""
    torch.manual_seed(0)
    (model, inputs), path = built(Cancels()), tmp_path / "model.onnx"
    found = retrofit.export_onnx(model, path, example_inputs=inputs).files[0].parity
    assert found is not None and found.gap > 1e-4 and found.agrees and found.wide is not None
    assert found.wide <= found.limit == parity.FARTHER * found.own
    assert f"{found.gap:.1e} from torch, {found.wide:.1e} from its float64 (limit {found.limit:.0e})" in str(found.measured)
    assert verify_onnx(path, model, inputs).ok
    with torch.no_grad():
        model.other.add_(3 * found.limit * (model.one.double() + model.other.double()))  # all outputs are larger by that
    wrong = verify_onnx(path, model, inputs)
    assert not wrong.ok and wrong["onnx"].why


def test_a_forward_that_rounds_nothing_by_luck_is_no_measure_of_rounding() -> None:
    """Two numbers cancel but for a rest: torch's forward is exact, and rounding either of them once moves the rest by 1e-4."""

    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(31, 64)
            self.embedding.weight.data.fill_(1 + 2.0**-10)
            self.other = nn.Parameter(torch.ones(64))

        def forward(self, ids: Tensor) -> Tensor:
            return self.embedding(ids) - self.other

    model, inputs = built(Rest())
    part = WholeModel(model, inputs)
    before = [value.clone() for value in model.parameters()]
    (exact,) = part(inputs)
    for fault, agrees in ((1e-4, True), (1e-2, False)):
        found = parity.compare_outputs({part.outputs[0]: exact * (1 + fault)}, part, inputs)
        assert found.agrees is agrees and 5e-5 < found.own < 5e-4, found
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fault", [3e-5, 1e-5])
def test_a_small_fault_of_a_model_that_hardly_rounds_is_reported(fault: float) -> None:
    """It is smaller than what `Cancels` rounds, and far above the rounding of this one."""
    torch.manual_seed(0)
    model, inputs = built(Chooses(tie=1.1))
    part = WholeModel(model, inputs)
    outputs = dict(zip(part.outputs, part(inputs), strict=True))
    assert parity.compare_outputs(outputs, part, inputs).agrees
    wrong = {name: value * (1 + fault) for name, value in outputs.items()}
    found = parity.compare_outputs(wrong, part, inputs)
    assert not found.agrees and found.wide == pytest.approx(fault, rel=0.1) and found.limit < fault


def test_choices_that_fall_otherwise_in_float64_are_no_rounding() -> None:
    torch.manual_seed(0)
    model, _ = built(Chooses())
    inputs = {"ids": torch.arange(31)[None].repeat(2, 1)}
    part = WholeModel(model, inputs)
    outputs = dict(zip(part.outputs, part(inputs), strict=True))
    with Widened(torch.float64):
        moved = max(distance(outputs[name], wide) for name, wide in zip(part.outputs, part(inputs), strict=True))
    assert moved > 0.1  # torch itself chooses otherwise in float64
    assert not parity.compare_outputs({name: value * 1.001 for name, value in outputs.items()}, part, inputs).agrees


def test_code_that_refuses_float64_is_held_to_a_fixed_limit() -> None:
    class Refuses(Chooses):
        def forward(self, ids: Tensor) -> Tensor:
            found = super().forward(ids)
            if found.dtype == torch.float64:
                raise RuntimeError("float32 is wanted here")
            return found

    torch.manual_seed(0)
    model, inputs = built(Refuses(tie=1.1))
    part = WholeModel(model, inputs)
    outputs = dict(zip(part.outputs, part(inputs), strict=True))
    for fault, agrees in ((5e-5, True), (5e-4, False)):
        found = parity.compare_outputs({name: value * (1 + fault) for name, value in outputs.items()}, part, inputs)
        assert found.agrees is agrees and "float32" in found.measured


# ── The cache ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_that_the_rewrite_lost_is_a_finding() -> None:
    """Where the dense model has none, or is not at hand, the report says that the file is without."""
    model = llama()
    subject = Subject(model, (named_inputs(model),))
    lost = onnx.OnnxMeasurement(1, "1.0e-07 from torch", why_no_cache="the model's cache holds more than tensors")
    alone = onnx.judge_onnx(lost, None, Context(subject, has_reference=False))
    assert alone.status == "passed" and "cache" in alone.measured and lost.why_no_cache in alone.why
    found = onnx.judge_onnx(lost, None, Context(subject, has_reference=True, dense=model))
    assert found.status == "failed" and "dense" in found.why
    kept = dataclasses.replace(lost, cached=True, why_no_cache="")
    assert onnx.judge_onnx(kept, None, Context(subject, has_reference=True, dense=model)).measured.endswith("1 file with the cache")
