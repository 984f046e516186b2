"""A teacher of which only the predictions are there: on disk, for the windows of one text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import TrainingError
from retrofit.training.dense_sites import DenseSites
from retrofit.training.distillation import Predictions, total_divergence
from retrofit.training.kept_predictions import Facts, KeptPredictions, difference
from retrofit.training.logit_head import LogitHead
from retrofit.training.outputs import token_logits
from retrofit.training.windows import WINDOW


@dataclasses.dataclass(frozen=True)
class KeptTeacher:
    """Predictions on disk, and no site: there is no module to learn from."""

    kept: KeptPredictions
    sites: DenseSites

    @staticmethod
    def of(folder: str | Path, student: nn.Module, facts: Facts) -> KeptTeacher:
        """The teacher whose predictions are in `folder`; raises `TrainingError` where they are of something else than `facts`."""
        kept = KeptPredictions.in_folder(folder)
        apart = difference(kept.facts, facts)
        if apart is not None:
            raise TrainingError(f"the predictions in {folder} are of {apart.what}", why=apart.why, remedy=apart.remedy)
        return KeptTeacher(kept, DenseSites(student, student, ()))

    @contextlib.contextmanager
    def teaching(self, device: torch.device) -> Iterator[None]:
        """Nothing is moved: predictions go to the device of the student's as they are needed."""
        yield

    def forward(self, batch: Mapping[str, Any]) -> None:
        """There is no model to run."""

    def predictions(self, batch: Mapping[str, Any], head: LogitHead | None) -> Predictions:
        """Those for all tokens of a batch."""
        return self.kept.predictions(batch[WINDOW].tolist())

    def divergence(self, outputs: Any, batch: Mapping[str, Any], temperature: float) -> Tensor:
        """The mean over all tokens of the divergence of what the student returned for a batch from the teacher's predictions."""
        student = token_logits(outputs)
        if student.shape[-1] != self.kept.facts.vocabulary:
            raise TrainingError(
                f"the model's logits are {student.shape[-1]:,} numbers a token",
                why=f"the teacher's vocabulary has {self.kept.facts.vocabulary:,} tokens",
                remedy="name the dense model itself with --teacher",
            )
        return total_divergence(student, self.predictions(batch, None), temperature) / student[..., 0].numel()
