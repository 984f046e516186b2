"""What evaluating and saving cost is measured, and kept to a tenth of the time of the steps; explicit intervals stay as given."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.training_runs import TEXTS, changed, llama, same_weights

from retrofit.errors import TrainingError
from retrofit.training import checkpoints
from retrofit.training.checkpoints import FIRST_CHECKPOINT, SHARE, Pace
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.runs import TrainingRun, folder_of, last_checkpoint
from retrofit.training.trainers import PretrainingTrainer

FREE = changed(steps=40, eval_every=None, eval_fraction=0.5)  # no interval is given


class Clock:
    """Time that passes only where something says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("step", "evaluation", "checkpoint"), [(1.0, 0.3, 4.0), (0.1, 0.5, 2.0), (6.0, 3.0, 40.0), (0.01, 9.0, 9.0)]
)
def test_whatever_things_take_they_take_a_tenth_of_the_steps(
    clock: Clock, step: float, evaluation: float, checkpoint: float
) -> None:
    one, evaluated, saved = Pace(evaluations=True, checkpoints=True), 0, []
    for number in range(4000):
        clock.now += step
        one.steps += step
        if number % 10 == 0 and one.evaluation_due:
            with one.timed_evaluation():
                clock.now += evaluation
            evaluated += 1
        if one.checkpoint_due:
            saved.append(clock.now)
            with one.timed_checkpoint():
                clock.now += checkpoint
    first = max(evaluation, checkpoint)  # before one of a kind was made nobody knows what it takes
    assert one.evaluating + one.saving <= 2 * SHARE * one.steps + 2 * first
    assert all(when >= FIRST_CHECKPOINT for when in saved)
    assert evaluated >= min(400, int(SHARE * one.steps / evaluation)) - 1  # the last may still be saved for
    assert len(saved) >= int(SHARE * one.steps / checkpoint) - 1


def test_explicit_intervals_are_always_due() -> None:
    one = Pace(evaluations=False, checkpoints=False)
    one.evaluating = one.saving = 1e9
    assert one.evaluation_due and one.checkpoint_due
    assert one.sample(1000, 10, 2) is None


@pytest.mark.parametrize(("windows", "steps", "batch"), [(40, 20, 2), (512, 200, 8), (3, 20, 2), (40, 5, 1), (7, 10_000, 2)])
def test_a_sample_is_of_different_windows_spread_over_all(windows: int, steps: int, batch: int) -> None:
    rows = Pace(evaluations=True, checkpoints=True).sample(windows, steps, batch)
    if rows is None:
        assert batch * steps * checkpoints.SAMPLE + batch > windows
    else:
        assert len(set(rows)) == len(rows) < windows and set(rows) <= set(range(windows))
        assert len(rows) == 1 or (rows[0], rows[-1]) == (0, windows - 1)


def test_the_last_evaluation_is_whole_and_the_others_are_of_a_sample(tmp_path: Path) -> None:
    model = llama()
    run = continue_pretraining(model, TEXTS, FREE, output=tmp_path / "model.pt")
    whole = continue_pretraining(llama(), TEXTS, changed(FREE, eval_every=40))
    assert 0 < run.sampled < run.held_out and run.sample_loss is not None
    assert run.eval_losses[0][0] == 0 and run.eval_losses[-1][0] == 40
    assert run.eval_losses[-1][1] == pytest.approx(whole.eval_losses[-1][1], rel=1e-6)
    assert run.eval_losses[0][1] != whole.eval_losses[0][1]
    assert run.losses == whole.losses  # evaluating changes nothing that is trained
    assert TrainingRun.read(tmp_path / "model.pt") == run
    assert f"{run.sample_loss:.4f}" in str(run) and f"{run.eval_losses[-1][1]:.4f}" in str(run)
    assert run.curve.eval_losses[-1] == (40, run.sample_loss)


def test_a_run_of_less_than_a_minute_keeps_no_checkpoint(tmp_path: Path) -> None:
    continue_pretraining(llama(), TEXTS, FREE, output=tmp_path / "model.pt")
    assert last_checkpoint(folder_of(tmp_path / "model.pt")) is None
    with refused(TrainingError, code="finished") as error:
        continue_pretraining(llama(), TEXTS, FREE, output=tmp_path / "model.pt", resume=True, force=True)
    assert "--save-every" in error.value.why and str(tmp_path / "model.pt") in error.value.remedy


@pytest.mark.parametrize("by", [signal.SIGINT, "KeyboardInterrupt"])
def test_an_interrupted_run_is_saved_after_the_step_and_goes_on_as_if_it_had_not_been(by: Any, tmp_path: Path) -> None:
    whole, resumed = llama(), llama()
    expected = continue_pretraining(whole, TEXTS, FREE)

    def interrupt(text: str) -> None:
        if text.startswith("step 7/"):
            if by == "KeyboardInterrupt":
                raise KeyboardInterrupt
            signal.raise_signal(by)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            continue_pretraining(llama(), TEXTS, FREE, output=tmp_path / "model.pt", progress=interrupt)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    left = last_checkpoint(folder_of(tmp_path / "model.pt"))
    assert left is not None and left.name == "checkpoint-7"
    run = continue_pretraining(resumed, TEXTS, FREE, output=tmp_path / "model.pt", resume=True)
    assert run.losses == expected.losses and run.eval_losses[-1] == expected.eval_losses[-1]
    assert same_weights(resumed, whole)


def test_the_second_signal_is_heeded_at_once() -> None:
    one, reached = Pace(evaluations=True, checkpoints=True), []

    def interrupted_twice() -> None:
        with one.ending_after_a_step():
            signal.raise_signal(signal.SIGINT)
            reached.append(one.interrupted)
            signal.raise_signal(signal.SIGINT)
            reached.append(False)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_twice()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == [True]


def test_of_checkpoints_one_is_kept_and_the_old_one_goes_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FIRST_CHECKPOINT", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", 1e6)
    seen: list[list[str]] = []
    write = PretrainingTrainer.save_model

    def watched(self: Any, *arguments: Any, **more: Any) -> None:
        seen.append(sorted(one.parent.name for one in Path(self.args.output_dir).glob("checkpoint-*/trainer_state.json")))
        write(self, *arguments, **more)

    monkeypatch.setattr(PretrainingTrainer, "save_model", watched)
    continue_pretraining(llama(), TEXTS, changed(FREE, steps=4), output=tmp_path / "model.pt")
    assert seen == [[], ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]]
    assert [one.name for one in folder_of(tmp_path / "model.pt").glob("checkpoint-*")] == ["checkpoint-4"]
