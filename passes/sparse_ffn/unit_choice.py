"""Which k of the N units of a block are active, given their logits: for good, or relaxed and drawn at random for training.

    relaxed(l, k)_u = min(1, e^{l_u} / Z),  Z such that the units of a block sum to k

At k = 1 that is the softmax, at k = N it is 1, and as the logits grow it becomes the indicator of the k largest. It is the point
of {m: 0 ≤ m_u ≤ 1, Σ m_u = k} with the least Kullback-Leibler divergence from e^l. With Gumbel noise added to the logits, the k
largest are a sample without replacement from softmax(l) (Kool et al., Stochastic Beams and Where to Find Them, 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest_units(logits: Tensor, k: int) -> Tensor:
    """The indices of the k largest logits of each block, largest first: (…, blocks, N) to (…, blocks, k)."""
    return logits.max(-1, keepdim=True).indices if k == 1 else logits.topk(k).indices


def indicator(units: Tensor, n: int, weight: Tensor | None = None) -> Tensor:
    """1 (or its weight) at each of the given units, 0 at the others: (…, blocks, k) to (…, blocks, N)."""
    if units.shape[-1] == 1:
        found = torch.arange(n, device=units.device) == units
        return found if weight is None else found * weight
    values = torch.ones_like(units, dtype=torch.float32) if weight is None else weight
    return torch.zeros(*units.shape[:-1], n, dtype=values.dtype, device=units.device).scatter(-1, units, values)


def relaxed_indicator(logits: Tensor, k: int) -> Tensor:
    """The relaxation above: (…, N), between 0 and 1, sum k."""
    if k == 1:
        return logits.softmax(-1)
    descending = logits.sort(dim=-1, descending=True).values
    rest = descending.flip(-1).logcumsumexp(-1).flip(-1)[..., :k]  # log Σ e^l over the units from the j-th on
    share = torch.arange(k, 0, -1, device=logits.device, dtype=logits.dtype).log()  # of them k − j are still to be active
    capped = ((descending[..., :k] + share - rest) > 0).to(logits.dtype).cumprod(-1).sum(-1, keepdim=True).long()
    capped = capped.clamp_max(k - 1)
    return (logits + share.expand_as(rest).gather(-1, capped) - rest.gather(-1, capped)).clamp_max(0.0).exp()


def straight_through(logits: Tensor, k: int, temperature: float) -> Tensor:
    """The indicator of the k largest logits, with the gradient of the relaxation at this temperature: (…, N)."""
    soft = relaxed_indicator(logits / temperature, k)
    return indicator(largest_units(logits, k), logits.shape[-1]).to(soft.dtype) + (soft - soft.detach())


def sampled_indicator(logits: Tensor, k: int, temperature: float, hard: float) -> Tensor:
    """Of the logits with Gumbel noise: with probability `hard`, for the whole batch, the former, else the relaxation itself."""
    noisy = logits - torch.empty_like(logits).exponential_().log()
    mask = straight_through(noisy, k, temperature)
    return torch.where(torch.rand((), device=mask.device) < hard, mask, relaxed_indicator(noisy / temperature, k))
