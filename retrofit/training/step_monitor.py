"""Times the steps of a run, reports them, knows which parameters no step trained, and stops a run that diverges."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from retrofit.errors import TrainingError
from retrofit.runtime.notes import Milestone
from retrofit.training import processes
from retrofit.training.pace import Pace


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
        """What is evaluated and saved after this step is what its cost allows; an interrupted run is saved and ends."""
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
                    remedy="lower --lr, or give a longer --warmup",
                )
            setattr(self, "loss" if key == "loss" else "held_out", f"  {text} {value:.4f}")
            if key == "eval_loss" and self.progress is not None:
                at = f"{self.stage}step {state.global_step}/{state.max_steps}"
                self.progress(Milestone(f"{at}: held-out loss {value:.4f}"))

    @property
    def seconds_per_step(self) -> float:
        """The median; 0 where there was none."""
        return statistics.median(self.seconds) if self.seconds else 0.0
