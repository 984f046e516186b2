"""What a pass would add beyond all memory is refused before it is made, and the model is as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from support import tiny_models

import retrofit
from retrofit.errors import DoesNotFitError


@pytest.mark.parametrize("spec", ["altup(k=100000000)", "memory(lookup=lsh, buckets=4000000000, rank=64)"])
def test_parameters_beyond_all_memory_are_not_made(spec: str) -> None:
    model = tiny_models.llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DoesNotFitError, match="new parameters do not fit in memory") as error:
        retrofit.apply(model, spec, verify=False)
    assert "smaller" in error.value.remedy
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
