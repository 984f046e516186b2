"""A file that chooses otherwise where two candidates nearly tie computes what torch does; one that differs elsewhere does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.checks.verify import verify_onnx
from retrofit.errors import CaptureError
from retrofit.onnx.exporter import parity

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


def test_near_ties_are_told_by_the_same_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, path = Chooses().eval(), tmp_path / "model.onnx"
    sizes = parity.other_sizes
    monkeypatch.setattr(parity, "other_sizes", lambda part: [dict.fromkeys(part.sizes, 16), *sizes(part)])  # many choices
    made = retrofit.export_onnx(model, path, example_inputs={"ids": torch.randint(31, (2, 11))})
    assert "of a tie fell otherwise" in made.files[0].note and made.files[0].gap < 1e-6
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
    model = Chooses(tie=1.1).eval()
    monkeypatch.setattr(parity, "PARITY", {torch.float32: -1.0})
    with pytest.raises(CaptureError, match="would compute something else"):
        retrofit.export_onnx(model, tmp_path / "model.onnx", example_inputs={"ids": torch.randint(31, (2, 11))})
    assert not list(tmp_path.iterdir())
