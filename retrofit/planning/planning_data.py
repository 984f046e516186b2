"""The text of a plan in three parts: windows to fit passes on, windows to measure hybrids on, windows held out for the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import PlanningError, RetrofitError, SpecError
from retrofit.inputs.calibration import Calibration, batched, length_of, windows_of_batch
from retrofit.inputs.example_inputs import device_of
from retrofit.passbase.calibration import calibration_from, calibration_windows, named_batch, require_token_ids, tokenize_texts
from retrofit.passbase.tokenization import codec_for
from retrofit.training.objectives import Collator, add_loss, objective_for
from retrofit.training.teaching import short_hash
from retrofit.training.windows import WINDOW, numbered_windows

FIT_TOKENS, MEASURED_TOKENS, HELD_OUT_TOKENS = 16384, 2048, 4096
LARGE = 20_000_000  # parameters, from which on half as many tokens are fitted and measured on
ARITHMETIC = {"cpu": 2e10}  # operations a second that a limited time is divided by, by the type of device
ACCELERATED = 2e13  # on any other
SHARE = 0.02  # of a limited time that one forward of all windows measured may take
PART = 5  # one window in so many at most is measured on, and as many are held out
FEWEST = 5  # windows

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PlanningData:
    """Batches as the model takes them; those that are measured have labels where a loss can be computed."""

    fitted: Calibration
    measured: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    shift: int | None  # of the labels, None where there is no loss
    no_loss: str  # why there is none
    fingerprint: str

    @property
    def window(self) -> dict[str, Any]:
        """The first window measured, without labels: what is timed."""
        first = self.measured[0]
        return {name: value[:1] if isinstance(value, Tensor) else value for name, value in first.items() if name != "labels"}


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """How many tokens are fitted on, measured on and held out, at most."""

    fitted: int
    measured: int
    held_out: int

    @classmethod
    def of(cls, model: nn.Module, tokens: int | None = None, seconds: float = math.inf) -> TokenCounts:
        """What suits a model; `tokens` are fitted on where given. Of little time, `seconds`, fewer are: by the model's size."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        share = 1 if parameters < LARGE else 2
        measured, affordable = MEASURED_TOKENS // share, math.inf
        if seconds < math.inf:
            affordable = SHARE * seconds * ARITHMETIC.get(device_of(model).type, ACCELERATED) / (2 * max(1, parameters))
        return cls(
            tokens or int(min(FIT_TOKENS // share, 2 * affordable)),
            int(min(measured, affordable)),
            int(min(HELD_OUT_TOKENS, 2 * affordable)),
        )


def planning_data(
    model: nn.Module,
    given: Any,
    tokenizer: Any = None,
    counts: TokenCounts | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> PlanningData:
    """`given`, texts, token ids (windows, length) or batches, in three parts of `counts` tokens. `inputs` by argument name are
    examples, derived from the model where not given.

    Raises `PlanningError` where it is too short, `SpecError` where it is nothing the model takes.
    """
    counts = counts or TokenCounts.of(model)
    if isinstance(given, str) or (isinstance(given, (list, tuple)) and given and all(isinstance(one, str) for one in given)):
        given = windows_of_texts(model, [given] if isinstance(given, str) else given, tokenizer)
    if isinstance(given, Tensor) and not given.is_floating_point():
        given = given.detach().cpu().long()
        require_token_ids(model, given)
        length = given.shape[1]
        rows = split(len(given), counts.measured // length, counts.held_out // length, counts.fitted // length)
        calibration = calibration_from(model, given[rows[0]], inputs)
        example, shift, no_loss = examples_of(model, given, tokenizer, inputs)
        parts = [[example(row) for row in some] for some in rows[1:]]
        fingerprint = short_hash(given.contiguous().numpy().tobytes() + str(rows).encode())
    else:
        windows = [window for batch in calibration_from(model, given, inputs).batches for window in windows_of_batch(batch)]
        length = max(1, max(length_of(window) for window in windows))
        rows = split(len(windows), counts.measured // length, counts.held_out // length, counts.fitted // length)
        calibration = Calibration(tuple(batched(windows[row] for row in rows[0])))
        parts, shift, no_loss = [[windows[row] for row in some] for some in rows[1:]], None, "the text came as batches"
        values = [value for value in tree_leaves(windows) if isinstance(value, Tensor)]
        fingerprint = short_hash(b"".join(value.contiguous().cpu().numpy().tobytes() for value in values) + str(rows).encode())
    device = device_of(model)
    found = [tuple(moved(batch, device) for batch in batched(part)) for part in parts]
    return PlanningData(calibration, found[0], found[1], shift, no_loss, fingerprint)


def windows_of_texts(model: nn.Module, texts: Sequence[str], tokenizer: Any) -> Tensor:
    """Texts as windows of token ids; raises `PlanningError` where they do not fill one."""
    try:
        return tokenize_texts(model, texts) if tokenizer is None else calibration_windows(model, texts, tokenizer)
    except SpecError as error:
        raise PlanningError(error.what, why=error.why, remedy=error.remedies, **error.labels) from error


def split(count: int, measured: int, held_out: int, fitted: int) -> tuple[list[int], list[int], list[int]]:
    """The numbers of the windows to fit on, to measure on and to hold out, each at even distances."""
    if count < FEWEST:
        raise PlanningError(
            f"the text fills only {count} windows",
            why="windows are needed for calibration, for measuring and for the report",
            remedy=f"use text for at least {FEWEST} windows, better a few hundred",
            code="too-short",
        )
    most = max(1, count // PART)
    numbers = list(range(count))
    reported = evenly(numbers, min(max(1, held_out), most))
    left = [number for number in numbers if number not in set(reported)]
    seen = evenly(left, min(max(1, measured), most))
    rest = [number for number in left if number not in set(seen)]
    return evenly(rest, max(1, fitted)), seen, reported


def evenly(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of the numbers, at even distances."""
    count = min(most, len(numbers))
    return [numbers[(2 * index + 1) * len(numbers) // (2 * count)] for index in range(count)]


def examples_of(
    model: nn.Module, windows: Tensor, tokenizer: Any, inputs: Mapping[str, Any] | None
) -> tuple[Callable[[int], dict[str, Any]], int | None, str]:
    """A window as the model takes it, by its number, with labels where it computes a loss; by how much outputs precede them, or
    why there is no loss."""
    try:
        objective = objective_for(add_loss(model), codec_for(model, tokenizer), windows[0].long())
    except RetrofitError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        return lambda row: named_batch(model, windows[row : row + 1], inputs), None, why
    data, collator = numbered_windows(windows, torch.arange(len(windows)), seed=0), Collator(objective)

    def example(row: int) -> dict[str, Any]:
        batch: dict[str, Any] = {name: value for name, value in collator([data[row]]).items() if name != WINDOW}
        return named_batch(model, batch.pop("input_ids"), inputs) | batch

    return example, objective.shift, ""


def moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
