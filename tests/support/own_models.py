"""Transformers that somebody wrote themselves, and models that are none."""

from __future__ import annotations

from typing import Any

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


class Masked(nn.Module):
    """An encoder that is told which tokens are hidden, and tells its layers so in its own way (`MASKS`)."""

    def __init__(self, mask: str, width: int = 24, depth: int = 2, tokens: int = 50) -> None:
        super().__init__()
        self.mask, self.a, self.c = mask, nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.b = nn.ModuleList(MaskedBlock(width, MASKS[mask][1]) for _ in range(depth))

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        y, mask = self.a(x), MASKS[self.mask][0](hidden)
        for block in self.b:
            y = block(y, mask)
        return self.c(y)


class MaskedBlock(nn.Module):
    def __init__(self, width: int, masking: Any) -> None:
        super().__init__()
        self.m, self.n, self.o, self.p = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            nn.Linear(width, width),
            Attention(width, masking),
        )
        self.f = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = y + self.o(self.p(self.m(y), mask))
        return y + self.f(self.n(y))


class Asking(nn.Module):
    """A decoder of 5 queries, the same for all inputs: its stream starts at zeros and its layers add the queries, or at these."""

    def __init__(self, at_zero: bool, width: int = 24, depth: int = 2, tokens: int = 50) -> None:
        super().__init__()
        self.at_zero, self.a, self.places = at_zero, nn.Embedding(tokens, width), nn.Embedding(5, width)
        self.b, self.c = nn.ModuleList(AskingBlock(width) for _ in range(depth)), nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known, places = self.a(x), self.places.weight.expand(len(x), -1, -1)
        y = torch.zeros_like(places) if self.at_zero else places
        for block in self.b:
            y = block(y, known, places if self.at_zero else torch.zeros_like(places))
        return self.c(y)


class AskingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.m, self.n, self.l = (nn.LayerNorm(width) for _ in range(3))
        self.o, self.p = SelfAndOther(width), SelfAndOther(width)
        self.f = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, y: torch.Tensor, known: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        y = self.m(y + self.o(y + places, y + places, y))
        y = self.n(y + self.p(y + places, known, known))
        return self.l(y + self.f(y))


class SelfAndOther(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, asked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        given = ((self.q, asked), (self.k, keys), (self.v, values))
        q, k, v = (one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one, x in given)
        return self.out(((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    def __init__(self, width: int, masking: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.masking = masking

    def forward(self, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(y).unflatten(-1, (3, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = self.masking(q @ k.mT / q.shape[-1] ** 0.5, mask[:, None, None])
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


MASKS: dict[str, tuple[Any, Any]] = {  # what layers get, and what they do with it
    "hides": (lambda hidden: hidden, lambda scores, mask: scores.masked_fill(mask, float("-inf"))),
    "shows": (lambda hidden: ~hidden, lambda scores, mask: scores.masked_fill(~mask, float("-inf"))),
    "added": (lambda hidden: torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")), lambda scores, mask: scores + mask),
}
