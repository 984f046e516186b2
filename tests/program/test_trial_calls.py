"""Trials on a model's own calls: which fail and why, with values and without; the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.own_models import Own
from torch import Tensor, nn

from retrofit.program.trial_calls import failed_trials
from retrofit.runtime.skeletons import without_weights

IDS = {"x": torch.arange(10).view(2, 5)}


class Branching(Own):
    """A model whose code branches on the values of a tensor, which a trace does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x >= 0).all()) else super().forward(x.abs())


def on_fewer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(args[0][:, ::2], **kwargs)


def on_wider(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(torch.cat([args[0], args[0]], -1), **kwargs)


@pytest.mark.parametrize("kind", [Own, Branching])
@pytest.mark.parametrize("values", [True, False], ids=["with values", "without values"])
def test_a_trial_gets_the_arguments_of_the_dense_call_and_its_failure_is_located(kind: type[Own], values: bool) -> None:
    model = kind()
    tried = model if values else without_weights(model)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    failed = failed_trials(tried, IDS, {"b.0": on_fewer, "b.1": on_wider, "b.2": on_fewer})
    assert list(failed) == ["b.1"] and failed["b.1"].startswith("b.1.m: RuntimeError")
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items()) and model.training
    assert not any(one._forward_pre_hooks for one in tried.modules())


def test_calls_that_a_trial_makes_are_not_tried_in_turn() -> None:
    model, calls = Own(), list[str]()

    def outer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append("outer")
        module(*args, **kwargs)

    assert failed_trials(model, IDS, {"b.0": outer, "b.0.q": lambda *call: calls.append("inner")}) == {}
    assert calls == ["outer", "inner"]


def test_of_a_model_that_does_not_run_nothing_is_known() -> None:
    assert failed_trials(Own(), {"x": torch.zeros(2, 5)}, {"b.0": on_wider}) == {}
