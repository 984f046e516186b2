"""When a run is evaluated and saved: what that costs is measured, and stays within a tenth of the time of the steps.

Where the settings name no interval, evaluations before the last are of a sample of the windows held out, made where the steps so
far pay for them; so are checkpoints, none in the first minute. The last evaluation is of all windows. A monitor times the steps,
reports them, lists parameters that no step trained, and stops a run that diverges.
"""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from retrofit.errors import TrainingError
from retrofit.process import WAITING
from retrofit.progress import Milestone
from retrofit.training import processes

SHARE = 0.05  # of the time of the steps that evaluations may take, and that checkpoints may
SAMPLE = 0.015  # batches of a sampled evaluation, for each step: a forward is about a third of a step, ten of them a twentieth
FIRST_CHECKPOINT = 60.0  # seconds after which the first is written
BYTES_A_SECOND = 2e8  # at which a checkpoint is supposed to be written, until the first was


class Pace:
    """The durations of a run's steps, evaluations and checkpoints, and whether another of those without an interval is due."""

    def __init__(self, *, evaluations: bool, checkpoints: bool, checkpoint_bytes: int = 0) -> None:
        self.evaluations, self.checkpoints = evaluations, checkpoints  # have no interval
        self.steps = self.evaluating = self.saving = 0.0  # seconds
        self.evaluation = 0.0  # seconds of the last
        self.checkpoint = checkpoint_bytes / BYTES_A_SECOND
        self.began = time.perf_counter()
        self.received: list[int] = []  # signals
        self.stopped: KeyboardInterrupt | None = None  # raised between two steps
        self.ends_after_a_step = False  # where it is interrupted

    def sample(self, windows: int, steps: int, batch: int) -> list[int] | None:
        """Return the windows held out that an evaluation before the last is of, spread over all; None: all of them."""
        count = batch * math.ceil(SAMPLE * steps)
        if not self.evaluations or count >= windows:
            return None
        return [round(place * (windows - 1) / (count - 1)) for place in range(count)] if count > 1 else [windows // 2]

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
        """Return whether the run is to be saved after this step, and to end."""
        return bool(self.received) or self.stopped is not None

    @contextlib.contextmanager
    def ending_after_a_step(self) -> Iterator[None]:
        """Within this context the first SIGINT or SIGTERM waits until the block ends, the second is heeded at once.

        The block is to end after the step that `interrupted` is seen in.
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
    """Times the steps, reports them, has them evaluated and saved as often as the settings say, and stops a run that diverges."""

    def __init__(self, progress: Callable[[str], None] | None, stage: str = "") -> None:
        self.progress, self.stage = progress, stage
        self.pace = Pace(evaluations=False, checkpoints=False)
        self.seconds: list[float] = []
        self.began = 0.0
        self.loss = self.held_out = ""
        self.idle: list[nn.Parameter] | None = None  # those that no gradient has reached so far; None before the first step

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint brings back how often its run evaluated, saved and logged

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        self.began = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, model: nn.Module | None = None, **rest: Any
    ) -> None:
        known = ([] if model is None else list(model.parameters())) if self.idle is None else self.idle
        self.idle = [parameter for parameter in known if parameter.requires_grad and parameter.grad is None]

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        self.pace.steps += self.seconds[-1]
        if self.progress is not None:
            left = round(self.seconds_per_step * (state.max_steps - state.global_step))
            step = f"{self.stage}step {state.global_step}/{state.max_steps}"
            try:
                self.progress(f"{step}{self.loss}{self.held_out}  {left // 60}:{left % 60:02d} left")
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
            control.should_log = True  # the trainer forgets in a checkpoint what it has not logged

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        if self.pace.interrupted:  # while it was written
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
            setattr(self, "loss" if key == "loss" else "held_out", f"  {text} {value:.4f}")
            if key == "eval_loss" and self.progress is not None:
                at = f"{self.stage}step {state.global_step}/{state.max_steps}"
                self.progress(Milestone(f"{at}: held-out loss {value:.4f}"))

    @property
    def seconds_per_step(self) -> float:
        """The median; 0 where there was none."""
        return statistics.median(self.seconds) if self.seconds else 0.0
