"""Calibration data in parts, recorded calls of modules, errors in which no token decides by its length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import zoo
from torch import nn

from retrofit.inputs import model_memory
from retrofit.inputs.calibration import HELD_OUT, Calibration, sample_calibration, split_calibration
from retrofit.numerics.distances import token_weights, weighted_error


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
    calls = Calibration(({"input_ids": ids, "attention_mask": mask},)).record(model, [path])[path]
    assert len(calls) == 1
    repeated = calls[0].repeat(model.get_submodule(path))
    torch.testing.assert_close(repeated[0], calls[0].output[0])
    assert len(calls[0].real(repeated[0])) == int(mask.sum())
    assert not model.get_submodule(path)._forward_hooks


@pytest.mark.parametrize(
    "record",
    [
        lambda model, data, paths: data.record(model, paths),
        lambda model, data, paths: data.observe(model, {paths[0]: lambda x: None}),
    ],
)
def test_a_forward_ends_after_the_calls_that_are_wanted(record: Callable[[nn.Module, Calibration, list[str]], object]) -> None:
    """The first one shows how many there are, so it is run whole."""
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry)
    ids = zoo.inputs(entry, model, batch=2, length=6)["input_ids"]
    earlier, later = list[int](), list[int]()
    for depth, calls in ((0, earlier), (2, later)):
        model.model.layers[depth].register_forward_hook(lambda *_, calls=calls: calls.append(1))
    record(model, Calibration(({"input_ids": ids},) * 3), ["model.layers.1.mlp"])
    assert (len(earlier), len(later)) == (3, 1)


def test_where_the_first_inputs_miss_a_module_every_forward_is_run_whole() -> None:
    class Either(nn.Module):
        """Inputs of more than two tokens go through another module too, which comes first."""

        def __init__(self) -> None:
            super().__init__()
            self.longer, self.every = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.every(self.longer(x) if x.shape[1] > 2 else x)

    data = Calibration(tuple({"x": torch.ones(1, length, 4)} for length in (2, 3, 3)))
    tokens = {"longer": 0, "every": 0}

    def counter(path: str) -> Callable[[torch.Tensor], None]:
        return lambda x: tokens.update({path: tokens[path] + len(x)})

    data.observe(Either(), {path: counter(path) for path in tokens})
    assert tokens == {"longer": 6, "every": 8}
    assert {path: len(calls) for path, calls in data.record(Either(), list(tokens)).items()} == {"longer": 2, "every": 3}


@given(sizes=st.lists(st.integers(0, 50), max_size=12), room=st.integers(1, 120))
def test_what_is_recorded_in_one_run_is_about_what_there_is_room_for(sizes: list[int], room: int) -> None:
    given = {str(index): size for index, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_memory, "ROOM", room)
        groups = model_memory.groups_in_room(given, nn.Module())
        with model_memory.recordings_kept_by(lambda tensor: tensor):  # on a disk, say
            assert len(model_memory.groups_in_room(given, nn.Module())) == min(1, len(sizes))
    assert [path for group in groups for path in group] == list(given)
    assert all(group and sum(given[path] for path in group) <= room + max(sizes) for group in groups)
    assert len(groups) <= max(1, -(-sum(sizes) // room))
