"""Checkpoints are whole or gone, whatever interrupts or fills the disk; of two runs into one folder one is refused."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.refusals import refused

from retrofit.errors import TrainingError
from retrofit.files.atomic_writes import held, is_held
from retrofit.training.checkpoints import whole_checkpoint
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.runs import ALIGNMENT, last_checkpoint, refuse_to_overwrite, run_folder
from retrofit.training.settings import Settings
from retrofit.training.teacher_cache import KeptPredictions
from retrofit.training.teaching import prepare_folder

TEXTS = ["".join(f"{number} squared is {number * number}. " for number in range(100))]
SMALL = Settings(steps=4, batch_size=2, length=16, eval_every=4, save_every=2, device="cpu")


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file is longer than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written(small_files: None, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"

    def write() -> None:
        with whole_checkpoint(folder):
            folder.mkdir()
            torch.save(torch.zeros(1000), folder / "model.bin")
            torch.save(torch.zeros(1 << 20), folder / "optimizer.pt")

    with refused(TrainingError, "checkpoint-2", code="unwritable") as error:
        write()
    assert error.value.why and "--resume" in error.value.remedy
    assert os.listdir(tmp_path) == []


def test_a_failure_of_something_else_is_not_explained_as_one_to_write(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="odd"), whole_checkpoint(tmp_path / "checkpoint-2"):
        raise RuntimeError("odd")


def test_a_run_on_a_full_disk_says_so_and_leaves_nothing(small_files: None, tmp_path: Path) -> None:
    with refused(TrainingError, "checkpoint-2", code="unwritable"):
        continue_pretraining(tiny_models.llama(vocab_size=300), TEXTS, SMALL, output=tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


def test_signals_while_a_checkpoint_is_written_wait_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, saved = tmp_path / "model.pt", torch.save
    whole = continue_pretraining(tiny_models.llama(vocab_size=300), TEXTS, SMALL)

    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        saved(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            continue_pretraining(tiny_models.llama(vocab_size=300), TEXTS, SMALL, output=output)
    checkpoint = last_checkpoint(tmp_path / "model.run")
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"
    run = continue_pretraining(tiny_models.llama(vocab_size=300), TEXTS, SMALL, output=output, resume=True)
    assert run.eval_losses == whole.eval_losses


def test_of_two_runs_into_one_folder_one_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "model.pt"
    with run_folder(output, {}, SMALL, resume=False) as (folder, _):
        assert is_held(folder)
        for how in ({"resume": False, "force": False}, {"resume": False, "force": True}, {"resume": True, "force": False}):
            with refused(TrainingError, code="busy"):
                refuse_to_overwrite(output, **how)
        with refused(TrainingError, code="busy"), run_folder(output, {}, SMALL, resume=False):
            pass
        assert (folder / "run.json").exists()
    assert not is_held(folder)


def test_a_run_that_was_killed_before_its_first_checkpoint_is_no_obstacle(tmp_path: Path) -> None:
    output = tmp_path / "model.pt"
    with run_folder(output, {}, SMALL, resume=False) as (folder, _):
        pass
    refuse_to_overwrite(output, resume=False, force=False)
    (folder / ALIGNMENT / "checkpoint-1").mkdir(parents=True)
    (folder / ALIGNMENT / "checkpoint-1" / "trainer_state.json").touch()
    with refused(TrainingError, code="exists", option="resume"):
        refuse_to_overwrite(output, resume=False, force=False)


def test_predictions_that_are_being_written_are_not_written_twice(tmp_path: Path) -> None:
    with held(tmp_path), refused(TrainingError, code="busy"):
        prepare_folder(KeptPredictions(tmp_path, None), force=True)  # type: ignore[arg-type]
