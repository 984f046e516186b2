"""Runs that are cut off: resumed they end as uninterrupted ones do, and nothing is lost, mixed up or left half-written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.training_runs import MODELS, SMALL, TEXTS, Unplugged, bert, changed, llama, same_weights, unplug_at

import retrofit
from retrofit.errors import CheckpointError, TrainingError
from retrofit.storage.checkpoint import save
from retrofit.training import runs
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.runs import TrainingRun, folder_of, last_checkpoint


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, name: str) -> None:
    """Bit for bit, with dropout (BERT and T5 have it) and with what is hidden in the windows."""
    whole, first, second = MODELS[name](), MODELS[name](), MODELS[name]()
    settings = changed(save_every=3)
    expected = continue_pretraining(whole, TEXTS, settings, output=tmp_path / "whole.pt")
    with pytest.raises(Unplugged):
        continue_pretraining(first, TEXTS, settings, output=tmp_path / "part.pt", progress=unplug_at(5))
    assert not (tmp_path / "part.pt").exists()
    checkpoint = last_checkpoint(tmp_path / "part.run")
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    resumed = continue_pretraining(second, TEXTS, settings, output=tmp_path / "part.pt", resume=True)
    assert resumed.eval_losses == expected.eval_losses
    assert resumed.losses == expected.losses
    assert same_weights(second, whole)
    assert same_weights(retrofit.load(tmp_path / "part.pt"), whole)


def test_a_loss_is_the_mean_over_the_same_steps_where_a_run_goes_on_between_two_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrofit.training.settings.POINTS", 2)  # every fourth step, and where a checkpoint is written
    settings = changed(save_every=3)
    expected = continue_pretraining(llama(), TEXTS, settings)
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, settings, output=tmp_path / "part.pt", progress=unplug_at(5))
    resumed = continue_pretraining(llama(), TEXTS, settings, output=tmp_path / "part.pt", resume=True)
    assert [step for step, _ in resumed.losses] == [3, 4, 6, 8]
    assert resumed.losses == expected.losses


@pytest.mark.first(1)
@pytest.mark.parametrize("last", ["draw_run", "save", "finish_folder"])
def test_a_run_that_is_killed_while_its_model_is_written_can_be_finished(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, written = tmp_path / "model.pt", last == "finish_folder"
    whole = llama()
    expected = continue_pretraining(whole, TEXTS, SMALL)

    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"retrofit.training.continued_pretraining.{last}", killed)
        with pytest.raises(KeyboardInterrupt):
            continue_pretraining(llama(), TEXTS, SMALL, output=output)
    assert output.exists() == written
    run = continue_pretraining(llama(), TEXTS, SMALL, output=output, resume=True, force=written)
    assert same_weights(retrofit.load(output), whole)
    assert (run.losses, run.eval_losses) == (expected.losses, expected.eval_losses)
    assert TrainingRun.read(output) == run and "speed" not in str(run)
    with refused(TrainingError, "8 steps", code="finished"):
        continue_pretraining(llama(), TEXTS, SMALL, output=output, resume=True, force=True)


def test_a_directory_appears_with_its_tokenizer_or_not_at_all(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            assert (Path(folder) / "config.json").is_file()
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        save(llama(), tmp_path / "model", tokenizer=Tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_replaces_another_and_fails_leaves_it(tmp_path: Path) -> None:
    output, folder = tmp_path / "model.pt", tmp_path / "model.run"
    first = continue_pretraining(llama(), TEXTS, changed(save_every=3), output=output)
    (folder / "notes.txt").write_text("years of work")
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def again(unplugged: int, **more: Any) -> None:
        settings = changed(save_every=3, seed=1)
        with pytest.raises(Unplugged):
            continue_pretraining(llama(), TEXTS, settings, output=output, progress=unplug_at(unplugged), **more)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.run"]
        assert TrainingRun.read(output) == first

    again(2, force=True)  # before its first checkpoint
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    again(5, force=True)  # after: it can be resumed, and the run it would replace is kept
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    again(4, force=True, resume=True)
    (folder / "more.txt").write_text("of this run")
    again(2, force=True)  # a third, started over
    assert (folder / "more.txt").read_text() == "of this run"
    (folder / "more.txt").unlink()
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    continue_pretraining(llama(), TEXTS, changed(save_every=3, seed=1), output=output, force=True)
    assert (folder / "notes.txt").read_text() == "years of work"
    names = ["checkpoint-8", "curve.png", "notes.txt", "numbers.csv", "run.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_finished_run_can_be_given_more_steps(tmp_path: Path) -> None:
    settings = changed(schedule="constant", warmup=0)
    whole = llama()
    expected = continue_pretraining(whole, TEXTS, changed(settings, steps=12))
    continue_pretraining(llama(), TEXTS, settings, output=tmp_path / "model.pt")
    with refused(TrainingError, "8 steps", code="finished"):
        continue_pretraining(llama(), TEXTS, settings, output=tmp_path / "model.pt", resume=True, force=True)
    longer = llama()
    run = continue_pretraining(longer, TEXTS, changed(settings, steps=12), output=tmp_path / "model.pt", resume=True, force=True)
    assert run.losses == expected.losses
    assert same_weights(longer, whole)


def test_a_resumed_run_evaluates_and_saves_as_often_as_it_is_told(tmp_path: Path) -> None:
    output = tmp_path / "model.pt"
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, SMALL, output=output, progress=unplug_at(5))
    often = changed(eval_every=3, save_every=1)
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, often, output=output, resume=True, progress=unplug_at(8))
    left = last_checkpoint(folder_of(output))
    assert left is not None and left.name == "checkpoint-7"
    state = json.loads((left / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [0, 4, 6]


def test_a_checkpoint_that_was_being_written_when_the_run_was_killed_is_removed(tmp_path: Path) -> None:
    output, folder = tmp_path / "model.pt", tmp_path / "model.run"
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, SMALL, output=output, progress=unplug_at(6))
    for half in (folder / "checkpoint-8", folder / "align" / "checkpoint-2"):
        shutil.copytree(folder / "checkpoint-4", half)
        (half / "trainer_state.json").unlink()
        (half / "weights-00000-of-00002.pt").touch()  # it was written by two processes
    (folder / "notes").mkdir()
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, changed(save_every=1), output=output, resume=True, progress=unplug_at(7))
    assert {one.name for one in folder.iterdir()} == {"run.json", "align", "checkpoint-6", "notes"}
    assert not any((folder / "align").iterdir())
    continue_pretraining(llama(), TEXTS, SMALL, output=output, resume=True)
    assert not list(folder.rglob("weights-*"))


def with_frozen_layer(model: Any) -> Any:
    model.model.layers[0].requires_grad_(False)
    return model


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("change", "option", "named"),
    [
        ({"lr": 1e-3}, "lr", ("--lr", "0.003", "0.001")),
        ({"batch_size": 4}, "batch_size", ("--batch-size", "2", "4")),
        ({"texts": ["Another text. " * 200]}, "text", ()),
        ({"model": bert}, "model", ()),
        ({"model": lambda: llama(hidden_size=32)}, "model", ()),
        ({"model": lambda: llama().bfloat16()}, "dtype", ("float32", "bfloat16")),
        ({"model": lambda: with_frozen_layer(llama())}, "choice of trained parameters", ()),
        ({"model": lambda: retrofit.apply(llama(), "reversible", verify=False)}, "recipe", ("reversible",)),
    ],
    ids=["rate", "batch", "text", "class", "shape", "dtype", "frozen", "recipe"],
)
def test_another_run_is_not_resumed(tmp_path: Path, change: dict[str, Any], option: str, named: tuple[str, ...]) -> None:
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, SMALL, output=tmp_path / "model.pt", progress=unplug_at(6))
    texts, model = change.pop("texts", TEXTS), change.pop("model", llama)()
    with refused(TrainingError, *named, code="other-run", option=option):
        continue_pretraining(model, texts, changed(**change), output=tmp_path / "model.pt", resume=True)


def without_weight(file: Path) -> None:
    saved = torch.load(file)
    torch.save({name: tensor for name, tensor in saved.items() if name != "model.layers.1.mlp.up_proj.weight"}, file)


def narrow() -> dict[str, Any]:
    return llama(hidden_size=8).state_dict()


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:99])


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no optimizer": ("optimizer.pt", Path.unlink, "optimizer.pt is missing"),
    "no scheduler": ("scheduler.pt", Path.unlink, "scheduler.pt is missing"),
    "no random state": ("rng_state.pth", Path.unlink, "rng_state.pth is missing"),
    "no weights": ("pytorch_model.bin", Path.unlink, "pytorch_model.bin is missing"),
    "a weight missing": ("pytorch_model.bin", without_weight, "lacks model.layers.1.mlp.up_proj.weight"),
    "weights of another shape": (
        "pytorch_model.bin",
        lambda file: torch.save(llama(hidden_size=8).state_dict(), file),
        "the model's",
    ),
    "an optimizer without state": ("optimizer.pt", lambda file: torch.save({"state": {}}, file), "optimizer.pt holds no state"),
    "a scheduler without state": ("scheduler.pt", lambda file: torch.save({}, file), "scheduler.pt holds no state"),
    "an optimizer cut short": (
        "optimizer.pt",
        cut_short,
        "optimizer.pt cannot be read",
    ),
    "random state cut short": (
        "rng_state.pth",
        cut_short,
        "rng_state.pth is cut short",
    ),
    "a pickle": ("optimizer.pt", lambda file: torch.save(Trap(file.with_name("sprung")), file), "optimizer.pt cannot be read"),
    "a state of noise": ("trainer_state.json", lambda file: file.write_text("{"), "trainer_state.json cannot be read"),
}


class Trap:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def unplugged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped after its first checkpoint."""
    folder = tmp_path_factory.mktemp("unplugged")
    with pytest.raises(Unplugged):
        continue_pretraining(llama(), TEXTS, SMALL, output=folder / "model.pt", progress=unplug_at(6))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_does_not_go_on_from_half_a_checkpoint(unplugged: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(unplugged, tmp_path, dirs_exist_ok=True)
    checkpoint = last_checkpoint(tmp_path / "model.run")
    assert checkpoint is not None
    name, spoil, message = DAMAGES[damage]
    spoil(checkpoint / name)
    model = llama()
    with refused(TrainingError, code="incomplete") as error:
        continue_pretraining(model, TEXTS, SMALL, output=tmp_path / "model.pt", resume=True)
    assert message in error.value.why
    assert str(checkpoint) in error.value.what
    assert not (checkpoint / "sprung").exists()
    assert checkpoint.is_dir()
    assert same_weights(model, llama())


def test_a_folder_that_cannot_be_made_is_named_as_the_user_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "aside_of", lambda folder: tmp_path / "gone" / ".retrofit-0.replaced")
    with pytest.raises(OSError) as caught:
        runs.start_folder(tmp_path / "model.pt", {}, SMALL)
    assert caught.value.filename == str(tmp_path / "model.run") and not any(tmp_path.iterdir())
