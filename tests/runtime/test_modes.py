"""Modes of a model that are set for a while, and put back one module at a time."""

from __future__ import annotations

import pytest
from torch import nn

from retrofit.runtime.modes import evaluation_mode, preserve_modes


def mixed() -> nn.Sequential:
    """A model in training mode with one frozen layer in evaluation mode."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2))).train()
    model[0].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_module_evaluates_and_has_its_own_mode_back() -> None:
    model = mixed()
    before = modes(model)
    assert True in before and False in before
    with evaluation_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_modes_come_back_after_an_error() -> None:
    model = mixed()
    before = modes(model)

    def fail() -> None:
        with preserve_modes(model):
            model.train()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert modes(model) == before
