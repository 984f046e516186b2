"""Training and evaluation modes of a model, set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module of `model` is in training or evaluation mode as it was."""
    training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation mode."""
    with preserve_modes(model):
        model.eval()
        yield
