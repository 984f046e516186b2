"""A loss for models that have none of their own: graphs, exported programs, ONNX files, models in plain torch."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import TrainingError
from retrofit.runtime.example_inputs import forward_parameters
from retrofit.runtime.probes import named_outputs
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training.outputs import find_logits

DERIVABLE = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
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
    required = [name for name, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_POSITIONAL]
    ids = "input_ids" if "input_ids" in parameters else required[0] if len(required) == 1 else None
    underivable = [name for name in required if name not in DERIVABLE and name != ids]
    if ids is None or underivable:
        raise TrainingError(
            f"{type(model).__name__} cannot compute a language-modelling loss",
            why=f"its forward takes {', '.join(parameters) or 'nothing'}, and no labels",
            remedy=REMEDY,
        )
    return WithLabelLoss(model, ids)


class WithLabelLoss(nn.Module):
    """A model from ids to logits and, given labels, its loss: the mean cross-entropy of the logits at p and the label at p.

    The losses that its modules record, such as those that balance experts, are added to it.
    """

    def __init__(self, model: nn.Module, ids: str) -> None:
        super().__init__()
        self.model, self.ids = model, ids
        self.takes = tuple(name for name in forward_parameters(model) if name in DERIVABLE)

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
        available = {
            self.ids: ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            "token_type_ids": torch.zeros_like(ids),
        }
        return {name: value for name, value in available.items() if name == self.ids or name in self.takes}
