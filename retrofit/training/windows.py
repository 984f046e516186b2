"""Windows of token ids as data sets: held out, shuffled, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from retrofit.errors import TrainingError
from retrofit.passbase.tokenization import positions_named

MOST_HELD_OUT = 512  # windows
WINDOW = "window"  # the key of its number in an example


def is_held_out(windows: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the mask of held-out windows, (windows), spread evenly over the text, at most `MOST_HELD_OUT`."""
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
    """Raises `TrainingError` if the text is too short for a window."""
    if not len(windows):
        raise TrainingError(
            f"the text fills no window of {windows.shape[1]} tokens",
            remedy="use more text, or shorter windows with --length",
            option="data",
            code="too-short",
        )


def beyond_positions(model: nn.Module, length: int) -> str:
    """Return a note on windows longer than the model was made for; "" for others."""
    positions = positions_named(model)
    if positions is None or length <= positions:
        return ""
    return (
        f"a window has {length:,} tokens, and the config of {type(model).__name__} names {positions:,} positions: "
        f"it was not made for more; --length {positions} stays within"
    )


class ShuffledRounds:
    """The first `count` numbers of 0…size−1 in random order, round after round; one round is in memory at a time."""

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
    """A fixed sequence of windows with a seed each: runs with the same seed see the same sequence.

    With `numbers`, those of the windows in the text, the seed depends on the window and not on its place in the sequence, and the
    number is part of the example.
    """

    def __init__(
        self, windows: torch.Tensor, order: torch.Tensor | ShuffledRounds, seed: int, numbers: torch.Tensor | None = None
    ) -> None:
        self.windows, self.order, self.seed, self.numbers = windows, order, seed, numbers

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return the window at `position` and the seed of its hidden tokens; both depend on the position alone."""
        row = self.order[position]
        if self.numbers is None:
            return {"ids": self.windows[row].long(), "seed": window_seed(self.seed, position)}
        number = int(self.numbers[row])
        return {"ids": self.windows[row].long(), "seed": window_seed(self.seed, number), WINDOW: number}


def window_seed(seed: int, place: int) -> int:
    return (seed * 2**34 + place) % 2**63


def shuffled_windows(windows: torch.Tensor, count: int, seed: int) -> WindowDataset:
    """Return `count` windows: all of them in a random order, then all of them in another one, and so on."""
    return WindowDataset(windows, ShuffledRounds(len(windows), count, seed), 2 * seed)


def ordered_windows(windows: torch.Tensor, seed: int) -> WindowDataset:
    """Return every window once, in order."""
    return WindowDataset(windows, torch.arange(len(windows)), 2 * seed + 1)


def numbered_windows(
    windows: torch.Tensor, numbers: torch.Tensor, seed: int, order: torch.Tensor | ShuffledRounds | None = None
) -> WindowDataset:
    """Return windows by their numbers in the text, once each or in an order; the hidden tokens of a window are always the same."""
    return WindowDataset(windows, torch.arange(len(windows)) if order is None else order, seed, numbers)
