"""The start of a multiplicative head on calibration data: the factors whose predictions are nearest to the dense head's.

First the squared error of the logits, Σ_t w_t ‖x_t (W − Ŵ)‖² = tr (W − Ŵ)ᵀ A (W − Ŵ) with A = Σ_t w_t x_t x_tᵀ, is lowered by
alternating least squares. Given E, D solves a linear system of d unknowns for each module, with the same matrix for all of them,
and so does E given D for each place in a module:

    (A ∘ E Eᵀ) D = R,  R[i,s] = Σ_m E[i,m] (A W)[i, s·M+m]              (A ∘ D Dᵀ) E = R,  R[i,m] = Σ_s D[i,s] (A W)[i, s·M+m]

W is taken less its mean over the vocabulary, which no probability depends on. Then Adam lowers

    Σ_t w_t KL(softmax(x_t W + b) ‖ softmax(x_t Ŵ + b)) / Σ_t w_t

w_t keeps tokens with huge x from deciding (`token_weights`). Of the start from the weights and these two the one is kept whose KL
is least on windows held out.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.multiplicative import Multiplicative
from retrofit.sdk import token_weights

TOKENS = 8192  # that the head is fitted on
SWEEPS = 12  # of the alternation
RIDGE = 1e-4  # added to the diagonal of a system, as a fraction of its mean
TINY = 1e-30
STEPS = 120  # of Adam
BATCH = 128  # tokens a step
RATE = 0.03  # of Adam, relative to the factors' root mean square; falls to zero along a cosine
CHUNK = 256  # held-out tokens at a time

Factors = tuple[Tensor, Tensor]  # D (d, S) and E (d, M)


@dataclasses.dataclass(frozen=True)
class DenseHead:
    """What the multiplicative head is to predict: softmax(x W + b), W (d, V)."""

    weight: Tensor
    bias: Tensor | None

    def log_probabilities(self, x: Tensor, factors: Factors | None = None) -> Tensor:
        """(tokens, d) to (tokens, V); with `factors` those of the multiplicative head."""
        matrix = self.weight if factors is None else product(factors)[:, : self.weight.shape[1]]
        logits = x @ matrix
        return (logits if self.bias is None else logits + self.bias).log_softmax(-1)

    def divergence(self, x: Tensor, factors: Factors) -> Tensor:
        """The KL divergence of each token, in nats: (tokens)."""
        found, dense = self.log_probabilities(x, factors), self.log_probabilities(x).detach()
        return F.kl_div(found, dense, reduction="none", log_target=True).sum(-1)

    @torch.no_grad()
    def mean_divergence(self, x: Tensor, factors: Factors) -> float:
        """The weighted mean of the divergence, in nats a token."""
        weights = token_weights(x)
        found = torch.cat([self.divergence(part, factors) for part in x.split(CHUNK)])
        return float(found @ weights / weights.sum())


def fit_to_data(layer: Multiplicative, head: DenseHead, x: Tensor, held_out: Tensor) -> tuple[float, float]:
    """`layer`, which starts from the weights, has the factors of least KL; returns that before and after, on `held_out`.

    `x` and `held_out`, (tokens, d), are inputs of the dense head.
    """
    start = layer.d.detach().float(), layer.e.detach().float()
    candidates = [start, lower_squared_error(start, head.weight, x)]
    divergences = [head.mean_divergence(held_out, one) for one in candidates]
    nearest = candidates[divergences.index(min(divergences))]
    candidates.append(lower_divergence(nearest, head, x))
    divergences.append(head.mean_divergence(held_out, candidates[-1]))
    best = divergences.index(min(divergences))
    with torch.no_grad():
        layer.d.copy_(candidates[best][0])
        layer.e.copy_(candidates[best][1])
    return divergences[0], divergences[best]


def product(factors: Factors) -> Tensor:
    """The dense matrix of a multiplicative layer: (d, S·M)."""
    d, e = factors
    return (d.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)


def lower_squared_error(factors: Factors, weight: Tensor, x: Tensor) -> Factors:
    """The factors after some sweeps of alternating least squares on the logits of x, (tokens, d)."""
    d, e = factors
    modules, size = d.shape[1], e.shape[1]
    moments = (x * token_weights(x).unsqueeze(-1)).t() @ x / len(x)
    target = F.pad(weight - weight.mean(1, keepdim=True), (0, modules * size - weight.shape[1]))
    wanted = (moments @ target).unflatten(1, (modules, size))
    for _ in range(SWEEPS):
        d = solve(moments * (e @ e.t()), torch.einsum("im,ism->is", e, wanted))
        e = solve(moments * (d @ d.t()), torch.einsum("is,ism->im", d, wanted))
        ratio = (d.norm(dim=1, keepdim=True).clamp_min(TINY) / e.norm(dim=1, keepdim=True).clamp_min(TINY)).sqrt()
        d, e = d / ratio, e * ratio
    return d, e


def solve(system: Tensor, right: Tensor) -> Tensor:
    """The solution of a positive semi-definite system, which gets a ridge."""
    ridge = RIDGE * system.diagonal().mean().clamp_min(TINY)
    return torch.linalg.solve(system + ridge * torch.eye(len(system)).to(system), right)


@torch.enable_grad()
def lower_divergence(factors: Factors, head: DenseHead, x: Tensor) -> Factors:
    """The factors after `STEPS` steps of Adam on the weighted KL divergence."""
    values = [nn.Parameter(one.clone()) for one in factors]
    rates = [RATE * float(one.detach().square().mean().sqrt().clamp_min(1e-12)) for one in values]
    optimizer = torch.optim.Adam(
        [{"params": [one], "lr": rate} for one, rate in zip(values, rates, strict=True)], betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    weights, generator = token_weights(x), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        loss = head.divergence(x[rows], (values[0], values[1])) @ weights[rows] / weights[rows].sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return values[0].detach(), values[1].detach()
