"""A model with weights that are no numbers is refused, and the weight is named; any other is not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.own_models import Own
from torch import nn

import retrofit
from retrofit.checks import fingerprint
from retrofit.checks.finite_weights import require_finite
from retrofit.errors import RetrofitError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_with_a_weight_that_is_no_number_is_not_rewritten(value, verify):
    model = Own()
    with torch.no_grad():
        model.b[1].q.weight[3, 5] = value
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RetrofitError, match=r"^b\.1\.q\.weight contains NaN or Inf") as error:
        retrofit.apply(model, "sum()", verify=verify)
    assert f"of its 1,152 values {int(math.isnan(value))} are NaN and {int(math.isinf(value))} infinite" in error.value.why
    assert type(model) is Own
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in model.state_dict().items())


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_what_is_finite(data, dtype):
    """The verdict is that of `isfinite` on the whole tensor, wherever in it the value is."""
    size = data.draw(st.integers(1, 40))
    values = torch.randn(size, 3, dtype=torch.float64)
    for place in data.draw(st.lists(st.integers(0, 3 * size - 1), max_size=2)):
        values.view(-1)[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1.0]))
    tensor = values.nan_to_num(0, 1, -1).to(dtype) if dtype is torch.int64 else values.to(dtype)
    expected = bool(tensor.double().isfinite().all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "ROWS", 6)  # several chunks
        assert fingerprint.read(tensor)[1] == expected
        assert all(map(fingerprint.is_finite, fingerprint.chunks(tensor))) == expected


def test_a_model_without_values_and_one_without_weights_pass():
    require_finite(Own().to("meta"))
    require_finite(nn.ReLU())


def test_several_are_counted():
    model = Own()
    nn.init.constant_(model.c.weight, math.nan)
    nn.init.constant_(model.a.weight, math.inf)
    with pytest.raises(RetrofitError, match=r"a\.weight and 1 more weights contain"):
        require_finite(model)
