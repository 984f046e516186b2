"""The settings of a training run: each field is an option, with its default, its documentation and the values it admits."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

from retrofit.errors import TrainingError
from retrofit.passbase.options import option

MOST = 2**31 - 1  # what any count may be
MOST_SEED = 2**32 - 1  # what numpy takes
LEAST = {"length": 8, "top": 1, "seed": 0, "batch_size": 1, "windows": 1}
POINTS = 100  # entries a training curve has at most
SCHEDULES = ("linear", "cosine", "constant")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model's pretraining is continued; raises `TrainingError` where a value makes no sense."""

    steps: int = dataclasses.field(metadata={"doc": "optimizer steps in all", "minimum": 1})
    batch_size: int = option(8, "windows a step", minimum=1)
    length: int = option(256, "tokens a window", minimum=8)
    lr: float = option(1e-4, "highest learning rate", minimum=0)
    lr_new: float | None = option(None, "highest learning rate of the parameters that the passes added (as --lr)", minimum=0)
    warmup: int | None = option(None, "steps until the rate is reached (a twentieth of all steps)", minimum=0)
    schedule: str = option("linear", "how the rate goes down after that", choices=SCHEDULES)
    weight_decay: float = option(0.0, "AdamW's weight decay", minimum=0)
    eval_fraction: float = option(0.05, "share of the text held out for evaluation, up to 512 windows; 0 for none", minimum=0)
    eval_every: int | None = option(
        None,
        "steps between evaluations (a tenth of all steps, on a sample, while they take a twentieth of the time)",
        minimum=1,
    )
    save_every: int | None = option(
        None,
        "steps between checkpoints (as --eval-every, if given; else often enough to take a twentieth of the time, after a minute)",
        minimum=1,
    )
    seed: int = option(0, "order of the windows, and what is hidden in them", minimum=0)
    align: int | None = option(
        None,
        "warm-up steps of layer-wise distillation (with a teacher: as the passes propose)",
        minimum=0,
    )
    align_lr: float = option(1e-3, "highest learning rate of these steps", minimum=0)
    anneal: int | None = option(
        None,
        "of all steps, the first in which sites turn from dense to rewritten (with a teacher: as the passes propose)",
        minimum=0,
    )
    dial: str = option(
        "mixture",
        "how sites turn then: as mixtures with the dense ones, or by the dials of their passes, where these have one",
        choices=("mixture", "own"),
    )
    distil: float = option(0.5, "weight of the teacher's predictions; that of the model's own loss is the rest", minimum=0)
    distil_hidden: float = option(
        0.0, "weight of the distance of every layer's output from the dense layer's, added to the loss", minimum=0
    )
    temperature: float = option(1.0, "of the predictions that are compared", minimum=1e-3)
    gradient_checkpointing: bool = option(False, "keep fewer activations: less memory, more time")
    bf16: bool = option(False, "compute in bfloat16, keep weights as they are")
    fsdp: bool = option(False, "divide parameters, gradients and optimizer state among the processes (FSDP2)")
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, minimum, choices = as_number(field, self), field.metadata.get("minimum"), field.metadata.get("choices")
            object.__setattr__(self, field.name, value)
            if isinstance(value, (int, float)) and not math.isfinite(value):
                raise TrainingError(
                    f"{flag(field)} {value} is not a finite number", remedy=field.metadata["doc"], option=field.name
                )
            if value is not None and minimum is not None and value < minimum:
                raise TrainingError(
                    f"{flag(field)} {value} is below {minimum}", remedy=f"give at least {minimum}", option=field.name
                )
            if isinstance(value, int):
                check_most(field.name, value)
            if choices and value not in choices:
                raise TrainingError(
                    f"{flag(field)} {value} is not known", remedy=f"choose one of {', '.join(choices)}", option=field.name
                )
        if self.distil > 1:
            raise TrainingError(
                f"--distil {self.distil:g} is above 1", remedy="it is a share: the model's own loss has the rest", option="distil"
            )
        if self.anneal is not None and self.anneal > self.steps:
            raise TrainingError(
                f"--anneal {self.anneal} is more than all steps, {self.steps}",
                why="a part of the dense model would be left",
                remedy=f"give at most {self.steps}",
                option="anneal",
            )
        if self.eval_fraction >= 1:
            raise TrainingError(
                f"--eval-fraction {self.eval_fraction} leaves no text to train on",
                remedy="give a share below 1, such as 0.05",
                option="eval_fraction",
            )

    @property
    def warmup_steps(self) -> int:
        return math.ceil(self.steps / 20) if self.warmup is None else self.warmup

    @property
    def eval_steps(self) -> int:
        return max(1, self.steps // 10) if self.eval_every is None else self.eval_every

    @property
    def log_steps(self) -> int:
        return max(1, self.steps // POINTS)

    @property
    def paces_checkpoints(self) -> bool:
        """Return whether no option says after which steps there are checkpoints."""
        return self.save_every is None and self.eval_every is None

    @property
    def save_steps(self) -> int:
        """Those between checkpoints, or between the steps after which one may be written (nothing is forgotten there)."""
        if self.paces_checkpoints:
            return self.log_steps
        return self.eval_steps if self.save_every is None else self.save_every


CHANGEABLE_ON_RESUME = ("steps", "eval_every", "save_every", "device", "warmup")  # between a run and its resumption


def as_number(field: dataclasses.Field[Any], settings: Settings) -> Any:
    """Return the value of a field, as Python's own number where it is one; raises `TrainingError` where it should be and is not."""
    value, kind = getattr(settings, field.name), str(field.type).removesuffix(" | None")
    if kind not in ("int", "float") or (value is None and field.default is None):
        return value
    try:
        return operator.index(value) if kind == "int" else float(value + 0)
    except (TypeError, RuntimeError) as error:  # torch raises the second for a tensor of several numbers
        number = "integer" if kind == "int" else "number"
        raise TrainingError(f"{flag(field)} {value!r} is no {number}", remedy=field.metadata["doc"], option=field.name) from error


def check_values(**values: float) -> None:
    """Raises `TrainingError` where the value of an option that commands share is out of its bounds."""
    for name, value in values.items():
        least = LEAST.get(name, 1e-3)
        if not least <= value < math.inf:
            raise TrainingError(
                f"--{name.replace('_', '-')} {value} is below {least}", remedy=f"give at least {least}", option=name
            )
        check_most(name, value)


def check_most(name: str, value: float) -> None:
    most = MOST_SEED if name == "seed" else MOST
    if value > most:
        raise TrainingError(f"--{name.replace('_', '-')} {value} is above {most}", remedy=f"give at most {most}", option=name)


def flag(field: dataclasses.Field[Any]) -> str:
    """Return the option of the command line that sets a field."""
    return f"--{field.name.replace('_', '-')}"
