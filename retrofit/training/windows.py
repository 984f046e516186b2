"""Windows of token ids as data sets: held out, shuffled, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from retrofit.errors import TrainingError

MOST_HELD_OUT = 512  # windows
WINDOW = "window"  # the name of its number in an example


def hold_out(windows: torch.Tensor, fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on and windows held out, the latter spread evenly over the text and not more than `MOST_HELD_OUT`."""
    held_out = is_held_out(windows, fraction)
    return windows[~held_out], windows[held_out]


def is_held_out(windows: torch.Tensor, fraction: float) -> torch.Tensor:
    """Which windows are held out: (windows)."""
    count = 0 if fraction == 0 else min(max(1, round(fraction * len(windows))), MOST_HELD_OUT)
    if len(windows) - count < 1:
        raise TrainingError(
            f"the text fills {len(windows)} windows of {windows.shape[1]} tokens, too few to train and to evaluate on",
            remedy="give more text with --data, shorter windows with --length, or --eval-fraction 0",
        )
    held_out = torch.zeros(len(windows), dtype=torch.bool)
    held_out[(torch.arange(count) + 1) * len(windows) // max(count, 1) - 1] = True
    return held_out


class WindowDataset(Dataset[dict[str, Any]]):
    """A fixed sequence of windows, each with a seed of its own: runs with the same seed see the same sequence.

    With `numbers`, those of the windows in the text, the seed is that of the window and not of its place in the sequence, and its
    number comes with it.
    """

    def __init__(self, windows: torch.Tensor, order: torch.Tensor, seed: int, numbers: torch.Tensor | None = None) -> None:
        self.windows, self.order, self.seed, self.numbers = windows, order, seed, numbers

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """The window at `position` and the seed of what is hidden in it, both a function of the position alone."""
        row = self.order[position]
        if self.numbers is None:
            return {"ids": self.windows[row].long(), "seed": window_seed(self.seed, position)}
        number = int(self.numbers[row])
        return {"ids": self.windows[row].long(), "seed": window_seed(self.seed, number), WINDOW: number}


def window_seed(seed: int, place: int) -> int:
    return (seed * 2**34 + place) % 2**63


def shuffled_windows(windows: torch.Tensor, count: int, seed: int) -> WindowDataset:
    """`count` windows: all of them in a random order, then all of them in another one, and so on."""
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-count // len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(rounds)])[:count]
    return WindowDataset(windows, order, 2 * seed)


def ordered_windows(windows: torch.Tensor, seed: int) -> WindowDataset:
    """Every window once."""
    return WindowDataset(windows, torch.arange(len(windows)), 2 * seed + 1)


def numbered_windows(windows: torch.Tensor, numbers: torch.Tensor, seed: int, order: torch.Tensor | None = None) -> WindowDataset:
    """Windows by their numbers in the text, once each or in an order: what is hidden in one is the same whenever it is drawn."""
    return WindowDataset(windows, torch.arange(len(windows)) if order is None else order, seed, numbers)
