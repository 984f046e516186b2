"""Example inputs: what cannot be derived is named."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from retrofit.errors import CaptureError
from retrofit.runtime.example_inputs import example_inputs


class Hearing(nn.Module):
    main_input_name = "input_features"

    def forward(self, input_features: Tensor | None = None, decoder_input_ids: Tensor | None = None) -> Tensor | None:
        return input_features


def test_a_model_that_hears_is_asked_for_its_inputs() -> None:
    with pytest.raises(CaptureError) as caught:
        example_inputs(Hearing())
    assert "it takes input_features" in caught.value.why and "example_inputs=" in caught.value.remedy
