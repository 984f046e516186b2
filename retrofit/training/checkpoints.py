"""Checkpoints of transformers' trainer: written completely or not at all, and refused if anything is missing that a run needs.

Without intervals in the settings, evaluations and checkpoints each take at most a tenth of the time of the steps. Evaluations
before the last use a sample of the held-out windows, and both are made only once the steps so far pay for them; the first
checkpoint is written after a minute at the earliest. The last evaluation uses all windows. A monitor times and reports the steps,
lists parameters that no step trained, and stops a run that diverges.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import statistics
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import WEIGHTS_NAME

from retrofit.errors import TrainingError, first_line, kind_of
from retrofit.files.atomic_writes import whole_file
from retrofit.process import WAITING, deferred_signals
from retrofit.progress import Milestone
from retrofit.training import processes
from retrofit.training.optimizer import TableAdamW

OF_TORCH = ("PytorchStreamWriter", "inline_container")  # torch's message when it cannot write a file contains one of these
FULL = 1 << 20  # bytes; with less free space, the disk is taken to be full


@contextlib.contextmanager
def whole_checkpoint(folder: Path) -> Iterator[None]:
    """Write `folder` in this context: a signal waits until it is complete, and a failure removes it.

    Raises `TrainingError` where a file cannot be written.
    """
    try:
        with deferred_signals():
            yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and not any(word in str(error) for word in OF_TORCH):
            raise
        with deferred_signals():
            shutil.rmtree(folder, ignore_errors=True)
        raise TrainingError(
            f"the checkpoint {folder} cannot be written",
            why=reason_of(error, folder.parent),
            remedy=f"check the free space in {folder.parent}; the same command with --resume goes on from the checkpoint before, "
            "if there is one",
            code="unwritable",
        ) from error


def reason_of(error: Exception, folder: Path) -> str:
    """Return why a file could not be written, which torch seldom says."""
    known = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
    if known is not None and known.errno is not None:
        return os.strerror(known.errno).lower()
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < FULL:
            return os.strerror(errno.ENOSPC).lower()
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, the one that it was raised from, or while handling, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


DIAL = "dial.json"  # in a checkpoint: how far the sites have turned
OPTIMIZER, SCHEDULER, RANDOM, STATE = "optimizer.pt", "scheduler.pt", "rng_state*.pth", "trainer_state.json"


def require_whole_checkpoint(folder: Path, model: nn.Module) -> None:
    """Require every weight of `model`, and the states of optimizer, scheduler, random numbers and trainer.

    Raises `TrainingError` and names what is missing or damaged. Nothing that is read runs code.
    """
    require_state(folder)
    if not read_entry(folder / OPTIMIZER).get("state"):
        raise not_whole(folder, f"{OPTIMIZER} holds no state")
    require_numbers(folder)
    saved = read_entry(folder / WEIGHTS_NAME)
    for name, weight in model.state_dict().items():
        if name not in saved:
            raise not_whole(folder, f"{WEIGHTS_NAME} lacks {name}")
        if not isinstance(saved[name], torch.Tensor):
            raise not_whole(folder, f"{name} in {WEIGHTS_NAME} is not a tensor")
        if saved[name].shape != weight.shape:
            raise not_whole(folder, f"in {WEIGHTS_NAME} {name} is {list(saved[name].shape)}, the model's {list(weight.shape)}")


def require_state(folder: Path) -> None:
    """Raise `TrainingError` unless the states of trainer and scheduler are there."""
    if not isinstance(read_json(folder / STATE), dict):
        raise not_whole(folder, f"{STATE} holds no state")
    if "last_epoch" not in read_entry(folder / SCHEDULER):
        raise not_whole(folder, f"{SCHEDULER} holds no state")


def require_numbers(folder: Path) -> None:
    """Raise `TrainingError` unless the states of the random numbers are there and whole."""
    numbers = sorted(folder.glob(RANDOM))
    if not numbers:
        raise not_whole(folder, f"{RANDOM.replace('*', '')} is missing")
    for file in numbers:
        if not zipfile.is_zipfile(file):
            raise not_whole(folder, f"{file.name} is cut short or damaged")


def read_entry(file: Path) -> Mapping[str, Any]:
    """Return the entries of a file that `torch.save` wrote, their tensors mapped."""
    if not file.is_file():
        raise not_whole(file.parent, f"{file.name} is missing")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise not_whole(file.parent, f"{file.name} cannot be read ({first_line(error)})") from error
    if not isinstance(content, Mapping):
        raise not_whole(file.parent, f"{file.name} holds {kind_of(content)}")
    return content


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise not_whole(file.parent, f"{file.name} cannot be read ({first_line(error)})") from error


def not_whole(folder: Path, why: str) -> TrainingError:
    return TrainingError(
        f"{folder} is not a complete checkpoint",
        why=why,
        remedy="remove it and --resume from the previous one, if there is one; or start over with --force",
        code="incomplete",
    )


def write_dial(checkpoint: Path, share: float, anneal: int) -> None:
    """Write into the checkpoint how far the sites have turned, and in how many steps they do."""
    with whole_file(checkpoint / DIAL, force=True) as file:
        file.write(json.dumps({"share": share, "anneal": anneal}).encode())


def read_dial(checkpoint: Path) -> Mapping[str, Any]:
    file = checkpoint / DIAL
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


# ── When a run is evaluated and saved ─────────────────────────────────────────────────────────────────────────────────────────────


SHARE = 0.05  # upper bound on the time of evaluations, and on that of checkpoints, relative to the time of the steps
SAMPLE = 0.015  # batches of a sampled evaluation, for each step: a forward is about a third of a step, ten of them a twentieth
FIRST_CHECKPOINT = 60.0  # seconds until the first checkpoint
BYTES_A_SECOND = 2e8  # assumed speed of writing, until a checkpoint has been timed


class Pace:
    """Durations of a run's steps, evaluations and checkpoints; where there is no interval, it decides when the next one is due."""

    def __init__(self, *, evaluations: bool, checkpoints: bool, checkpoint_bytes: int = 0) -> None:
        self.evaluations, self.checkpoints = evaluations, checkpoints  # whether they have no interval
        self.steps = self.evaluating = self.saving = 0.0  # seconds
        self.evaluation = 0.0  # seconds of the last evaluation
        self.checkpoint = checkpoint_bytes / BYTES_A_SECOND  # seconds of the last checkpoint; at first an estimate
        self.began = time.perf_counter()
        self.received: list[int] = []  # signals
        self.stopped: KeyboardInterrupt | None = None  # raised between two steps
        self.ends_after_a_step = False  # whether a signal waits for the end of the step

    def sample(self, windows: int, steps: int, batch: int) -> list[int] | None:
        """Return the held-out windows that an evaluation before the last uses, spread over all of them; None for all."""
        count = batch * math.ceil(SAMPLE * steps)
        if not self.evaluations or count >= windows:
            return None
        return [round(index * (windows - 1) / (count - 1)) for index in range(count)] if count > 1 else [windows // 2]

    @property
    def evaluation_due(self) -> bool:
        """Return whether the steps so far pay for another evaluation."""
        return not self.evaluations or self.evaluating + self.evaluation <= SHARE * self.steps

    @property
    def checkpoint_due(self) -> bool:
        """Return whether the steps so far pay for another checkpoint, and the first minute is over."""
        if not self.checkpoints:
            return True
        return time.perf_counter() - self.began >= FIRST_CHECKPOINT and self.saving + self.checkpoint <= SHARE * self.steps

    @contextlib.contextmanager
    def timed_evaluation(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.evaluation = time.perf_counter() - began
        self.evaluating += self.evaluation

    @contextlib.contextmanager
    def timed_checkpoint(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.checkpoint = time.perf_counter() - began
        self.saving += self.checkpoint

    @property
    def interrupted(self) -> bool:
        """Return whether the run is to be saved and ended after this step."""
        return bool(self.received) or self.stopped is not None

    @contextlib.contextmanager
    def ending_after_a_step(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM in this context waits until the block ends; the second takes effect at once.

        The block has to end after the step in which `interrupted` becomes true.
        """
        self.ends_after_a_step = True
        if threading.current_thread() is not threading.main_thread():
            yield
            self.raise_stopped()
            return
        before: dict[int, Any] = {}

        def wait(number: int, frame: FrameType | None) -> None:
            self.received.append(number)
            if len(self.received) > 1:
                restore()
                signal.raise_signal(number)

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        try:
            for number in WAITING:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    before[number] = signal.signal(number, wait)
            yield
        finally:
            restore()
        if self.received:
            signal.raise_signal(self.received[0])
        self.raise_stopped()

    def raise_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped


class StepMonitor(TrainerCallback):
    """Callback that times and reports the steps, schedules evaluations and checkpoints, and stops a run that diverges."""

    def __init__(self, progress: Callable[[str], None] | None, stage: str = "") -> None:
        self.progress, self.stage = progress, stage
        self.pace = Pace(evaluations=False, checkpoints=False)
        self.seconds: list[float] = []
        self.began = 0.0
        self.losses = {"loss": "", "eval_loss": ""}  # the last ones, as text
        self.idle: list[nn.Parameter] | None = None  # parameters without any gradient so far; None before the first step

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint restores the intervals of its own run

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        self.began = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **rest: Any
    ) -> None:
        if self.idle is None:
            self.idle = [] if model is None else list(model.parameters())
        plain = getattr(optimizer, "optimizer", optimizer)
        received = plain.received if isinstance(plain, TableAdamW) else lambda parameter: parameter.grad is not None
        self.idle = [parameter for parameter in self.idle if parameter.requires_grad and not received(parameter)]

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        self.pace.steps += self.seconds[-1]
        if self.progress is not None:
            left = round(self.seconds_per_step * (state.max_steps - state.global_step))
            step = f"{self.stage}step {state.global_step}/{state.max_steps}"
            try:
                self.progress(f"{step}{''.join(self.losses.values())}  {left // 60}:{left % 60:02d} left")
            except KeyboardInterrupt as interruption:
                if not self.pace.ends_after_a_step:
                    raise
                self.pace.stopped = interruption
        self.decide(state, control)

    def decide(self, state: Any, control: Any) -> None:
        """Evaluate and save after this step where the cost allows it; save and end an interrupted run."""
        last = state.global_step >= state.max_steps
        if control.should_evaluate and not last:
            control.should_evaluate = processes.in_first(lambda: self.pace.evaluation_due)
        if control.should_save:
            control.should_save = processes.in_first(lambda: self.pace.checkpoint_due)
        if self.pace.interrupted:
            control.should_save = control.should_training_stop = True
        if control.should_save or state.global_step % state.save_steps == 0:
            control.should_log = True  # a checkpoint would lose what is not logged

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        if self.pace.interrupted:  # during the evaluation or checkpoint
            control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float] | None = None, **rest: Any) -> None:
        for key, text in (("loss", "loss"), ("eval_loss", "held out")):
            value = (logs or {}).get(key)
            if value is None:
                continue
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss is {value} after step {state.global_step}",
                    why="training has diverged",
                    remedy="lower --lr, or raise --warmup",
                    code="diverged",
                )
            self.losses[key] = f"  {text} {value:.4f}"
            if key == "eval_loss" and self.progress is not None:
                self.progress(Milestone(f"{self.stage}step {state.global_step}/{state.max_steps}: held-out loss {value:.4f}"))

    @property
    def seconds_per_step(self) -> float:
        """Median duration of a step; 0 if there was none."""
        return statistics.median(self.seconds) if self.seconds else 0.0
