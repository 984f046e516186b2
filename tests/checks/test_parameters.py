"""What the check `parameters` finds: each dense parameter again, by its name and its content."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.own_models import Own
from support.tiny_models import Plain, bert, gpt2
from torch import nn

import retrofit
from retrofit.checks import Reference, check_rewrite, parameters
from retrofit.checks.parameters import Fingerprint, checksum, fingerprints, match_parameters, require_finite
from retrofit.errors import RetrofitError
from retrofit.passbase.protocol import Rewrite
from retrofit.surgery import Fate


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@given(shape=SHAPES, dtype=DTYPES)
@settings(max_examples=40, deadline=None)
def test_a_checksum_is_that_of_the_bytes_in_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape).to(dtype)
    assert checksum(value) == zlib.crc32(bytes(value.contiguous().flatten().view(torch.uint8).tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_of_many_bytes_notices_whatever_moves(dtype: torch.dtype) -> None:
    value = torch.randn(97, 67).to(dtype)
    value[:, 1] = -value[:, 0]  # sums of floats would not notice these
    whole = checksum(value)
    assert checksum(value.clone()) == whole != checksum(value + 0.0 * value.sum() + 1e-2)
    for moved in (value.flip(0), value.flip(1), value.roll(1, 1), value[torch.randperm(97)], value[:, torch.randperm(67)], -value):
        assert checksum(moved) != whole
    changed = value.flatten().clone()
    for place in torch.randint(len(changed), (20,)).tolist():
        before = changed[place].clone()
        changed[place] = before * 2 + 1
        assert checksum(changed.view_as(value)) != whole
        changed[place] = before


def test_a_checksum_reads_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(50, 7)
    whole = checksum(value.mT)
    monkeypatch.setattr("retrofit.checks.parameters.ROWS", 16)
    assert checksum(value.mT) == whole == checksum(value.mT.contiguous())


@given(shape=SHAPES, dtype=DTYPES, data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_changed_element_is_noticed(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    value = torch.randn(shape).to(dtype)
    one = Fingerprint.of(value)
    assert one.matches(Fingerprint.of(value.clone()))
    assert one.matches(Fingerprint.of(value * 0.25, scale=0.25)) and one.matches(Fingerprint.of(value / 3, scale=1 / 3))
    changed = value.clone()
    flat = changed.view(-1)
    place = data.draw(st.integers(0, flat.numel() - 1))
    flat[place] = torch.nextafter(flat[place].float(), torch.tensor(9.0)) if dtype == torch.float32 else flat[place] * 1.25 + 1
    assert not one.matches(Fingerprint.of(changed)) and not one.matches(Fingerprint.of(changed * 0.25, scale=0.25))


class Wrapped(nn.Module):
    """A linear layer, wrapped and widened."""

    def __init__(self, linear: nn.Linear, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * linear.in_features, linear.out_features)
        self.layer.weight.data[:, linear.in_features :] = scale * linear.weight.data
        self.layer.bias.data.copy_(linear.bias.data)


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 2.0])
def test_dense_parameters_are_traced_by_name_and_content(scale: float) -> None:
    linear, norm = nn.Linear(4, 3), nn.LayerNorm(3)
    nn.init.normal_(norm.weight)
    prints = fingerprints(nn.Sequential(linear, norm, nn.Linear(3, 5)))
    wrapped = Wrapped(linear, scale)
    model = nn.ModuleDict({"0": wrapped, "norm": norm, "2": nn.Linear(2, 2)})
    fates = match_parameters(prints, model)
    assert (fates["0.weight"].kind, fates["0.weight"].name) == ("widened", "0.layer.weight")
    assert fates["0.weight"].index == (slice(0, 3), slice(4, 8)) and fates["0.weight"].scale == scale
    assert prints["0.weight"].matches(Fingerprint.of(wrapped.layer.weight[fates["0.weight"].index], scale=scale))
    assert fates["0.bias"] == Fate("moved", "0.layer.bias", "its module was wrapped")
    assert (fates["1.weight"].kind, fates["1.weight"].name) == ("moved", "norm.weight")
    assert fates["2.weight"].kind == "dropped"


def test_a_name_that_ends_another_dense_name_is_not_taken_for_it() -> None:
    model, dense = bert(), bert()  # `attention.output.dense.bias` also reads as a longer `output.dense.bias`, of the same shape
    retrofit.apply(model, "recurrence", verify=False)
    found = retrofit.verify(model, dense, checks=["parameters"])["parameters"]
    assert found.status == "passed", found


def test_a_table_that_was_widened_by_less_than_its_width_is_found() -> None:
    model, dense = gpt2(), gpt2()
    retrofit.apply(model, "altup(k=2, extra=8)", verify=False)
    assert model.transformer.wte.weight.shape[1] % dense.transformer.wte.weight.shape[1] == 8
    found = retrofit.verify(model, dense, checks=["parameters"])["parameters"]
    assert found.status == "passed" and "2 widened" in found.measured, found


@pytest.mark.parametrize(("exact", "why", "ok"), [(True, "merged", False), (False, "merged", True), (False, "", False)])
def test_what_is_dropped_needs_a_reason_and_an_approximate_rewrite(exact: bool, why: str, ok: bool) -> None:
    model = Plain()
    reference = Reference.of(model)
    model.value.register_parameter("bias", None)
    fates = {name: Fate("kept", name) for name in reference.parameters.prints} | {"value.bias": Fate("dropped", "", why)}
    report = check_rewrite(model, reference, (Rewrite("test()", exact, ()),), fates, checks=("parameters",))
    assert report.ok is ok, str(report)


# ── NaN and Inf ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_with_a_weight_that_is_no_number_is_not_rewritten(value, verify):
    model = Own()
    with torch.no_grad():
        model.b[1].q.weight[3, 5] = value
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RetrofitError) as error:
        retrofit.apply(model, "sum()", verify=verify)
    assert (error.value.code, error.value.site) == ("not-finite", "b.1.q.weight")
    assert f"of its 1,152 values {int(math.isnan(value))} are NaN and {int(math.isinf(value))} infinite" in error.value.why
    assert type(model) is Own
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in model.state_dict().items())


@given(data=st.data(), dtype=st.sampled_from(STORED))
@settings(max_examples=60, deadline=None)
def test_what_is_finite(data, dtype):
    """The verdict is that of `isfinite` on the whole tensor, wherever in it the value is."""
    size = data.draw(st.integers(1, 40))
    values = torch.randn(size, 3, dtype=torch.float64)
    for place in data.draw(st.lists(st.integers(0, 3 * size - 1), max_size=2)):
        values.view(-1)[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1.0, 3e38]))  # two such have no sum
    tensor = values.nan_to_num(0, 1, -1).to(dtype) if dtype is torch.int64 else values.to(dtype)
    expected = bool(tensor.double().isfinite().all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "ROWS", 6)  # several chunks
        assert parameters.read(tensor)[1] == expected
        assert all(map(parameters.is_finite, parameters.chunks(tensor))) == expected


def test_a_model_without_values_and_one_without_weights_pass():
    require_finite(Own().to("meta"))
    require_finite(nn.ReLU())


def test_several_are_counted():
    model = Own()
    nn.init.constant_(model.c.weight, math.nan)
    nn.init.constant_(model.a.weight, math.inf)
    with pytest.raises(RetrofitError) as error:
        require_finite(model)
    assert error.value.site == "a.weight" and "1 more" in error.value.what
