"""What an approximate rewrite costs, in the user's terms: loss before and after on text held back, and what to do about it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.planning.planning_data import examples_of
from retrofit.planning.quality import MeasuredWindows

HELD_BACK = 8  # windows at most, and one in so many: the rest is fitted on
FEWEST = 4  # windows of which one is held back
MOST_NUMBERS = 2**26  # dense predictions that are kept: 256 MiB in float32
TRAIN_FROM = 0.1  # nats a token, of loss or of KL, or relative squared error: from there on a model is to be trained before use
SURE = 2.0  # standard errors that a change has to exceed


def hold_back(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of token ids in two parts: to fit on, and held back, spread over the text.

    Of fewer than `FEWEST` both parts are all.
    """
    if len(windows) < FEWEST:
        return windows, windows[:HELD_BACK]
    count = max(1, min(HELD_BACK, len(windows) // HELD_BACK))
    held = torch.zeros(len(windows), dtype=torch.bool)
    held[[(index + 1) * len(windows) // count - 1 for index in range(count)]] = True
    return windows[~held], windows[held]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a rewrite cost on some windows; a loss is in nats a token, None where the model computes none."""

    text: str  # in words: "held-out" or what else the windows are
    before: float | None
    after: float | None
    distance: float  # KL divergence from the dense predictions in nats a token, or the relative squared error of the outputs
    noise: float | None  # the standard error of what was added, None of a single window

    @property
    def added(self) -> float:
        """The loss added; where there is none, the distance of the outputs."""
        return self.distance if self.before is None or self.after is None else self.after - self.before

    @property
    def within_noise(self) -> bool:
        """Whether what was added is no more than windows of text differ by chance."""
        return self.noise is not None and abs(self.added) <= SURE * self.noise and not self.needs_training

    @property
    def needs_training(self) -> bool:
        """Whether as much was added, or predictions are as far from the dense ones, that it should be trained before use."""
        return max(self.added, self.distance) >= TRAIN_FROM

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"outputs on {self.text} text: relative squared error {self.distance:.3f}: {self.advice}"
        change = f"{self.before:.2f} → {self.after:.2f}, {self.added:+.2f} nats (KL {self.distance:.2f})"
        return f"{self.text} loss {change}: {self.advice}"

    @property
    def advice(self) -> str:
        """What to do about it."""
        if self.needs_training:
            return "train it before use"
        return "within noise" if self.within_noise else "usable as it is, training gets some of it back"


@dataclasses.dataclass(frozen=True)
class DenseOutputs:
    """Windows of text, and what the dense model makes of them: what a rewritten one is held against."""

    text: str
    windows: MeasuredWindows

    @classmethod
    def of(cls, model: nn.Module, ids: Tensor, tokenizer: Any = None, *, text: str = "held-out") -> DenseOutputs:
        """The outputs of the dense `model` for as many of the windows as there is room for; raises `RetrofitError` for none."""
        example, shift, _ = examples_of(model, ids.long(), tokenizer, None)
        device = next(model.parameters()).device
        found: list[Any] = []
        room = MOST_NUMBERS
        for row in range(len(ids)):
            batch = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in example(row).items()}
            measured = MeasuredWindows.of(model, [batch], (), shift)
            room -= measured.batches[0].dense.numel()
            if found and room < 0:
                break
            found.append(measured)
        if not found:
            raise RetrofitError("no window of text was held back", remedy="give more text")
        whole = dataclasses.replace(found[0], batches=tuple(one.batches[0] for one in found))
        return cls(text, whole)

    def verdict(self, model: nn.Module) -> Verdict:
        """What the rewritten `model` lost on the same windows."""
        each = [dataclasses.replace(self.windows, batches=(batch,)) for batch in self.windows.batches]
        before = [one.mean_loss([one.batches[0].dense]) for one in each]
        found = [one.measure(model) for one in each]
        distance = statistics.fmean(one.distance for one in found)
        losses = [(was, one.loss) for was, one in zip(before, found, strict=True) if was is not None and one.loss is not None]
        if len(losses) < len(found):
            return Verdict(self.text, None, None, distance, standard_error([one.distance for one in found]))
        added = standard_error([now - was for was, now in losses])
        return Verdict(
            self.text, statistics.fmean(was for was, _ in losses), statistics.fmean(now for _, now in losses), distance, added
        )


def standard_error(values: Sequence[float]) -> float | None:
    """That of their mean; None of a single one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
