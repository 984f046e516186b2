"""Models of layers whose feed-forwards are written in different ways."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}


class Plain(nn.Module):
    def __init__(self, d: int, d_ff: int, act: str, bias: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, d_ff, bias=bias), nn.Linear(d_ff, d, bias=bias)
        self.act = ACTIVATIONS[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Gated(Plain):
    def __init__(self, d: int, d_ff: int, act: str, bias: bool) -> None:
        super().__init__(d, d_ff, act, bias)
        self.g = nn.Linear(d, d_ff, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.g(x)) * self.a(x))


class Fused(nn.Module):
    """Gate and up in one matrix stored (in, out), their columns side by side or taking turns."""

    def __init__(self, d: int, d_ff: int, turns: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, 2 * d_ff) / math.sqrt(d))
        self.c = nn.Parameter(torch.randn(2 * d_ff))
        self.b = nn.Linear(d_ff, d)
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.w + self.c
        gate, up = (z[..., ::2], z[..., 1::2]) if self.turns else z.chunk(2, -1)
        return self.b(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, d: int, ffn: nn.Module) -> None:
        super().__init__()
        self.m, self.n = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.f = ffn

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.m(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.f(self.n(x))


class Model(nn.Module):
    """A transformer that nobody has heard of, around the feed-forward under test."""

    def __init__(self, d: int, *ffns: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(31, d)
        self.layers = nn.ModuleList(Layer(d, ffn) for ffn in ffns)
        self.head = nn.Linear(d, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.arange(18).view(2, 9)
