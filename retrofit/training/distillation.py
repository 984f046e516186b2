"""Knowledge distillation (Hinton et al., 2015, arXiv:1503.02531): the KL divergence from a teacher's predictions.

    T² mean_t KL(softmax(teacher_t / T) ‖ softmax(student_t / T))

Computed some tokens at a time, with the gradient, so that next to the student's logits and their gradient nothing of the size
(tokens, vocabulary) is ever held; the teacher's logits come one window at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22  # logits computed with at a time


class DivergenceFromTeacher(torch.autograd.Function):
    """Σ_t T² KL(softmax(teacher_t / T) ‖ softmax(student_t / T)) over the rows of (tokens, vocabulary)."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        rows = max(1, CHUNK // student.shape[-1])
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student) if student.requires_grad else None
        for start in range(0, len(student), rows):
            log_q = (student[start : start + rows].float() / temperature).log_softmax(-1)
            log_p = (teacher[start : start + rows].to(student.device).float() / temperature).log_softmax(-1)
            p = log_p.exp()
            total += temperature**2 * (p * (log_p - log_q)).sum()
            if gradient is not None:
                gradient[start : start + rows] = (log_q.exp_() - p).mul_(temperature).to(student.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return None if gradient is None else gradient * outer.to(gradient.dtype), None, None


def divergence_from_teacher(
    student: Tensor, batch: Mapping[str, Any], teacher: Callable[[Mapping[str, Any]], Tensor], temperature: float = 1.0
) -> Tensor:
    """The mean over all tokens of the formula above: `student`, (batch, …, vocabulary), are the logits for `batch`.

    `teacher` gives its logits for one window at a time, (1, …, vocabulary).
    """
    total = student.new_zeros((), dtype=torch.float32)
    for row, ours in enumerate(student.split(1)):
        theirs = teacher({name: value[row : row + 1] for name, value in batch.items()})
        total = total + DivergenceFromTeacher.apply(ours.flatten(0, -2), theirs.flatten(0, -2), temperature)
    return total / student[..., 0].numel()
