"""The settings of a training run: each field is an option, with its default, its documentation and the values it admits."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

from retrofit.errors import TrainingError
from retrofit.passbase.options import option

MOST = 2**31 - 1  # upper bound of any count
MOST_SEED = 2**32 - 1  # what numpy takes
LEAST = {"length": 8, "top": 1, "seed": 0, "batch_size": 1, "windows": 1}
POINTS = 100  # most entries of a training curve
SCHEDULES = ("linear", "cosine", "constant")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of continued pretraining. Raises `TrainingError` for an invalid value."""

    steps: int = dataclasses.field(metadata={"doc": "optimizer steps", "minimum": 1})
    batch_size: int = option(8, "windows per step", minimum=1)
    length: int = option(256, "tokens per window", minimum=8)
    lr: float = option(1e-4, "peak learning rate", minimum=0)
    lr_new: float | None = option(None, "peak learning rate of new parameters (default: chosen by the passes)", minimum=0)
    warmup: int | None = option(None, "warm-up steps (default: --steps / 20)", minimum=0)
    schedule: str = option("linear", "learning rate schedule after the warm-up", choices=SCHEDULES)
    weight_decay: float = option(0.0, "AdamW's weight decay", minimum=0)
    eval_fraction: float = option(0.05, "fraction of the text held out for evaluation, at most 512 windows; 0: none", minimum=0)
    eval_every: int | None = option(
        None, "steps between evaluations (default: --steps / 10, on a sample, within 1/20 of the time)", minimum=1
    )
    save_every: int | None = option(
        None, "steps between checkpoints (default: --eval-every, else within 1/20 of the time)", minimum=1
    )
    seed: int = option(0, "random seed of the order of windows and of masked tokens", minimum=0)
    align: int | None = option(
        None, "warm-up steps of layer-wise distillation (default with a teacher: chosen by the passes)", minimum=0
    )
    align_lr: float = option(1e-3, "peak learning rate of --align", minimum=0)
    anneal: int | None = option(
        None,
        "first steps, in which sites turn from dense to rewritten (default with a teacher: chosen by the passes)",
        minimum=0,
    )
    dial: str = option(
        "mixture",
        "how --anneal turns sites: mixing dense and rewritten outputs, or by the pass's own dial if it has one",
        choices=("mixture", "own"),
    )
    distil: float = option(0.5, "weight w of the distillation loss; the model's own loss has weight 1 − w", minimum=0)
    distil_hidden: float = option(0.0, "weight of the hidden-state distance to the teacher, added to the loss", minimum=0)
    temperature: float = option(1.0, "distillation temperature", minimum=1e-3)
    gradient_checkpointing: bool = option(False, "recompute activations: less memory, more time")
    bf16: bool = option(False, "compute in bfloat16; weights keep their dtype")
    fsdp: bool = option(False, "shard parameters, gradients and optimizer state (FSDP2)")
    device: str = option("auto", "device", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, minimum, choices = as_number(field, self), field.metadata.get("minimum"), field.metadata.get("choices")
            object.__setattr__(self, field.name, value)
            if isinstance(value, (int, float)) and not math.isfinite(value):
                raise refusal(field.name, f"{value} is not a finite number", f"use a number: {field.metadata['doc']}")
            if value is not None and minimum is not None and value < minimum:
                raise refusal(field.name, f"{value} is below {minimum}", f"use at least {minimum}")
            if isinstance(value, int):
                check_most(field.name, value)
            if choices and value not in choices:
                raise refusal(field.name, f"{value} is unknown", f"choose one of {', '.join(choices)}", code="choice")
        if self.distil > 1:
            raise refusal("distil", f"{self.distil:g} is above 1", "use a weight between 0 and 1")
        if self.anneal is not None and self.anneal > self.steps:
            why = "the model would still be partly dense at the end"
            raise refusal("anneal", f"{self.anneal} is more than all steps, {self.steps}", f"use at most {self.steps}", why=why)
        if self.eval_fraction >= 1:
            remedy = "use a fraction below 1, such as 0.05"
            raise refusal("eval_fraction", f"{self.eval_fraction} leaves no training text", remedy)

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
        """Steps between checkpoints, or between the steps at which one may be written (no field is left out of them)."""
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
    except (TypeError, RuntimeError) as error:  # torch raises RuntimeError for a tensor of several numbers
        number = "integer" if kind == "int" else "number"
        raise refusal(field.name, f"{value!r} is not a valid {number}", field.metadata["doc"], code="type") from error


def check_values(**values: float) -> None:
    """Raises `TrainingError` if the value of a shared option is out of its bounds."""
    for name, value in values.items():
        least = LEAST.get(name, 1e-3)
        if not least <= value < math.inf:
            raise refusal(name, f"{value} is below {least}", f"use at least {least}")
        check_most(name, value)


def check_most(name: str, value: float) -> None:
    most = MOST_SEED if name == "seed" else MOST
    if value > most:
        raise refusal(name, f"{value} is above {most}", f"use at most {most}")


def refusal(name: str, problem: str, remedy: str, *, why: str = "", code: str = "range") -> TrainingError:
    return TrainingError(f"{flag(name)} {problem}", why=why, remedy=remedy, option=name, code=code)


def flag(name: str) -> str:
    """Return the command-line option for the setting of this name."""
    return f"--{name.replace('_', '-')}"
