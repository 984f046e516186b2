"""The dense model as the teacher of a model that was rewritten from it: its sites, its predictions, and the checks that it fits.

The loss of a run with a teacher, with the logits of some tokens in memory at a time.

    (1 − w) CE(student, labels) + w T² KL(teacher ‖ student)

The model runs without its head. Then, for some tokens at a time, the head and the teacher's head compute their logits, and the loss
and its gradients for the head's input and weights are computed. No logits are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.emitted import as_dense_graph_of, dense_graph
from retrofit.errors import TrainingError
from retrofit.inputs.example_inputs import named_inputs, vocabulary_of
from retrofit.inputs.model_memory import offloaded_module
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.usable_models import transformer_inside
from retrofit.passbase.replaying import Correspondence, correspondence, rewritten_part
from retrofit.passbase.tokenization import vocabulary_size
from retrofit.process import preserve_attribute
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training import distillation
from retrofit.training.distillation import (
    LogitHead,
    Predictions,
    WholePredictions,
    comes_apart,
    divergence_from_teacher,
    find_logit_head,
    sum_over_chunks,
    targets_of,
)
from retrofit.training.layerwise import DenseSites
from retrofit.training.objectives import (
    IGNORED,
    Example,
    WithContrastiveLoss,
    add_loss,
    embedding_distance,
    embeds_sentences,
    list_of,
    token_logits,
    without_labels,
)

if TYPE_CHECKING:
    from retrofit.training.teacher_cache import KeptTeacher


@dataclasses.dataclass(frozen=True)
class PredictionsOfHead:
    """Predictions of a dense model whose logits are computed from the head's input, (tokens, d), when they are needed."""

    head: LogitHead
    hidden: Tensor

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        with torch.no_grad():
            logits = self.head.logits(self.hidden[rows])
        return WholePredictions(logits).divergence(student, slice(None), temperature)


