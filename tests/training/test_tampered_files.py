"""Files of training and planning that somebody changed: predictions, parts of checkpoints, measurements are refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from torch import Tensor

from retrofit.errors import CheckpointError, PlanningError, TrainingError
from retrofit.planning.measurements import FORMAT, MeasurementStore
from retrofit.planning.measurements import RECORD as MEASURED
from retrofit.training.sharding import fill_from_parts, read_parts
from retrofit.training.teacher_cache import RECORD, Facts, KeptPredictions, read_facts, write_facts

FACTS = Facts(
    teacher="", weights="w", vocabulary=9, tokenizer="t", objective="o", example="e", length=4, windows=5, text="x", top=2,
    temperature=1.0, seed=0, bf16=False, shard=3,
)  # fmt: skip
Tensors = dict[str, Tensor]


def predictions(folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None) -> KeptPredictions:
    """Predictions of five windows in two files, the first of which was changed."""
    kept = KeptPredictions(folder, FACTS)
    for number, windows in ((0, 3), (1, 2)):
        tensors: Tensors = {
            "ids": torch.ones(windows, 4, 2, dtype=torch.uint16),
            "log_probabilities": torch.full((windows, 4, 2), -1.0).half(),
            "log_rest": torch.full((windows, 4), -1.0).half(),
            "loss": torch.ones(windows),
        }
        if not number:
            change(tensors)
        kept.write(number, tensors)
    write_facts(folder, FACTS)
    return KeptPredictions.in_folder(folder)


def test_what_nobody_changed_is_read(tmp_path: Path) -> None:
    kept = predictions(tmp_path)
    assert kept.predictions(range(5)).ids.shape == (20, 2) and kept.loss(range(5)) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.pop("loss"),
        lambda one: one.update(ids=one["ids"].float()),
        lambda one: one.update(ids=one["ids"][:2]),
        lambda one: one.update(ids=one["ids"][..., :1]),
        lambda one: one.update(log_probabilities=torch.zeros(3, 5, 2).half()),
        lambda one: one.update(loss=torch.ones(3, 1)),
        lambda one: one.update(ids=torch.ones(24)),
        lambda one: one.update(ids=torch.full((3, 4, 2), 9, dtype=torch.int32)),
        lambda one: one.update(ids=torch.full((3, 4, 2), -1, dtype=torch.int32)),
    ],
)
def test_predictions_that_were_changed(change: Callable[[Tensors], Any], tmp_path: Path) -> None:
    kept = predictions(tmp_path, change)
    with refused(CheckpointError, "windows-000000.safetensors", code="unreadable") as error:
        kept.predictions([1, 0])
    assert error.value.why and "teach" in error.value.remedy
    assert kept.predictions([3, 4]).ids.shape == (8, 2)


def test_predictions_cut_short(tmp_path: Path) -> None:
    kept = predictions(tmp_path)
    kept.path(0).write_bytes(kept.path(0).read_bytes()[:-1])
    with refused(CheckpointError, "windows-000000.safetensors", code="unreadable"):
        kept.loss([0])


@pytest.mark.parametrize(
    "fields",
    [{"shard": 0}, {"windows": "5"}, {"windows": -1}, {"top": True}, {"temperature": None}, {"vocabulary": 0}, {"bf16": 1}],
    ids=str,
)
def test_a_record_of_nonsense_is_none(fields: dict[str, Any], tmp_path: Path) -> None:
    predictions(tmp_path)
    assert read_facts(tmp_path) == FACTS
    (tmp_path / RECORD).write_text(json.dumps({**json.loads((tmp_path / RECORD).read_text()), **fields}))
    assert read_facts(tmp_path) is None
    with refused(TrainingError, code="missing", option="teacher"):
        KeptPredictions.in_folder(tmp_path)
    (tmp_path / RECORD).write_text("[" * 100_000)
    assert read_facts(tmp_path) is None


# Parts of a checkpoint.

PART = {"part": torch.ones(2, 3), "start": 0, "size": [2, 3]}


@pytest.mark.parametrize(
    "entry",
    [
        None, 5, {}, {**PART, "part": None}, {**PART, "part": torch.ones(2, 4)}, {**PART, "part": torch.ones(3, 3)},
        {**PART, "part": torch.ones(6)}, {**PART, "start": -1}, {**PART, "start": "0"}, {**PART, "start": 1}, {**PART, "size": [2]},
    ],
)  # fmt: skip
def test_parts_of_a_checkpoint_that_were_changed(entry: Any, tmp_path: Path) -> None:
    for content in (PART, entry):
        torch.save({"a": content}, tmp_path / "weights-00000-of-00001.pt")
        found, parts = torch.zeros(2, 3), read_parts(tmp_path, "weights")
        if content is PART:
            fill_from_parts(found, "a", parts, tmp_path)
            assert bool(found.eq(1).all())
            continue
        with refused(TrainingError, code="incomplete"):
            fill_from_parts(found, "a", parts, tmp_path)


def test_a_part_that_is_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.mkdir, (tmp_path / "ran",)

    torch.save({"a": Evil()}, tmp_path / "weights-00000-of-00001.pt")
    with refused(TrainingError, "weights-00000-of-00001.pt", code="incomplete"):
        read_parts(tmp_path, "weights")
    assert not (tmp_path / "ran").exists()


# Measurements of a plan.


@pytest.mark.parametrize("content", [b"", b"x" * 99, None], ids=["empty", "noise", "gone"])
def test_a_sketch_that_was_changed(content: bytes | None, tmp_path: Path) -> None:
    kept = MeasurementStore(tmp_path / "kept", {"a": 1})
    kept.keep_sketch("one", torch.ones(3, 4))
    kept.measure("one", lambda: 5)
    file = kept.file("one")
    assert file is not None
    file.unlink() if content is None else file.write_bytes(content)
    again = MeasurementStore(tmp_path / "kept", {"a": 1})
    assert again.measure("one", lambda: 6) == 5
    with refused(PlanningError, "one.safetensors", code="unreadable") as error:
        again.sketch("one")
    assert str(file.parent) in error.value.remedy


@pytest.mark.parametrize(
    "record", ["{", "[" * 100_000, "[]", json.dumps({"format": FORMAT, "facts": {"a": 1}, "values": 5})], ids=len
)
def test_a_record_of_measurements_that_was_changed(record: str, tmp_path: Path) -> None:
    (tmp_path / MEASURED).write_text(record)
    with refused(PlanningError, code="unreadable"):
        MeasurementStore(tmp_path, {"a": 1})


def test_facts_have_the_fields_that_are_checked() -> None:
    assert {one.type for one in dataclasses.fields(Facts)} == {"str", "int", "float", "bool"}
