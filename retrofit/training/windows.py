"""Windows of token ids as data sets: held out, shuffled, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from retrofit.errors import TrainingError
from retrofit.passbase.tokenization import positions_named

MOST_HELD_OUT = 512  # windows
WINDOW = "window"  # the name of its number in an example


def is_held_out(windows: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return which windows are held out, spread evenly over the text and not more than `MOST_HELD_OUT`: (windows)."""
    count = 0 if fraction == 0 else min(max(1, round(fraction * len(windows))), MOST_HELD_OUT)
    if len(windows) - count < 1:
        raise TrainingError(
            f"the text fills {len(windows)} windows of {windows.shape[1]} tokens, too few to train and evaluate",
            remedy="use more --data, a shorter --length, or --eval-fraction 0",
            option="data",
            code="too-short",
        )
    held_out = torch.zeros(len(windows), dtype=torch.bool)
    held_out[(torch.arange(count) + 1) * len(windows) // max(count, 1) - 1] = True
    return held_out


def require_windows(windows: torch.Tensor) -> None:
    """Raises `TrainingError` where the text fills no window."""
    if not len(windows):
        raise TrainingError(
            f"the text fills no window of {windows.shape[1]} tokens",
            remedy="use more text, or shorter windows with --length",
            option="data",
            code="too-short",
        )


def beyond_positions(model: nn.Module, length: int) -> str:
    """Return a note on windows longer than the model is made for; "" for others."""
    positions = positions_named(model)
    if positions is None or length <= positions:
        return ""
    return (
        f"a window has {length:,} tokens, and the config of {type(model).__name__} names {positions:,} positions: "
        f"it was not made for more; --length {positions} stays within"
    )


class ShuffledRounds:
    """The first `count` numbers of 0…size−1 in a random order, again in another one, and so on; one round is held at a time."""

    def __init__(self, size: int, count: int, seed: int) -> None:
        self.size, self.count, self.seed = size, count, seed
        self.begin()

    def begin(self) -> None:
        """Start with the first round."""
        self.generator = torch.Generator().manual_seed(self.seed)
        self.number, self.permutation = 0, torch.randperm(self.size, generator=self.generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> torch.Tensor:
        if not 0 <= position < self.count:
            raise IndexError(position)
        wanted, place = divmod(position, self.size)
        if wanted < self.number:
            self.begin()
        while self.number < wanted:
            self.number, self.permutation = self.number + 1, torch.randperm(self.size, generator=self.generator)
        return self.permutation[place]


class WindowDataset(Dataset[dict[str, Any]]):
    """A fixed sequence of windows, each with a seed of its own: runs with the same seed see the same sequence.

    With `numbers`, those of the windows in the text, the seed is that of the window and not of its place in the sequence, and its
    number comes with it.
    """

    def __init__(
        self, windows: torch.Tensor, order: torch.Tensor | ShuffledRounds, seed: int, numbers: torch.Tensor | None = None
    ) -> None:
        self.windows, self.order, self.seed, self.numbers = windows, order, seed, numbers

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return the window at `position` and the seed of what is hidden in it, both a function of the position alone."""
        row = self.order[position]
        if self.numbers is None:
            return {"ids": self.windows[row].long(), "seed": window_seed(self.seed, position)}
        number = int(self.numbers[row])
        return {"ids": self.windows[row].long(), "seed": window_seed(self.seed, number), WINDOW: number}


def window_seed(seed: int, place: int) -> int:
    return (seed * 2**34 + place) % 2**63


def shuffled_windows(windows: torch.Tensor, count: int, seed: int) -> WindowDataset:
    """`count` windows: all of them in a random order, then all of them in another one, and so on."""
    return WindowDataset(windows, ShuffledRounds(len(windows), count, seed), 2 * seed)


def ordered_windows(windows: torch.Tensor, seed: int) -> WindowDataset:
    """Return every window once."""
    return WindowDataset(windows, torch.arange(len(windows)), 2 * seed + 1)


def numbered_windows(
    windows: torch.Tensor, numbers: torch.Tensor, seed: int, order: torch.Tensor | ShuffledRounds | None = None
) -> WindowDataset:
    """Windows by their numbers in the text, once each or in an order: what is hidden in one is the same whenever it is drawn."""
    return WindowDataset(windows, torch.arange(len(windows)) if order is None else order, seed, numbers)
