"""Knowledge distillation (Hinton et al., 2015, arXiv:1503.02531): the KL divergence from a teacher's predictions.

    T² mean_t KL(p_t ‖ q_t)        p_t = softmax(teacher_t / T), q_t = softmax(student_t / T)

Of predictions that were kept on disk only the k largest p_i of a token are known, the set S, and the sum of the rest. The student's
are then compared with both, which is the same where k is the size of the vocabulary, and else at most the same:

    KL(p ‖ q) ≥ Σ_{i ∈ S} p_i log(p_i / q_i) + p_R log(p_R / q_R)        p_R = 1 − Σ_S p_i, q_R = 1 − Σ_S q_i

Computed some tokens at a time, with the gradient, so that next to the student's logits and their gradient nothing of the size
(tokens, vocabulary) is ever held; a teacher's logits come one window at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CHUNK = 1 << 22  # logits computed with at a time
NEVER = -1e4  # the logarithm of a probability of nothing


class Predictions(Protocol):
    """What a teacher predicts for some tokens."""

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        """Σ_t T² KL(p_t ‖ q_t) over the tokens `rows`, of which `student` are the logits: (tokens, vocabulary)."""
        ...


@dataclasses.dataclass(frozen=True)
class WholePredictions:
    """All logits of a teacher: (tokens, vocabulary)."""

    logits: Tensor

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        log_q = (student.float() / temperature).log_softmax(-1)
        log_p = (self.logits[rows].to(student.device).float() / temperature).log_softmax(-1)
        return temperature**2 * (log_p.exp() * (log_p - log_q)).sum()


@dataclasses.dataclass(frozen=True)
class LargestPredictions:
    """The largest probabilities of a teacher, at one temperature, and the sum of the others: logarithms.

    `ids` and `log_p` are (tokens, k), `log_rest` is (tokens).
    """

    ids: Tensor
    log_p: Tensor
    log_rest: Tensor

    @staticmethod
    def of(logits: Tensor, k: int, temperature: float) -> LargestPredictions:
        """Those of whole logits: (tokens, vocabulary)."""
        log_p = (logits.float() / temperature).log_softmax(-1)
        largest, ids = log_p.topk(k)
        return LargestPredictions(ids, largest, log_p.scatter(-1, ids, -torch.inf).logsumexp(-1).clamp_min(NEVER))

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        ids, log_p, log_rest = (one[rows].to(student.device) for one in (self.ids, self.log_p, self.log_rest))
        ids, log_rest = ids.long(), log_rest.float().clamp_min(NEVER)
        log_all = torch.cat([log_p.float(), log_rest[:, None]], -1).log_softmax(-1)  # they were rounded
        scaled = student.float() / temperature
        total = scaled.logsumexp(-1, keepdim=True)
        log_q = scaled.gather(-1, ids) - total
        if ids.shape[-1] < student.shape[-1]:
            rest = scaled.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) - total
            log_q = torch.cat([log_q, rest], -1)
        log_all = log_all[:, : log_q.shape[-1]]
        return temperature**2 * (log_all.exp() * (log_all - log_q)).sum()


class SumOverChunks(torch.autograd.Function):
    """Σ function(x[rows], rows) over chunks of rows of x, (tokens, …), with the gradients for x and for `parameters`.

    Both are computed in the forward pass, so that of what `function` needs only that of one chunk is held. Gradients of parameters
    are summed in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor, slice], Tensor], size: int, learns: bool, x: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        wanted = [(place, one) for place, one in enumerate((x, *parameters)) if learns and one.requires_grad]
        gradients: list[Tensor | None] = [None] * (1 + len(parameters))
        for place, one in wanted:
            exact = torch.promote_types(one.dtype, torch.float32)
            gradients[place] = torch.zeros_like(one, dtype=exact) if place else torch.empty_like(one)
        for start in range(0, len(x), size):
            rows = slice(start, min(start + size, len(x)))
            with torch.set_grad_enabled(bool(wanted)):
                leaf = x[rows].detach().requires_grad_(gradients[0] is not None)
                value = function(leaf, rows)
            total += value.detach()
            if not wanted:
                continue
            found = torch.autograd.grad(value, [one if place else leaf for place, one in wanted], allow_unused=True)
            for (place, _), gradient in zip(wanted, found, strict=True):
                held = gradients[place]
                assert held is not None
                if place:
                    held.add_(0.0 if gradient is None else gradient)
                else:
                    held[rows] = torch.zeros_like(leaf) if gradient is None else gradient
        ctx.gradients, ctx.dtypes = gradients, [one.dtype for one in (x, *parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, ()
        scaled = (None if one is None else one.mul_(outer.to(one.dtype)) for one in gradients)
        return None, None, None, *(None if one is None else one.to(like) for one, like in zip(scaled, ctx.dtypes, strict=True))


def sum_over_chunks(
    function: Callable[[Tensor, slice], Tensor], x: Tensor, vocabulary: int, parameters: tuple[nn.Parameter, ...] = ()
) -> Tensor:
    """The sum above, in chunks of as many rows as have `CHUNK` logits; a gradient passes through it once."""
    size = max(1, CHUNK // vocabulary)
    return SumOverChunks.apply(function, size, torch.is_grad_enabled(), x, *parameters)  # type: ignore[no-any-return]


def total_divergence(student: Tensor, predictions: Predictions, temperature: float) -> Tensor:
    """Σ_t of the formula above for all tokens of `student`, (…, vocabulary)."""
    rows = student.flatten(0, -2)
    return sum_over_chunks(lambda some, which: predictions.divergence(some, which, temperature), rows, rows.shape[-1])


def divergence_from_teacher(
    student: Tensor, batch: Mapping[str, Any], teacher: Callable[[Mapping[str, Any]], Tensor], temperature: float = 1.0
) -> Tensor:
    """The mean over all tokens of the formula above: `student`, (batch, …, vocabulary), are the logits for `batch`.

    `teacher` gives its logits for one window at a time, (1, …, vocabulary).
    """
    total = student.new_zeros((), dtype=torch.float32)
    for row, ours in enumerate(student.split(1)):
        theirs = teacher({name: value[row : row + 1] for name, value in batch.items()})
        total = total + total_divergence(ours, WholePredictions(theirs.flatten(0, -2)), temperature)
    return total / student[..., 0].numel()
