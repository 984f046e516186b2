"""The token ids on which a `.pt2` file is checked differ, whatever it was exported on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.functional_models import VOCABULARY, Functional
from torch import Tensor, nn

import retrofit
from retrofit.provenance import provenance_of

SIZE = (2, 9)
COUNTED = torch.arange(SIZE[1]).expand(SIZE).contiguous()
FREE = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}


def exported(model: nn.Module, path: Path, *ids: Tensor) -> Path:
    program = torch.export.export(model.eval(), ids, dynamic_shapes=(FREE,) * len(ids), strict=False)
    torch.export.save(program, path)
    return path


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("ids", [torch.zeros(SIZE, dtype=torch.long), torch.ones(SIZE, dtype=torch.long), COUNTED])
def test_a_program_exported_on_ids_that_say_nothing_is_checked_on_others(ids: Tensor, tmp_path: Path) -> None:
    model = retrofit.load(exported(Functional(), tmp_path / "model.pt2", ids))
    drawn = provenance_of(model).examples["ids"]
    assert drawn.shape == SIZE and drawn.dtype == torch.long
    assert drawn.unique().numel() > 5 and int(drawn.min()) >= 0 and int(drawn.max()) < VOCABULARY
    checks = {
        check.name: check
        for check in retrofit.verify(retrofit.apply(model, "sum"), reference=retrofit.load(tmp_path / "model.pt2")).checks
    }
    assert checks["causality"].status == "passed" and checks["function"].status == "passed"


@pytest.mark.long
def test_ids_that_differ_are_kept(tmp_path: Path) -> None:
    ids = torch.randint(VOCABULARY, SIZE, generator=torch.Generator().manual_seed(3))
    assert torch.equal(provenance_of(retrofit.load(exported(Functional(), tmp_path / "model.pt2", ids))).examples["ids"], ids)


def test_positions_and_kinds_of_tokens_are_no_ids(tmp_path: Path) -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.kinds = nn.Embedding(31, 8), nn.Embedding(64, 8), nn.Embedding(2, 8)
            self.head = nn.Linear(8, 31)

        def forward(self, kinds: Tensor, places: Tensor, words: Tensor) -> Tensor:
            logits: Tensor = self.head(self.words(words) + self.places(places) + self.kinds(kinds))
            return logits

    nothing = torch.zeros(SIZE, dtype=torch.long)
    model = retrofit.load(exported(Numbered(), tmp_path / "model.pt2", nothing, COUNTED, nothing))
    examples = provenance_of(model).examples
    assert torch.equal(examples["kinds"], nothing) and torch.equal(examples["places"], COUNTED)
    assert examples["words"].unique().numel() > 5 and int(examples["words"].max()) < 31


@pytest.mark.parametrize(
    ("ids", "why"), [(torch.zeros(SIZE, dtype=torch.long), "holds no ids that differ"), (COUNTED, "counts up")]
)
def test_given_ids_that_say_nothing_are_the_reason_that_is_given(ids: Tensor, why: str) -> None:
    checks = {check.name: check for check in retrofit.verify(Functional().eval(), example_inputs=ids).checks}
    assert checks["causality"].why == f"ids {why} in the example inputs, so no token could be changed"


@pytest.mark.long
def test_the_example_tensors_among_constants_and_inside_of_containers_are_found(tmp_path: Path) -> None:
    class Nesting(Functional):
        def forward(self, kind: str, flag: bool, nothing: None, batch: dict[str, tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[override]
            ids, scale = batch["texts"]
            return super().forward(ids) * scale

    ids, scale = torch.randint(VOCABULARY, SIZE, generator=torch.Generator().manual_seed(3)), torch.tensor(2.0)
    model = Nesting().eval()
    given: Any = ("kind", True, None, {"texts": (ids, scale)})
    program = torch.export.export(model, given, dynamic_shapes=(None, None, None, {"texts": (FREE, {})}), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = retrofit.load(tmp_path / "model.pt2")
    examples = provenance_of(loaded).examples
    assert list(examples) == ["batch_texts_0", "batch_texts_1"] and torch.equal(examples["batch_texts_0"], ids)
    torch.testing.assert_close(loaded(**examples), model(*given))
