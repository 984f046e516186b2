"""What a model is called with where it computes no loss, and which of its outputs are the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrofit.errors import TrainingError
from retrofit.runtime.probes import accepts
from retrofit.training.windows import WINDOW


def without_labels(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward that computes no loss and keeps no cache."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", WINDOW)}
    return {**inputs, "use_cache": False} if accepts(model, "use_cache") else inputs


def find_logits(outputs: Any) -> Tensor | None:
    """The output named `logits`, else the first, that has three dimensions."""
    named = [outputs["logits"]] if isinstance(outputs, Mapping) and "logits" in outputs else []
    return next((value for value in (*named, *list_of(outputs)) if isinstance(value, Tensor) and value.dim() == 3), None)


def token_logits(outputs: Any) -> Tensor:
    """The logits in what a model returned, as `find_logits` finds them; raises `TrainingError` where there are none."""
    found = find_logits(outputs)
    if found is None:
        raise TrainingError(
            "the model returns no logits for each token",
            why="none of its outputs is (batch, seq, vocabulary)",
            remedy="train a model with a language-modelling head",
        )
    return found


def list_of(outputs: Any) -> list[Any]:
    """What a model returned, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, Mapping) else list(outputs)
