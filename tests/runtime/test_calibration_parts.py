"""Calibration data in parts, recorded calls of modules, errors in which no token decides by its length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import zoo
from torch import nn

from retrofit.runtime.calibration import Calibration
from retrofit.runtime.calibration_split import HELD_OUT, sample_calibration, split_calibration
from retrofit.runtime.recorded_calls import record_calls
from retrofit.runtime.weighted_errors import token_weights, weighted_error


def windows(calibration: Calibration) -> list[int]:
    """The first id of each window: its number where windows are numbered."""
    return [int(row[0]) for batch in calibration.batches for row in batch["input_ids"]]


def numbered(count: int, length: int = 4) -> Calibration:
    ids = torch.arange(count).unsqueeze(1).expand(-1, length).contiguous() + 2
    return Calibration(tuple({"input_ids": part} for part in ids.split(3)))


@given(count=st.integers(1, 40), tokens=st.integers(1, 200))
@settings(deadline=None, max_examples=30)
def test_no_window_is_in_both_parts(count: int, tokens: int) -> None:
    fitted, held_out = (windows(part) for part in split_calibration(numbered(count), tokens))
    assert fitted and held_out and len(fitted) * 4 <= max(4, tokens)
    if count > 1:
        assert not set(fitted) & set(held_out)
    assert set(fitted) | set(held_out) <= set(range(2, count + 2))


def test_one_window_in_eight_is_held_out_and_a_sample_is_spread_over_the_data() -> None:
    fitted, held_out = (windows(part) for part in split_calibration(numbered(32), 1000))
    assert len(held_out) == 32 // HELD_OUT and len(fitted) == 28
    sampled = windows(sample_calibration(numbered(32), 16))
    assert sampled == [9, 17, 25, 33]
    assert windows(sample_calibration(numbered(5), 1000)) == [2, 3, 4, 5, 6]


def test_windows_of_other_lengths_are_batched_apart() -> None:
    calibration = Calibration(({"input_ids": torch.ones(2, 4).long()}, {"input_ids": torch.ones(3, 6).long()}))
    shapes = [tuple(batch["input_ids"].shape) for batch in sample_calibration(calibration, 100).batches]
    assert shapes == [(2, 4), (3, 6)]


def test_a_token_a_thousand_times_as_long_counts_as_one_of_the_usual_length() -> None:
    y = nn.functional.normalize(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    y[4] *= 1000
    weights = token_weights(y)
    assert weights[4] == pytest.approx(1e-6, rel=1e-3)
    torch.testing.assert_close(weights[torch.arange(9) != 4], torch.ones(8))
    found = y.clone()
    found[4] = 0  # missed whole: a ninth of what there is
    assert float(weighted_error(found, y)) == pytest.approx((1 / 9) ** 0.5, rel=1e-3)


def test_tokens_of_zeros_are_no_reason_to_fail() -> None:
    y = torch.zeros(4, 3)
    assert torch.isfinite(token_weights(y)).all() and float(weighted_error(y, y)) == 0


def test_a_recorded_call_can_be_repeated() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry)
    ids = zoo.inputs(entry, model, batch=2, length=6)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    path = "model.layers.1.self_attn"
    calls = record_calls(model, Calibration(({"input_ids": ids, "attention_mask": mask},)), [path])[path]
    assert len(calls) == 1
    repeated = calls[0].repeat(model.get_submodule(path))
    torch.testing.assert_close(repeated[0], calls[0].output[0])
    assert len(calls[0].real(repeated[0])) == int(mask.sum())
    assert not model.get_submodule(path)._forward_hooks


def test_a_forward_ends_after_the_calls_that_are_wanted() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry)
    ids = zoo.inputs(entry, model, batch=2, length=6)["input_ids"]
    later: list[int] = []
    handle = model.model.layers[2].register_forward_hook(lambda *_: later.append(1))
    record_calls(model, Calibration(({"input_ids": ids},)), ["model.layers.1.mlp"], calls=1)
    handle.remove()
    assert not later
