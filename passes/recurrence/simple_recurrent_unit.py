"""The simple recurrent unit without peephole, and the low-rank recurrence made of it.

    u = x W, g = σ(x W_f + b_f), q = σ(x W_r + b_r)          W, W_f, W_r: [r, r], side by side in `w`; b_f, b_r in `b`
    c_t = g_t ⊙ c_{t−1} + (1 − g_t) ⊙ u_t                    of a token that is padding c_t = c_{t−1}
    h_t = q_t ⊙ c_t + √3 · (1 − q_t) ⊙ x_t

    y = SRU(x W_in) W_out                                    W_in: [d, r] `w_in`, W_out: [r, d] `w_out`, zero at the start

Nothing of c_{t−1} enters the gates, so c is a linear scan (`linear_scan.py`). Read in both directions there are two units on the
same x W_in, and W_out is [2r, d].

Simple Recurrent Units for Highly Parallelizable Recurrence (EMNLP 2018); Sparse is Enough in Scaling Transformers (NeurIPS 2021),
§4.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from retrofit.passes.recurrence.linear_scan import linear_scan


class SimpleRecurrentUnit(nn.Module):
    """h and c of x: (batch, tokens, r) each."""

    def __init__(self, rank: int, like: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(rank, 3 * rank, device=like.device, dtype=like.dtype))
        self.b = nn.Parameter(torch.empty(2 * rank, device=like.device, dtype=like.dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Noise under which u has the variance of x; both gates are half open."""
        self.w.normal_(std=len(self.w) ** -0.5)
        self.b.zero_()

    def forward(self, x: Tensor, before: Tensor | None = None, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`before`, (batch, r), is c of the token before the first, zero where there is none; `real` as in `Recurrence`."""
        rank = x.shape[-1]
        u, gates = (x @ self.w.to(x.dtype)).split([rank, 2 * rank], -1)
        keep, use = (gates + self.b.to(x.dtype)).sigmoid().chunk(2, -1)
        added = (1 - keep) * u
        if real is not None:
            kept = real.unsqueeze(-1)
            keep, added = torch.where(kept, keep, 1.0), torch.where(kept, added, 0.0)
        c = linear_scan(keep, added, x.new_zeros(x.shape[0], rank) if before is None else before.to(x.dtype))
        return use * c + math.sqrt(3) * (1 - use) * x, c

    def extra_repr(self) -> str:
        return f"r={len(self.w)}"


class Recurrence(nn.Module):
    """x, (batch, tokens, d), through a unit of rank r and back: what is added to a feed-forward, in the dtype of the weights.

    The units compute in float32 whatever precision the rest is in. With `bidirectional` a second one, `backwards`, reads the
    tokens from the last to the first.
    """

    def __init__(self, width: int, rank: int, bidirectional: bool, like: Tensor) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(width, rank, device=like.device, dtype=like.dtype))
        self.w_out = nn.Parameter(torch.empty(rank * (1 + bidirectional), width, device=like.device, dtype=like.dtype))
        self.forwards = SimpleRecurrentUnit(rank, like)
        self.backwards = SimpleRecurrentUnit(rank, like) if bidirectional else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """W_out is zero, so that the recurrence adds nothing; W_in is noise under which x W_in has the variance of x."""
        self.w_in.normal_(std=len(self.w_in) ** -0.5)
        self.w_out.zero_()

    def forward(self, x: Tensor, before: Tensor | None = None, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """y, and c of every token. `real`, (batch or 1, tokens), says which tokens are no padding; None: all."""
        with maybe_autocast(device_type=x.device.type, enabled=False):
            weight = self.w_in
            low = x.to(weight.dtype) @ weight
            low = low.to(torch.promote_types(low.dtype, torch.float32))
            h, c = self.forwards(low, before, real)
            if self.backwards is not None:
                back, _ = self.backwards(low.flip(1), None, None if real is None else real.flip(1))
                h = torch.cat([h, back.flip(1)], -1)
            return F.linear(h.to(weight.dtype), self.w_out.t()), c

    def late_parameters(self) -> list[nn.Parameter]:
        """Those whose gradient is zero until W_out has left zero."""
        return [one for one in self.parameters() if one is not self.w_out]

    @staticmethod
    def count(width: int, rank: int, directions: int) -> int:
        """Its number of parameters: d·r + n·(r·d + 3·r² + 2·r) in n directions."""
        return width * rank + directions * (rank * width + 3 * rank * rank + 2 * rank)

    def extra_repr(self) -> str:
        return f"d={self.w_in.shape[0]}, r={self.w_in.shape[1]}"
