"""Transformers that somebody wrote themselves, and models that are none."""

from __future__ import annotations

import torch
from torch import nn


class Own(nn.Module):
    """A transformer that nobody has heard of, its parts named after nothing."""

    def __init__(self, width: int = 24, depth: int = 3, tokens: int = 50) -> None:
        super().__init__()
        self.a = nn.Embedding(tokens, width)
        self.b = nn.ModuleList(Block(width) for _ in range(depth))
        self.c = nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for block in self.b:
            y = block(y)
        return self.c(y)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.m, self.n = nn.LayerNorm(width), nn.LayerNorm(width)
        self.o, self.p = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q, self.r = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        one, two, three = self.o(self.m(y)).chunk(3, -1)
        weights = (one @ two.mT / one.shape[-1] ** 0.5).softmax(-1)
        y = y + self.p(weights @ three)
        return y + self.r(torch.relu(self.q(self.n(y))))
