"""Windows of token ids as data sets: held out, shuffled, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from retrofit.errors import TrainingError

MOST_HELD_OUT = 512  # windows


def hold_out(windows: torch.Tensor, fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on and windows held out, the latter spread evenly over the text and not more than `MOST_HELD_OUT`."""
    count = 0 if fraction == 0 else min(max(1, round(fraction * len(windows))), MOST_HELD_OUT)
    if len(windows) - count < 1:
        raise TrainingError(
            f"the text fills {len(windows)} windows of {windows.shape[1]} tokens, too few to train and to evaluate on",
            remedy="give more text with --data, shorter windows with --length, or --eval-fraction 0",
        )
    held_out = torch.zeros(len(windows), dtype=torch.bool)
    held_out[(torch.arange(count) + 1) * len(windows) // max(count, 1) - 1] = True
    return windows[~held_out], windows[held_out]


class WindowDataset(Dataset[dict[str, Any]]):
    """A fixed sequence of windows, each with a seed of its own: runs with the same seed see the same sequence."""

    def __init__(self, windows: torch.Tensor, order: torch.Tensor, seed: int) -> None:
        self.windows, self.order, self.seed = windows, order, seed

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """The window at `position` and the seed of what is hidden in it, both a function of the position alone."""
        return {"ids": self.windows[self.order[position]].long(), "seed": (self.seed * 2**34 + position) % 2**63}


def shuffled_windows(windows: torch.Tensor, count: int, seed: int) -> WindowDataset:
    """`count` windows: all of them in a random order, then all of them in another one, and so on."""
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-count // len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(rounds)])[:count]
    return WindowDataset(windows, order, 2 * seed)


def ordered_windows(windows: torch.Tensor, seed: int) -> WindowDataset:
    """Every window once."""
    return WindowDataset(windows, torch.arange(len(windows)), 2 * seed + 1)
