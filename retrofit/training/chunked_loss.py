"""The loss of a run with a teacher, of which the logits of some tokens at a time are ever in memory.

    (1 − w) CE(student, labels) + w T² KL(teacher ‖ student)

The model runs without its head; then, for some tokens at a time, the head makes their logits, the teacher's head its own, and the
loss and its gradients for what the head received and for the head's weights are computed. Nothing else is kept of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.runtime.modes import evaluation_mode
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training import distillation
from retrofit.training.distillation import sum_over_chunks
from retrofit.training.logit_head import LogitHead, comes_apart, find_logit_head, targets_of
from retrofit.training.objectives import IGNORED, Example
from retrofit.training.outputs import token_logits, without_labels
from retrofit.training.sentence_embeddings import WithContrastiveLoss
from retrofit.training.teacher import Teacher

if TYPE_CHECKING:
    from retrofit.training.kept_teacher import KeptTeacher


@torch.no_grad()
def vocabulary_of_logits(learner: nn.Module, example: Example) -> int:
    with evaluation_mode(learner):
        return token_logits(learner(**without_labels(learner, example))).shape[-1]


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """The loss of a model whose head comes apart, and of a teacher whose head may."""

    head: LogitHead
    teachers_head: LogitHead | None
    vocabulary: int
    shift: int

    @staticmethod
    def of(learner: nn.Module, teacher: Teacher | KeptTeacher, example: Example, shift: int, batch_size: int) -> ChunkedLoss | None:
        """The loss for batches of so many windows like `example`, one window with labels; None where it has to be computed whole.

        That is where all logits of a batch are no more than are computed with at a time, where the model makes embeddings, where
        its head does not come apart, and where its own loss has other terms.
        """
        model = teacher.sites.model
        if isinstance(learner, WithContrastiveLoss):
            return None
        vocabulary = vocabulary_of_logits(learner, example)
        if batch_size * example["labels"].numel() * vocabulary <= distillation.CHUNK:
            return None
        head = find_logit_head(model)
        if head is None or not comes_apart(head, learner, example, shift):
            return None
        theirs = find_logit_head(teacher.model) if isinstance(teacher, Teacher) else None
        if theirs is not None and isinstance(teacher, Teacher) and not comes_apart(theirs, teacher.learner, example, None):
            theirs = None
        return ChunkedLoss(head, theirs, vocabulary, shift)

    def loss(
        self, model: nn.Module, inputs: Mapping[str, Any], teacher: Teacher | KeptTeacher, weight: float, temperature: float
    ) -> Tensor:
        """The loss of a batch; `weight` is w."""
        with auxiliary_losses() as others:
            h = self.head.hidden(model, without_labels(model, inputs)).flatten(0, 1)
        targets = targets_of(inputs["labels"], self.shift).flatten()
        labelled = max(1, int((targets != IGNORED).sum()))
        predictions = teacher.predictions(inputs, self.teachers_head) if weight else None

        def part(some: Tensor, rows: slice) -> Tensor:
            logits = self.head.logits(some)
            total = logits.new_zeros((), dtype=torch.float32)
            if weight < 1:
                own = F.cross_entropy(logits.float(), targets[rows], ignore_index=IGNORED, reduction="sum")
                total = total + (1 - weight) / labelled * own
            if predictions is not None:
                total = total + weight / len(targets) * predictions.divergence(logits, rows, temperature)
            return total

        loss = sum_over_chunks(part, h, self.vocabulary, self.head.parameters)
        return loss + (1 - weight) * sum(one.to(loss) for one in others)  # type: ignore[return-value]
