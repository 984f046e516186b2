"""Costs of hybrids and the dense model: seconds per token, forward and training step, measured alternately; bytes, counted.

Every time is that of the whole model, not of a single module, whose weights would be in a cache by the second call. In each round
the models take turns; the result is the median over the rounds of the ratios to the dense model, because a machine that is busy for
a while slows both.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from retrofit.errors import RetrofitError
from retrofit.inputs.model_state import evaluation_mode, preserve_modes, preserve_random_state
from retrofit.inputs.probes import can_generate, ids_name, logits_of
from retrofit.passbase.tokenization import positions_named
from retrofit.process import set_variable
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training.model_comparison import duration_of, generated

LEAST, MOST = 5, 25  # rounds
SECONDS = 6.0  # no further round begins after this, if the error is small enough
EXACT = 0.01  # a sufficiently small error of a ratio
PATIENCE = 2.0  # a multiple of the seconds after which no round begins
TOKENS = 16  # decoded per round: a multiple of the strides at which some tokens cost less
HURRIED, HURRIED_TOKENS = 2, 8  # rounds, and tokens per round, if little of a limited time is left
PROMPT = 32  # tokens
FEWEST = 3  # to decode: the first token is ignored, and so is the time to the second

# Shares of a limited time at which each of these ends; the rest is for files.
COSTS, LOSSES, CHOICES, REPORT, FRONT = 0.35, 0.65, 0.72, 0.94, 0.96

Hybrid = Callable[[], AbstractContextManager[nn.Module]]
Inputs = Mapping[str, Any]


class OutOfTime(BaseException):  # a BaseException, so that code which catches failures does not catch it
    """The time for a part of the plan is over."""


class Deadline:
    """The end of a time that began now, after this number of minutes; None: no end."""

    def __init__(self, minutes: float | None) -> None:
        self.began, self.seconds = monotonic(), math.inf if minutes is None else 60 * minutes

    @property
    def is_set(self) -> bool:
        return self.seconds < math.inf

    def left(self, share: float = REPORT) -> float:
        """Return the seconds until that share of the time is over; 0 if it is."""
        return max(0.0, self.began + share * self.seconds - monotonic())

    def limit(self, seconds: float) -> AbstractContextManager[object]:
        """Raise `OutOfTime` from computations in this context once the seconds are over."""
        return contextlib.nullcontext() if seconds == math.inf else Interrupted(monotonic() + seconds)


UNINTERRUPTED = contextvars.ContextVar("uninterrupted", default=False)


def uninterrupted() -> AbstractContextManager[object]:
    """Within this context no call of torch raises `OutOfTime`: what restores a model runs to its end."""
    return set_variable(UNINTERRUPTED, True)


class Interrupted(TorchFunctionMode):
    """Within this context every call of torch raises `OutOfTime` from a given time on."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if monotonic() > self.until and not UNINTERRUPTED.get():
            raise OutOfTime
        return function(*args, **(kwargs or {}))


def seconds_of(quantity: str, model: nn.Module, window: Inputs, tokens: int = TOKENS) -> float:
    """Return the seconds for a decoded token (mean of `tokens`), a forward of the window, or a training step on it."""
    if quantity == "decode":
        return seconds_of_token(model, window, tokens)
    return seconds_of_forward(model, window) if quantity == "prefill" else seconds_of_step(model, window)


def measurable(model: nn.Module, window: Inputs) -> tuple[str, ...]:
    """Return the quantities of which times can be measured."""
    decodes = can_generate(model, window) and decoded_tokens(model) >= FEWEST
    return ("decode", "prefill", "train") if decodes else ("prefill", "train")


def decoded_tokens(model: nn.Module, tokens: int = TOKENS) -> int:
    """Return the number of tokens decoded to time `tokens` of them: at most the model's positions after a prompt of one."""
    return min(tokens + 2, positions_of(model) - 1)


def positions_of(model: nn.Module) -> int:
    return positions_named(model) or PROMPT + TOKENS + 2


