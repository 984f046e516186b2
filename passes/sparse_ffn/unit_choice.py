"""Which k of the N units of a block are active, given their logits: for good, or relaxed and drawn at random for training.

    relaxed(l, k)_u = min(1, e^{l_u} / Z),  Z such that the units of a block sum to k

At k = 1 that is the softmax, at k = N it is 1, and as the logits grow it becomes the indicator of the k largest. It is the point
of {m: 0 ≤ m_u ≤ 1, Σ m_u = k} with the least Kullback-Leibler divergence from e^l. With Gumbel noise added to the logits, the k
largest are a sample without replacement from softmax(l) (Kool et al., Stochastic Beams and Where to Find Them, 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrofit.passes.sparse_ffn.sorted_values import descending

HIGHEST = 30.0  # what a logit counts above the k-th largest: from log N on its unit has its full 1 anyway
FAR = 1e30  # larger than any logit


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
    given, dim = laid_out(logits)
    soft = given.softmax(dim) if k == 1 else relaxed_below(given, k, full_ones(descending(given, dim), k), dim)
    return soft.movedim(dim, -1)


def straight_through(choice: Tensor, relaxed: Tensor, k: int) -> Tensor:
    """The indicator of the k largest `choice`, with the gradient of the relaxation of `relaxed`, logits too: (…, N)."""
    soft, hard = both_indicators(choice, relaxed, k)
    return hard + (soft - soft.detach())


def sampled_indicator(logits: Tensor, k: int, temperature: float, hard: float, noise: str = "choice") -> Tensor:
    """With probability `hard`, for the whole batch, the units of a draw with Gumbel noise g, else the relaxation alone: (…, N).

    noise="choice": the k largest of l + τ g, with the gradient of the relaxation of l, which is the other mask. noise="both": the k
    largest of (l + g)/τ, with the gradient of their relaxation, which is the other mask.
    """
    on_cpu = logits.is_cuda and not torch.compiler.is_compiling()  # drawn there, so that only what is needed is computed
    is_hard = torch.rand((), device="cpu" if on_cpu else logits.device) < hard
    known = type(is_hard) is Tensor and is_hard.device.type == "cpu" and not torch.compiler.is_compiling()  # without waiting
    if noise == "choice":
        if known and not is_hard:
            return relaxed_indicator(logits, k)
        choice, relaxed = logits.detach() + temperature * gumbel_noise(logits), logits
    else:
        choice = relaxed = (logits + gumbel_noise(logits)) / temperature
        if known and not is_hard:
            return relaxed_indicator(relaxed, k)
    if known:
        return straight_through(choice, relaxed, k)
    soft, chosen = both_indicators(choice, relaxed, k)
    return torch.where(is_hard, chosen, soft.detach()) + (soft - soft.detach())


def gumbel_noise(logits: Tensor) -> Tensor:
    """As many draws as there are logits: −log(−log u), u uniform."""
    uniform = torch.rand_like(logits).clamp_min_(torch.finfo(logits.dtype).tiny)
    return uniform.log_().neg_().log_().neg_()


def both_indicators(choice: Tensor, relaxed: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The relaxation of `relaxed`, and the indicator of the k largest `choice`: (…, N) each."""
    given, dim = laid_out(relaxed)
    noisy = given if choice is relaxed else laid_out(choice)[0]
    if k == 1:
        soft, hard = given.softmax(dim), indicator_of_largest(noisy, 1, noisy.detach().amax(dim), dim)
    else:
        chosen = descending(noisy, dim)
        full = full_ones(chosen if noisy is given else descending(given, dim), k)
        soft, hard = relaxed_below(given, k, full, dim), indicator_of_largest(noisy, k, chosen[k - 1], dim)
    return soft.movedim(dim, -1), hard.movedim(dim, -1)


def laid_out(logits: Tensor) -> tuple[Tensor, int]:
    """The logits as they are computed with, and which dimension is that of the N units of a block.

    On a GPU it is the first: an operation along rows of a few numbers takes many times as long there as one along columns.
    """
    if logits.is_cuda and not torch.compiler.is_compiling():
        return logits.movedim(-1, 0).contiguous(), 0
    return logits, -1


# Below, what is true or false of a unit is 1.0 or 0.0, and what no gradient needs is overwritten: with many tokens that takes a
# fraction of the time of masks and copies.


def indicator_of_largest(logits: Tensor, k: int, least: Tensor, dim: int) -> Tensor:
    """1 at the k largest logits of each block, of equal ones at the first; `least` is the k-th largest, `dim` that of the units."""
    side = (logits.detach() - least.unsqueeze(dim)).sign_()
    above = side.relu()
    level = side.abs_().neg_().add_(1)
    room = k - above.sum(dim, keepdim=True)
    return above.addcmul_(level, level.cumsum(dim).neg_().add_(room + 0.5).sign_().relu_())


def relaxed_below(logits: Tensor, k: int, least: Tensor, dim: int) -> Tensor:
    """The relaxation where the units whose logits are at least so large have their full 1: a softmax of the others."""
    full = (logits.detach() - least.unsqueeze(dim)).sign_().add_(1).clamp_max_(1.0)
    rest = k - full.sum(dim, keepdim=True)
    return torch.addcmul(full, rest, torch.add(logits, full, alpha=-FAR).softmax(dim))


def full_ones(sorted_logits: Tensor, k: int) -> Tensor:
    """The least logit of each block whose unit has its full 1 in the relaxation, `FAR` where none has: (N, …) to (…).

    Of the sorted units the j-th, if all before it do, where its share (k − j) e^{l_j} of what is left for it and the smaller ones
    exceeds their sum. The units from the k-th on never do.
    """
    weights = (sorted_logits - sorted_logits[k - 1]).clamp_max_(HIGHEST).exp_()
    rests = [weights[k - 1 :].sum(0)]  # Σ of the weights from the j-th on: j = k − 1, k − 2, …, 0
    for weight in reversed(weights[: k - 1].unbind()):
        rests.append(rests[-1] + weight)
    full, least = torch.ones_like(sorted_logits[0]), torch.full_like(sorted_logits[0], FAR)
    for j, rest in enumerate(reversed(rests[1:])):
        full *= torch.add(-rest, weights[j], alpha=k - j).sign_().relu_()
        least = torch.minimum(least, torch.add(sorted_logits[j], 1 - full, alpha=FAR))
    return least