class PredictionsOfWindows:
    """Predictions of a dense model whose logits are computed one window at a time; the last window is cached."""

    def __init__(self, teacher: Teacher, batch: Mapping[str, Any]) -> None:
        self.teacher, self.batch = teacher, batch
        self.window, self.logits = -1, torch.empty(0)

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        tokens = self.batch["labels"].shape[1]
        total = student.new_zeros((), dtype=torch.float32)
        for window in range(rows.start // tokens, -(-rows.stop // tokens)):
            if window != self.window:
                self.logits = torch.empty(0)  # freed before the next ones are computed
                window_batch = {name: value[window : window + 1] for name, value in self.batch.items()}
                self.window, self.logits = window, self.teacher.logits(window_batch)[0]
            first, last = max(rows.start, window * tokens), min(rows.stop, (window + 1) * tokens)
            logits = student[first - rows.start : last - rows.start]
            window_rows = slice(first - window * tokens, last - window * tokens)
            total = total + WholePredictions(self.logits).divergence(logits, window_rows, temperature)
        return total


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A dense model and the sites of the student that replaced its modules.

    For a sentence-transformers model, `part` is the transformers model inside it, from which the student's was made.
    """

    model: nn.Module
    part: nn.Module
    sites: DenseSites
    parts: Correspondence

    @staticmethod
    def of(dense: nn.Module, student: nn.Module) -> Teacher:
        """Return the teacher of `student`; raises `TrainingError` if another model is the dense one, or reads other tokens."""
        if embeds_sentences(dense) != embeds_sentences(student):
            raise TrainingError(
                "the teacher and the model have different outputs",
                why="one embeds texts, the other predicts tokens",
                remedy="use the whole dense model that was rewritten",
                code="other-output",
                option="teacher",
            )
        if dense_graph(student) is not None:
            dense = as_dense_graph_of(student, dense, named_inputs(student))
        part = transformer_inside(dense) if embeds_sentences(dense) else dense
        rewritten = rewritten_part(student) if embeds_sentences(student) else student
        dense_size, size = (vocabulary_of(network) or vocabulary_size(network) for network in (part, rewritten))
        if dense_size != size:
            raise TrainingError(
                "the teacher has another vocabulary",
                why=f"it has {dense_size:,} tokens, the model {size:,}",
                remedy="name the dense model that was rewritten",
                code="other-vocabulary",
                option="teacher",
            )
        parts = correspondence(rewritten, part)
        return Teacher(dense, part, DenseSites(rewritten, part, parts.sites), parts)

    def with_model(self, model: nn.Module) -> Teacher:
        """Return a teacher that predicts with `model`, which has the dense weights; no site learns from it."""
        return Teacher(model, model, DenseSites(model, model, ()), dataclasses.replace(self.parts, sites=(), places={}))

    @property
    def learner(self) -> nn.Module:
        """The dense model with a loss for given labels."""
        return WithContrastiveLoss(self.model) if embeds_sentences(self.model) else add_loss(self.model)

    @contextlib.contextmanager
    def teaching(self, device: torch.device) -> Iterator[None]:
        """Place the dense model on `device`, in evaluation mode and without gradients, within this context."""
        trainable = preserve_attribute("requires_grad", self.model.parameters())
        with trainable, evaluation_mode(self.model), placed_on(device, self.model):
            self.model.requires_grad_(False)
            yield

    def divergence(self, outputs: Any, batch: Mapping[str, Any], temperature: float) -> Tensor:
        """Return the divergence of the student's outputs for a batch, with labels, from the dense model.

        The mean over all tokens of the divergence from its predictions, or the distance of the texts' embeddings.
        """
        if embeds_sentences(self.model):
            with torch.no_grad():
                expected = self.learner(batch["input_ids"])[0]
            return embedding_distance(list_of(outputs)[1], expected)
        return divergence_from_teacher(token_logits(outputs), batch, self.logits, temperature)

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Any]) -> None:
        """Run the dense model on a batch."""
        self.learner(**without_labels(self.learner, batch))

    def predictions(self, batch: Mapping[str, Any], head: LogitHead | None) -> Predictions:
        """Return the predictions for all tokens of a batch; `head` is the dense model's, if it is separable."""
        if head is None:
            return PredictionsOfWindows(self, batch)
        with torch.no_grad():
            return PredictionsOfHead(head, head.hidden(self.learner, without_labels(self.learner, batch)).flatten(0, 1))

    @torch.no_grad()
    def logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the dense model's logits for a batch of the student's, without the labels."""
        return token_logits(self.learner(**without_labels(self.learner, batch)))


@contextlib.contextmanager
def placed_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Place the model on `device` within this context; an offloaded model stays where accelerate has put it."""
    if offloaded_module(model) is not None:
        yield
        return
    before = next(model.parameters()).device
    try:
        model.to(device)
        yield
    finally:
        model.to(before)


@contextlib.contextmanager
def sharing_weights(student: nn.Module, dense: nn.Module, excluded: Iterator[nn.Parameter]) -> Iterator[None]:
    """Let the student share the dense parameters that equal its own of the same names within this context, to save memory.

    Those in `excluded` and dense parameters on disk are not shared. On exit every parameter is the student's own again.
    """
    excluded_ids = {id(parameter) for parameter in excluded}
    dense_parameters = dict(dense.named_parameters())
    shared: list[nn.Parameter] = []
    for name, parameter in student.named_parameters():
        other = dense_parameters.get(name)
        if other is None or other.is_meta or id(parameter) in excluded_ids or other.dtype != parameter.dtype:
            continue
        if torch.equal(other, parameter):
            parameter.data = other.data
            shared.append(parameter)
    try:
        yield
    finally:
        for parameter in shared:
            parameter.data = parameter.data.clone()


def separable_head(model: nn.Module, learner: nn.Module, example: Example, shift: int | None) -> LogitHead | None:
    """Return the head of `model` if it reproduces the logits of `learner`, the model with a loss; None if there is none."""
    head = find_logit_head(model)
    return head if head is not None and comes_apart(head, learner, example, shift) else None


@torch.no_grad()
def vocabulary_of_logits(learner: nn.Module, example: Example) -> int:
    with evaluation_mode(learner):
        return token_logits(learner(**without_labels(learner, example))).shape[-1]


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """The loss of a model with a separable head, and of a teacher whose head may be separable."""

    head: LogitHead
    teachers_head: LogitHead | None
    vocabulary: int
    shift: int

    @staticmethod
    def of(learner: nn.Module, teacher: Teacher | KeptTeacher, example: Example, shift: int, batch_size: int) -> ChunkedLoss | None:
        """Return the loss for batches of windows like `example`, one window with labels; None if it must be computed whole.

        That is the case if a batch has few logits, if the model returns embeddings, if its head is not separable, or if its own
        loss has other terms.
        """
        if isinstance(learner, WithContrastiveLoss):
            return None
        vocabulary = vocabulary_of_logits(learner, example)
        if batch_size * example["labels"].numel() * vocabulary <= distillation.CHUNK:
            return None
        head = separable_head(teacher.sites.model, learner, example, shift)
        if head is None:
            return None
        teachers_head = separable_head(teacher.model, teacher.learner, example, None) if isinstance(teacher, Teacher) else None
        return ChunkedLoss(head, teachers_head, vocabulary, shift)

    def loss(
        self, model: nn.Module, inputs: Mapping[str, Any], teacher: Teacher | KeptTeacher, weight: float, temperature: float
    ) -> Tensor:
        """Return the loss of a batch; `weight`: w."""
        with auxiliary_losses() as others:
            h = self.head.hidden(model, without_labels(model, inputs)).flatten(0, 1)
        targets = targets_of(inputs["labels"], self.shift).flatten()
        labelled = max(1, int((targets != IGNORED).sum()))
        predictions = teacher.predictions(inputs, self.teachers_head) if weight else None

        def part(chunk: Tensor, rows: slice) -> Tensor:
            logits = self.head.logits(chunk)
            total = logits.new_zeros((), dtype=torch.float32)
            if weight < 1:
                own = F.cross_entropy(logits.float(), targets[rows], ignore_index=IGNORED, reduction="sum")
                total = total + (1 - weight) / labelled * own
            if predictions is not None:
                total = total + weight / len(targets) * predictions.divergence(logits, rows, temperature)
            return total

        loss = sum_over_chunks(part, h, self.vocabulary, self.head.parameters)
        return loss + (1 - weight) * sum(other.to(loss) for other in others)  # type: ignore[return-value]