@torch.no_grad()
def seconds_of_token(model: nn.Module, window: Inputs, tokens: int = TOKENS) -> float:
    """Return the mean time from one token to the next when `generate` decodes them, without the first."""
    began: list[float] = []
    count = decoded_tokens(model, tokens)
    kept = (ids_name(window), ids_name(window, decoder=True))  # of the arguments with a value per token
    length = min(PROMPT, positions_of(model) - count)
    prompt = {}
    for name, value in window.items():
        by_token = isinstance(value, Tensor) and value.dim() == 2
        if name in kept or not by_token:
            prompt[name] = value[:1, :length] if by_token else value
    with evaluation_mode(model):
        handle = model.register_forward_pre_hook(lambda module, args: began.append(time.perf_counter()))
        try:
            generated(model, prompt, count)
        finally:
            handle.remove()
    return (began[-1] - began[1]) / (len(began) - 2)


@torch.no_grad()
def seconds_of_forward(model: nn.Module, window: Inputs) -> float:
    with evaluation_mode(model):
        return duration_of(lambda: model(**window))


def seconds_of_step(model: nn.Module, window: Inputs) -> float:
    """Return the time of a forward and a backward of the window, in training mode."""
    with preserve_modes(model), preserve_random_state():
        torch.manual_seed(0)
        model.train()
        parameters = [part for part in model.parameters() if part.requires_grad]

        def step() -> None:
            with auxiliary_losses() as losses:
                outputs = logits_of(model(**window))
            flat = outputs.flatten(0, -2).float()
            loss = F.cross_entropy(flat, torch.arange(len(flat), device=flat.device) % flat.shape[-1])
            torch.autograd.grad(loss + sum(part.to(loss) for part in losses), parameters, allow_unused=True)

        return duration_of(step)


def beside(
    dense: Hybrid, others: Sequence[Hybrid], quantity: str, window: Inputs, most_seconds: float = SECONDS, hurried: bool = False
) -> tuple[float, list[float]]:
    """Return the seconds of the dense model, and the time of each other model as a share of it: medians over rounds.

    At least `LEAST` rounds; if `hurried`, at least `HURRIED`, of fewer tokens, and the shortest times instead of medians: in two
    rounds a median is a mean, which anything else that runs for a moment can double.
    """
    least, tokens = (HURRIED, HURRIED_TOKENS) if hurried else (LEAST, TOKENS)
    models = [dense, *others]
    seconds: list[list[float]] = [[] for _ in models]
    ratios: list[list[float]] = [[] for _ in others]
    began, rounds = time.monotonic(), 0
    while rounds <= least or (rounds <= MOST and goes_on(time.monotonic() - began, most_seconds * len(models), ratios)):
        turns = list(range(len(models)))
        for index in turns[rounds % len(models) :] + turns[: rounds % len(models)]:
            with models[index]() as model:
                taken = seconds_of(quantity, model, window, tokens)
            if rounds:  # the first round is a warm-up
                seconds[index].append(taken)
        ratios = [[own / reference for own, reference in zip(times, seconds[0], strict=True)] for times in seconds[1:]]
        rounds += 1
    if hurried:
        shortest = [min(times) for times in seconds]
        return shortest[0], [own / shortest[0] for own in shortest[1:]]
    return statistics.median(seconds[0]), [statistics.median(times) for times in ratios]


def goes_on(taken: float, given: float, ratios: Sequence[Sequence[float]]) -> bool:
    """Return whether to start another round: there is time left, or some patience and an inexact ratio."""
    return taken < given or (taken < PATIENCE * given and max(map(error_of_median, ratios)) > EXACT)


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of the median of values that are normal except for some outliers."""
    centre = statistics.median(values)
    spread = 1.4826 * statistics.median([abs(value - centre) for value in values])
    return 1.2533 * spread / math.sqrt(len(values))


def trains(model: nn.Module, window: Inputs) -> bool:
    """Return whether a training step of the model can be timed."""
    with contextlib.suppress(RetrofitError, RuntimeError, TypeError, IndexError):
        seconds_of_step(model, window)
        return True
    return False
