"""Example inputs: what cannot be derived is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.own_models import Own
from torch import Tensor, nn

import retrofit
from retrofit.errors import CaptureError
from retrofit.runtime.example_inputs import example_inputs, named_inputs


class Hearing(nn.Module):
    main_input_name = "input_features"

    def forward(self, input_features: Tensor | None = None, decoder_input_ids: Tensor | None = None) -> Tensor | None:
        return input_features


class HandingOn(nn.Module):
    """Calls the model inside with whatever it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_model_that_hears_is_asked_for_its_inputs() -> None:
    with pytest.raises(CaptureError) as caught:
        example_inputs(Hearing())
    assert "it takes input_features" in caught.value.why and "example_inputs=" in caught.value.remedy


@pytest.mark.parametrize(
    "wrap", [lambda model: torch.compile(model, backend="eager"), HandingOn, lambda model: HandingOn(HandingOn(model))]
)
def test_what_only_hands_its_arguments_on_takes_those_of_the_model_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(Own())
    assert list(example_inputs(model)) == ["x"]
    assert list(named_inputs(model, torch.ones(2, 3, dtype=torch.long))) == ["x"]
    assert retrofit.inspect(model).width == 24
