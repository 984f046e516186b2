"""What is read out of the outputs of a model."""

from __future__ import annotations

import pytest
import torch
from support.refusals import refused

from retrofit.errors import TrainingError
from retrofit.training.objectives import token_logits

VALUE, LOGITS = torch.zeros(2, 5, 1), torch.zeros(2, 5, 11)


@pytest.mark.parametrize(
    "outputs",
    [
        {"value": VALUE, "logits": LOGITS},
        {"logits": LOGITS, "value": VALUE},
        (torch.tensor(1.0), LOGITS, VALUE),
        {"loss": torch.tensor(1.0), "scores": LOGITS},
        LOGITS,
    ],
)
def test_logits_are_the_output_of_that_name_else_the_first_of_three_dimensions(outputs: object) -> None:
    assert token_logits(outputs) is LOGITS


def test_a_classifier_has_no_logits_for_each_token() -> None:
    with refused(TrainingError, code="no-logits"):
        token_logits({"logits": torch.zeros(2, 11)})
