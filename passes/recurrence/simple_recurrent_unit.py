"""The simple recurrent unit without peephole, and the low-rank recurrence made of it.

    u = x W, g = σ(x W_f + b_f), q = σ(x W_r + b_r)          W, W_f, W_r: [r, r], side by side in `w`; b_f, b_r in `b`
    c_t = g_t ⊙ c_{t−1} + (1 − g_t) ⊙ u_t                    of a token that is padding c_t = c_{t−1}
    h_t = q_t ⊙ c_t + √3 · (1 − q_t) ⊙ x_t

    y = SRU(x W_in) W_out                                    W_in: [d, r] `w_in`, W_out: [r, d] `w_out`, zero at the start

Nothing of c_{t−1} enters the gates, so c is a linear scan (`linear_scan`). Read in both directions there are two units on the same
x W_in, and W_out is [2r, d].

The linear scan goes over the tokens without a loop over them:

    c_t = f_t ⊙ c_{t−1} + x_t          f_t in [0, 1]; f, x, c: (batch, tokens, r); c_0 = `before`: (batch, r)

Composing two steps gives a step of the same form, so all prefixes take log2(tokens) rounds: after round n the product of up to 2^n
factors f and what their tokens added. There is no division and no logarithm, so f may be 0. The gradient is such a scan backwards
over c and f alone, which is all that is kept of the forward.

A program that is exported has to hold for any number of tokens, and the number of rounds would depend on it. There the same c comes
from two triangular matrices of decays for every channel: within chunks of fixed size, and over the chunks. A decay is the
exponential of a sum of logarithms of one sign, never of a difference of two sums, so a small one loses no digits of a large one.

Alternatives for export: divided cumulative products underflow where gates are small; torch's `associative_scan` has no
translation to ONNX; ONNX's `Scan` and `Loop` run one token at a time, and such a graph neither trains nor is rewritten; a fixed
number of rounds limits the length.

Simple Recurrent Units for Highly Parallelizable Recurrence (EMNLP 2018); Sparse is Enough in Scaling Transformers (NeurIPS 2021),
§4.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from retrofit.sdk.modules import cond, is_exporting

CHUNK = 32  # tokens in a chunk: the memory of an exported program is CHUNK + tokens / CHUNK² times that of c
FEW = 2  # tokens that are computed one after the other; a tracer takes no size for one, so a program cannot ask for that alone
LEAST = 1e-30  # of a factor that has a logarithm


def linear_scan(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """Return c of every token: (batch, tokens, r)."""
    return cond(f.shape[1] <= FEW, few_states, all_states, f, x, before, size=x.shape)


def few_states(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """Return c of one token or two."""
    first = f[:, :1] * before.unsqueeze(1) + x[:, :1]
    return torch.cat([first, f[:, 1:] * first + x[:, 1:]], 1)


def all_states(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """Return c of any number of tokens."""
    if is_exporting():
        return in_chunks(f, x, before)
    return Doubling.apply(f, x, before)  # type: ignore[no-any-return, no-untyped-call]


# In log2(tokens) rounds.


class Doubling(torch.autograd.Function):
    """The scan, and backwards the scan of its gradient."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, x: Tensor, before: Tensor) -> Tensor:
        c = doubled(f, torch.cat([x[:, :1] + f[:, :1] * before.unsqueeze(1), x[:, 1:]], 1))
        ctx.save_for_backward(f, c, before)
        return c

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g_t = ∂c_t + f_{t+1} ⊙ g_{t+1} is that of x_t, and g_t ⊙ c_{t−1} that of f_t."""
        f, c, before = ctx.saved_tensors
        following = torch.cat([f[:, 1:], torch.zeros_like(f[:, :1])], 1)
        g = doubled(following.flip(1), gradient.flip(1)).flip(1)
        earlier = torch.cat([before.unsqueeze(1), c[:, :-1]], 1)
        return g * earlier, g, g[:, 0] * f[:, 0]


def doubled(f: Tensor, c: Tensor) -> Tensor:
    """Return the scan of c from zero."""
    reach = 1  # of the tokens before each, so many are in its f and c
    while reach < c.shape[1]:
        c = torch.cat([c[:, :reach], torch.addcmul(c[:, reach:], f[:, reach:], c[:, :-reach])], 1)
        f = torch.cat([f[:, :reach], f[:, reach:] * f[:, :-reach]], 1)
        reach *= 2
    return c


# In chunks, for any number of tokens.


def in_chunks(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """Return the same c by operations that are the same for every number of tokens.

    Chunks are selected by index: a view would have to divide the tokens. Places behind the last token hold it once more, and no
    token reads them. One chunk more than needed, as a tracer takes a size for fixed that may be one.
    """
    tokens = x.shape[1]
    inside = torch.arange(CHUNK, device=x.device)
    chunks = torch.arange(tokens // CHUNK + 2, device=x.device) * CHUNK
    places = (chunks.unsqueeze(1) + inside).clamp(max=tokens - 1)
    logs, x = f.clamp_min(LEAST).log()[:, places], x[:, places]  # (batch, chunks, CHUNK, r)
    inner, total = triangular(logs, x), logs.cumsum(2)
    first = before.unsqueeze(1)  # c before the first chunk
    states = triangular(torch.cat([torch.zeros_like(first), total[:, :, -1]], 1), torch.cat([first, inner[:, :, -1]], 1))
    c = inner + total.exp() * states[:, :-1].unsqueeze(2)
    token = torch.arange(tokens, device=x.device)
    return c[:, token // CHUNK, token % CHUNK]


def triangular(logs: Tensor, x: Tensor) -> Tensor:
    """Return the scan from zero along the last dimension but one, of factors given by their logarithms."""
    position = torch.arange(x.shape[-2], device=x.device)
    later = (position.unsqueeze(1) > position).unsqueeze(-1).to(x.dtype)  # (t, s, 1): token t is after token s
    decays = (logs.unsqueeze(-2) * later).cumsum(-3).exp() * (1 - later.transpose(0, 1))
    return (decays * x.unsqueeze(-3)).sum(-2)


class SimpleRecurrentUnit(nn.Module):
    """h and c of x: (batch, tokens, r) each."""

    def __init__(self, rank: int, like: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(rank, 3 * rank, device=like.device, dtype=like.dtype))
        self.b = nn.Parameter(torch.empty(2 * rank, device=like.device, dtype=like.dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw noise under which u has the variance of x; both gates are half open."""
        self.w.normal_(std=len(self.w) ** -0.5)
        self.b.zero_()

    def forward(
        self, x: Tensor, before: Tensor | None = None, real: Tensor | None = None, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`before`, (batch, r), is c of the token before the first, zero where there is none; `real` as in `Recurrence`.

        With `begins`, (tokens), the one row holds several sequences: each begins there, after its own of `before`, (tokens, r).
        """
        rank = x.shape[-1]
        u, gates = (x @ self.w.to(x.dtype)).split([rank, 2 * rank], -1)
        keep, use = (gates + self.b.to(x.dtype)).sigmoid().chunk(2, -1)
        added = (1 - keep) * u
        if real is not None:
            kept = real.unsqueeze(-1)
            keep, added = torch.where(kept, keep, 1.0), torch.where(kept, added, 0.0)
        if begins is not None and before is not None:
            first = begins.unsqueeze(-1)
            added, before = added + torch.where(first, keep * before.to(x.dtype), 0.0), None
            added, keep = added.nan_to_num(), torch.where(first, 0.0, keep).nan_to_num()  # what is none stays in its sequence
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
        """Set W_out to zero, so that the recurrence adds nothing; draw W_in so that x W_in has the variance of x."""
        self.w_in.normal_(std=len(self.w_in) ** -0.5)
        self.w_out.zero_()

    def forward(
        self, x: Tensor, before: Tensor | None = None, real: Tensor | None = None, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """y, and c of every token. `real`, (batch or 1, tokens): those that are no padding; None: all. `begins` as in the unit."""
        with maybe_autocast(device_type=x.device.type, enabled=False):
            weight = self.w_in
            low = x.to(weight.dtype) @ weight
            low = low.to(torch.promote_types(low.dtype, torch.float32))
            h, c = self.forwards(low, before, real, begins)
            if self.backwards is not None:
                back, _ = self.backwards(low.flip(1), None, None if real is None else real.flip(1))
                h = torch.cat([h, back.flip(1)], -1)
            return F.linear(h.to(weight.dtype), self.w_out.t()), c

    def late_parameters(self) -> list[nn.Parameter]:
        """Return those whose gradient is zero until W_out has left zero."""
        return [parameter for parameter in self.parameters() if parameter is not self.w_out]

    @staticmethod
    def count(width: int, rank: int, directions: int) -> int:
        """Return its number of parameters: d·r + n·(r·d + 3·r² + 2·r) in n directions."""
        return width * rank + directions * (rank * width + 3 * rank * rank + 2 * rank)

    def extra_repr(self) -> str:
        return f"d={self.w_in.shape[0]}, r={self.w_in.shape[1]}"
