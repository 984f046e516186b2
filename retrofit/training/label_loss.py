"""A loss for models that have none of their own: graphs, exported programs, ONNX files, models in plain torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import TrainingError
from retrofit.runtime.example_inputs import beside_ids, forward_parameters, is_required, kinds_beside_ids
from retrofit.runtime.probes import named_outputs
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training.outputs import find_logits

REMEDY = "train a Hugging Face model with a language-modelling head, or one that takes input_ids and returns logits"


def accepts_labels(model: nn.Module) -> bool:
    """Whether the model's forward takes `labels`, or any keyword."""
    parameters = forward_parameters(model).values()
    return any(one.name == "labels" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def add_loss(model: nn.Module) -> nn.Module:
    """`model` where it takes labels, else wrapped in one that does; raises `TrainingError` where its inputs cannot be derived."""
    if accepts_labels(model):
        return model
    parameters = forward_parameters(model)
    required = [name for name, one in parameters.items() if is_required(one)]
    ids = "input_ids" if "input_ids" in parameters else required[0] if len(required) == 1 else None
    kinds = kinds_beside_ids(model)
    underivable = [name for name in required if name not in kinds and name != ids]
    if ids is None or underivable:
        raise TrainingError(
            f"{type(model).__name__} cannot compute a language-modelling loss",
            why=f"its forward takes {', '.join(parameters) or 'nothing'}, and no labels",
            remedy=REMEDY,
        )
    return WithLabelLoss(model, ids, kinds)


def class_of(model: nn.Module) -> str:
    """The class of a model as its user knows it, whether or not a loss was added."""
    return type(model.model if isinstance(model, WithLabelLoss) else model).__name__


class WithLabelLoss(nn.Module):
    """A model from ids to logits and, given labels, its loss: the mean cross-entropy of the logits at p and the label at p.

    The losses that its modules record, such as those that balance experts, are added to it.
    """

    def __init__(self, model: nn.Module, ids: str, beside: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.model, self.ids, self.beside = model, ids, beside  # the last by name, of inputs that follow from the ids

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """(batch, seq) ids, and labels that are -100 where nothing is learned, to the loss, if there are labels, and the logits."""
        recording: AbstractContextManager[list[Tensor]] = nullcontext([]) if labels is None else auxiliary_losses()
        with recording as others:
            logits = find_logits(named_outputs(self.model(**self.inputs(input_ids))))
        if logits is None:
            raise TrainingError(
                f"{type(self.model).__name__} gives no logits", why="none of its outputs is (batch, seq, vocabulary)", remedy=REMEDY
            )
        if labels is None:
            return (logits,)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return (loss + sum(one.to(loss) for one in others), logits)

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """The ids of windows without padding, and the other inputs the model takes with them."""
        return {self.ids: ids} | beside_ids(ids, self.beside)
