"""The text of a plan in three parts: windows to fit passes on, windows to measure hybrids on, held-out windows for the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import PlanningError, RetrofitError, SpecError
from retrofit.inputs.calibration import Calibration, batched, length_of
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.probes import run
from retrofit.passbase.calibration import calibration_from, calibration_windows, named_batch, require_token_ids, tokenize_texts
from retrofit.passbase.tokenization import codec_for
from retrofit.training.model_comparison import duration_of
from retrofit.training.objectives import Collator, add_loss, objective_for
from retrofit.training.teaching import short_hash
from retrofit.training.windows import WINDOW, numbered_windows

FIT_TOKENS, MEASURED_TOKENS, HELD_OUT_TOKENS = 16384, 2048, 4096
LARGE = 20_000_000  # parameters; larger models are fitted and measured on half as many tokens
SHARE = 0.005  # of a limited time, for one forward of all measured windows: candidates take about sixty
TWICE = 0.5  # seconds; a faster forward is timed a second time, because the first may have been slow by chance
PART = 5  # at most one window in PART is measured on, and as many are held out
FEWEST = 5  # windows

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PlanningData:
    """Batches in the form that the model takes; the measured ones have labels if a loss can be computed."""

    fitted: Calibration
    measured: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    shift: int | None  # of the labels; None if there is no loss
    no_loss: str  # why there is none
    fingerprint: str
    counts: TokenCounts

    @property
    def window(self) -> dict[str, Any]:
        """Return the first measured window, without labels: the input for timing."""
        first = self.measured[0]
        return {name: value[:1] if isinstance(value, Tensor) else value for name, value in first.items() if name != "labels"}


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """The most tokens to fit on, to measure on and to hold out."""

    fitted: int
    measured: int
    held_out: int

    @classmethod
    def of(cls, model: nn.Module, tokens: int | None = None, affordable: float = math.inf) -> TokenCounts:
        """Return the numbers for a model's size, with at most `affordable` tokens to measure on; `tokens`, if given, to fit on."""
        share = 1 if sum(parameter.numel() for parameter in model.parameters()) < LARGE else 2
        return cls(
            tokens or int(min(FIT_TOKENS // share, 2 * affordable)),
            int(min(MEASURED_TOKENS // share, affordable)),
            int(min(HELD_OUT_TOKENS, 2 * affordable)),
        )

    @classmethod
    def in_time(cls, model: nn.Module, tokens: int | None, seconds: float, window: Batch) -> TokenCounts:
        """Return the numbers for a plan within `seconds`, by the time that the model takes for a window."""
        if seconds == math.inf:
            return cls.of(model, tokens)
        return cls.of(model, tokens, SHARE * seconds * length_of(dict(window)) / seconds_of_run(model, window))


def seconds_of_run(model: nn.Module, window: Batch) -> float:
    """Return the seconds of a forward."""
    window = moved(window, device_of(model))
    with evaluation_mode(model), torch.no_grad():
        first = duration_of(lambda: run(model, window))
        return min(first, duration_of(lambda: run(model, window))) if first < TWICE else first


def planning_data(
    model: nn.Module,
    given: Any,
    tokenizer: Any = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    counts: TokenCounts | None = None,
    tokens: int | None = None,
    seconds: float = math.inf,
) -> PlanningData:
    """Return `given`, texts, token ids (windows, length) or batches, in three parts of `counts` tokens.

    By default these depend on the model, the plan's `seconds`, and `tokens` to fit on. `inputs` by argument name are examples,
    inferred from the model if not given. Raises `PlanningError` if the text is too short, `SpecError` if the model does not accept
    it.
    """
    if isinstance(given, str) or (isinstance(given, (list, tuple)) and given and all(isinstance(text, str) for text in given)):
        given = windows_of_texts(model, [given] if isinstance(given, str) else given, tokenizer)
    if isinstance(given, Tensor) and not given.is_floating_point():
        given = given.detach().cpu().long()
        require_token_ids(model, given)
        length = given.shape[1]
        counts = counts or TokenCounts.in_time(model, tokens, seconds, named_batch(model, given[:1], inputs))
        rows = split(len(given), counts.measured // length, counts.held_out // length, counts.fitted // length)
        calibration = calibration_from(model, given[rows[0]], inputs)
        example, shift, no_loss = examples_of(model, given, tokenizer, inputs)
        parts = [[example(row) for row in part_rows] for part_rows in rows[1:]]
        fingerprint = short_hash(given.contiguous().numpy().tobytes() + str(rows).encode())
    else:
        calibration = calibration_from(model, given, inputs)
        windows = list(calibration.windows())
        length = max(1, max(length_of(window) for window in windows))
        counts = counts or TokenCounts.in_time(model, tokens, seconds, windows[0])
        rows = split(len(windows), counts.measured // length, counts.held_out // length, counts.fitted // length)
        calibration = calibration.of(windows[row] for row in rows[0])
        parts, shift, no_loss = [[windows[row] for row in part_rows] for part_rows in rows[1:]], None, "the text came as batches"
        values = [value for value in tree_leaves(windows) if isinstance(value, Tensor)]
        fingerprint = short_hash(b"".join(value.contiguous().cpu().numpy().tobytes() for value in values) + str(rows).encode())
    device = device_of(model)
    found = [tuple(moved(batch, device) for batch in batched(part)) for part in parts]
    return PlanningData(calibration, found[0], found[1], shift, no_loss, fingerprint, counts)


def windows_of_texts(model: nn.Module, texts: Sequence[str], tokenizer: Any) -> Tensor:
    """Return texts as windows of token ids. Raises `PlanningError` if they do not fill one."""
    try:
        return tokenize_texts(model, texts) if tokenizer is None else calibration_windows(model, texts, tokenizer)
    except SpecError as error:
        raise PlanningError(error.what, why=error.why, remedy=error.remedies, **error.labels) from error


def split(count: int, measured: int, held_out: int, fitted: int) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of the windows to fit on, to measure on and to hold out, each evenly spaced."""
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
    """Return at most `most` of the numbers, evenly spaced."""
    count = min(most, len(numbers))
    return [numbers[(2 * index + 1) * len(numbers) // (2 * count)] for index in range(count)]


def examples_of(
    model: nn.Module, windows: Tensor, tokenizer: Any, inputs: Mapping[str, Any] | None
) -> tuple[Callable[[int], dict[str, Any]], int | None, str]:
    """Return a function from a window's number to a batch, with labels if there is a loss; their shift; why there is no loss."""
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
