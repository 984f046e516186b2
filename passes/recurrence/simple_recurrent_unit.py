"""The simple recurrent unit without peephole, and the low-rank recurrence built from it.

    u = x W, g = σ(x W_f + b_f), q = σ(x W_r + b_r)          W, W_f, W_r: [r, r], side by side in `w`; b_f, b_r in `b`
    c_t = g_t ⊙ c_{t−1} + (1 − g_t) ⊙ u_t                    c_t = c_{t−1} for padding
    h_t = q_t ⊙ c_t + √3 · (1 − q_t) ⊙ x_t

    y = SRU(x W_in) W_out                                    W_in: [d, r] `w_in`, W_out: [r, d] `w_out`, zero at the start

The gates do not read c_{t−1}, so c is a linear scan (`linear_scan`). A bidirectional recurrence has two units on the same x W_in,
and W_out is [2r, d].

The linear scan computes all tokens without a loop:

    c_t = f_t ⊙ c_{t−1} + x_t          f_t in [0, 1]; f, x, c: (batch, tokens, r); c_0 = `before`: (batch, r)

Two steps compose to a step of the same form, so all prefixes take log2(tokens) rounds: after round n each token's f and c combine
up to 2^n steps. There is no division and no logarithm, so f may be 0. The gradient is a reverse scan that needs only c and f, which
is all that the forward saves.

An exported program must be correct for any number of tokens, and the number of rounds would depend on it. It computes the same c
with two triangular matrices of decays for every channel: within chunks of fixed size, and over the chunks. A decay is the
exponential of a sum of logarithms of one sign, never of a difference of two sums, so no digits cancel.

Alternatives for export: quotients of cumulative products underflow if gates are small; torch's `associative_scan` has no
translation to ONNX; ONNX's `Scan` and `Loop` run one token at a time, and a graph with them can be neither trained nor rewritten; a
fixed number of rounds limits the length.

Simple Recurrent Units for Highly Parallelizable Recurrence (EMNLP 2018); Sparse is Enough in Scaling Transformers (NeurIPS 2021),
§4.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk.modules import cond, is_exporting, without_autocast

CHUNK = 32  # tokens in a chunk: the memory of an exported program is CHUNK + tokens / CHUNK² times that of c
FEW = 2  # up to this many tokens are computed one by one; not 1, because a tracer takes no dynamic size to be 1
LEAST = 1e-30  # smallest factor whose logarithm is used


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
    """The scan; its backward is the scan of the gradient in reverse."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, x: Tensor, before: Tensor) -> Tensor:
        c = doubled(f, torch.cat([x[:, :1] + f[:, :1] * before.unsqueeze(1), x[:, 1:]], 1))
        ctx.save_for_backward(f, c, before)
        return c

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients: g_t ⊙ c_{t−1} of f_t, g_t = ∂c_t + f_{t+1} ⊙ g_{t+1} of x_t, and f_1 ⊙ g_1 of `before`."""
        f, c, before = ctx.saved_tensors
        following = torch.cat([f[:, 1:], torch.zeros_like(f[:, :1])], 1)
        g = doubled(following.flip(1), gradient.flip(1)).flip(1)
        earlier = torch.cat([before.unsqueeze(1), c[:, :-1]], 1)
        return g * earlier, g, g[:, 0] * f[:, 0]


def doubled(f: Tensor, c: Tensor) -> Tensor:
    """Return the scan of c with the factors f, from zero."""
    reach = 1  # each f and c combines up to this many steps
    while reach < c.shape[1]:
        c = torch.cat([c[:, :reach], torch.addcmul(c[:, reach:], f[:, reach:], c[:, :-reach])], 1)
        f = torch.cat([f[:, :reach], f[:, reach:] * f[:, :-reach]], 1)
        reach *= 2
    return c


# In chunks, for any number of tokens.


def in_chunks(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """Return the same c with operations that do not depend on the number of tokens.

    Chunks are gathered by index, because a view would need a multiple of their size. Positions after the last token repeat it, and
    no token reads them. There is one chunk more than needed, because a tracer would fix a size that may be 1.
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
    """Return the scan from zero along the second to last dimension; the factors are given as logarithms."""
    position = torch.arange(x.shape[-2], device=x.device)
    later = (position.unsqueeze(1) > position).unsqueeze(-1).to(x.dtype)  # (t, s, 1): token t is after token s
    decays = (logs.unsqueeze(-2) * later).cumsum(-3).exp() * (1 - later.transpose(0, 1))
    return (decays * x.unsqueeze(-3)).sum(-2)


class SimpleRecurrentUnit(nn.Module):
    """Computes h and c of x, (batch, tokens, r) each."""

    def __init__(self, rank: int, like: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(rank, 3 * rank, device=like.device, dtype=like.dtype))
        self.b = nn.Parameter(torch.empty(2 * rank, device=like.device, dtype=like.dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W such that u has the variance of x; set the biases to zero, so that both gates are half open."""
        self.w.normal_(std=len(self.w) ** -0.5)
        self.b.zero_()

    def forward(
        self, x: Tensor, before: Tensor | None = None, real: Tensor | None = None, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return h and c. `before`, (batch, r), is c of the token before the first (None: zero); `real` as in `Recurrence`.

        With `begins`, (tokens), the only row contains several sequences: one begins at each token that is True there, after the
        state in its row of `before`, (tokens, r).
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
            added, keep = added.nan_to_num(), torch.where(first, 0.0, keep).nan_to_num()  # NaN must not reach another sequence
        c = linear_scan(keep, added, x.new_zeros(x.shape[0], rank) if before is None else before.to(x.dtype))
        return use * c + math.sqrt(3) * (1 - use) * x, c

    def extra_repr(self) -> str:
        return f"r={len(self.w)}"


class Recurrence(nn.Module):
    """SRU(x W_in) W_out for x, (batch, tokens, d), in the dtype of the weights: the term added to a feed-forward.

    The units compute in float32 or better. With `bidirectional` a second unit, `backwards`, reads the tokens from last to first.
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
        """Return y, and c of every token. `real`, (batch or 1, tokens), marks tokens that are no padding; None: all.

        `begins` is that of the unit.
        """
        with without_autocast(x.device):
            weight = self.w_in
            low = x.to(weight.dtype) @ weight
            low = low.to(torch.promote_types(low.dtype, torch.float32))
            h, c = self.forwards(low, before, real, begins)
            if self.backwards is not None:
                back, _ = self.backwards(low.flip(1), None, None if real is None else real.flip(1))
                h = torch.cat([h, back.flip(1)], -1)
            return F.linear(h.to(weight.dtype), self.w_out.t()), c

    def late_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient is zero while W_out is zero."""
        return [parameter for parameter in self.parameters() if parameter is not self.w_out]

    @staticmethod
    def count(width: int, rank: int, directions: int) -> int:
        """Return its number of parameters: d·r + n·(r·d + 3·r² + 2·r) in n directions."""
        return width * rank + directions * (rank * width + 3 * rank * rank + 2 * rank)

    def extra_repr(self) -> str:
        return f"d={self.w_in.shape[0]}, r={self.w_in.shape[1]}"
