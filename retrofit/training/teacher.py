"""The dense model as the teacher of a model that was rewritten from it: its sites, its predictions, and whether it fits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import TrainingError
from retrofit.pipeline.corresponding_sites import corresponding_sites
from retrofit.runtime.example_inputs import vocabulary_of
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.probes import accepts
from retrofit.training.dense_sites import DenseSites
from retrofit.training.distillation import divergence_from_teacher
from retrofit.training.label_loss import add_loss
from retrofit.training.windows import WINDOW


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A dense model, and the sites of the student that replaced modules of it."""

    model: nn.Module
    sites: DenseSites

    @staticmethod
    def of(dense: nn.Module, student: nn.Module) -> Teacher:
        """The teacher of `student`; raises `TrainingError` where another model is the dense one, or reads other tokens."""
        theirs, ours = vocabulary_of(dense), vocabulary_of(student)
        if theirs != ours:
            raise TrainingError(
                "the teacher has another vocabulary",
                why=f"it has {theirs:,} tokens, the model {ours:,}",
                remedy="name the dense model that was rewritten",
            )
        return Teacher(dense, DenseSites(student, dense, corresponding_sites(student, dense)))

    @contextlib.contextmanager
    def teaching(self, device: torch.device) -> Iterator[None]:
        """Within this context the dense model is on `device`, evaluates, and has no gradients; afterwards it is as it was."""
        before = next(self.model.parameters()).device
        required = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            with evaluation_mode(self.model):
                self.model.to(device).requires_grad_(False)
                yield
        finally:
            for parameter, requires_grad in required:
                parameter.requires_grad_(requires_grad)
            self.model.to(before)

    def divergence(self, student: Tensor, batch: Mapping[str, Any], temperature: float) -> Tensor:
        """The mean over all tokens of the divergence from its predictions; `student` are the logits for `batch`."""
        return divergence_from_teacher(student, batch, self.logits, temperature)

    @torch.no_grad()
    def logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Its logits for a batch of the student's, whose labels it does not see."""
        learner = add_loss(self.model)
        return token_logits(learner(**without_labels(learner, batch)))


def without_labels(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward that computes no loss and keeps no cache."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", WINDOW)}
    return {**inputs, "use_cache": False} if accepts(model, "use_cache") else inputs


def token_logits(outputs: Any) -> Tensor:
    """The logits in what a model returned: the first output of three dimensions."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    found = next((value for value in values if isinstance(value, Tensor) and value.dim() == 3), None)
    if found is None:
        raise TrainingError(
            "the model returns no logits for each token",
            why="none of its outputs is (batch, seq, vocabulary)",
            remedy="train a model with a language-modelling head",
        )
    return found


@contextlib.contextmanager
def sharing_weights(student: nn.Module, dense: nn.Module, apart: Iterator[nn.Parameter]) -> Iterator[None]:
    """Within this context the student's parameters that are equal to the dense ones of their names take no memory of their own.

    Those in `apart` are left alone. Afterwards every parameter is the student's own again.
    """
    own = {id(parameter) for parameter in apart}
    theirs = dict(dense.named_parameters())
    shared: list[nn.Parameter] = []
    for name, parameter in student.named_parameters():
        other = theirs.get(name)
        if other is None or id(parameter) in own or other.dtype != parameter.dtype or not torch.equal(other, parameter):
            continue
        parameter.data = other.data
        shared.append(parameter)
    try:
        yield
    finally:
        for parameter in shared:
            parameter.data = parameter.data.clone()
