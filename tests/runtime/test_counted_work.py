"""Work on many items at once: results in order, one thread each, reports, and errors that leave torch's threads as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from retrofit.rewriting import apply_reported
from retrofit.runtime import counted_work, recordings
from retrofit.runtime.counted_work import counted, reported_to, side_by_side, time_left


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_of_one_each() -> None:
    inputs = list(torch.randn(7, 40, 40))
    threads: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return x @ x.t()

    assert all(map(torch.equal, side_by_side(work, inputs, "item", 1), [x @ x.t() for x in inputs]))
    assert threads == [1] * 7 and torch.get_num_threads() == 2
    threads.clear()
    side_by_side(work, inputs, "item", counted_work.ROOM)  # one fits in memory: it has all threads
    assert threads == [2] * 7


def test_an_error_ends_the_work_and_leaves_the_threads() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if item == 1:
            raise ValueError("item 1")

    with pytest.raises(ValueError, match="item 1"):
        side_by_side(work, range(100), "item", 1)
    assert len(done) < 100 and torch.get_num_threads() == 2


def test_no_gradient_is_recorded() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not any(one.requires_grad for one in side_by_side(lambda scale: weight * scale, [1.0, 2.0], "item", 1))


@given(st.lists(st.integers(), max_size=20))
def test_every_item_is_reported_with_its_number(items: list[int]) -> None:
    said: list[str] = []
    with reported_to(said.append):
        assert list(counted(items, "layer", len(items))) == items
    assert said == [f"layer {index} of {len(items)}" for index in range(1, len(items) + 1)]
    assert list(counted(items, "layer", len(items))) == items  # nobody listens


@given(st.floats(0, 1e6))
def test_an_estimate_is_near(seconds: float) -> None:
    words = time_left(seconds).split()
    assert words or seconds < counted_work.LONG
    if words:
        assert float(words[2]) * {"min": 60, "s": 1}[words[3]] == pytest.approx(seconds, rel=0.35)


@pytest.mark.parametrize("spec", ["sparse-ffn(sparsity=4, active=2)", "shared-moe(groups=1, experts=2)"])
def test_layers_fitted_at_once_are_those_fitted_one_by_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On inputs that were recorded at once, too, or each in a run of its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    windows = torch.randint(3, 60, (40, 16))
    found, runs = list[dict[str, torch.Tensor]](), list[int]()
    for threads, room in ((2, recordings.ROOM), (1, recordings.ROOM), (2, 1)):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        monkeypatch.setattr(recordings, "ROOM", room)
        monkeypatch.setattr(recordings, "own_bytes", lambda model: 0)
        said: list[str] = []
        how: dict[str, Any] = {"calibration": windows, "verify": False, "count_flops": False, "progress": said.append}
        applied = apply_reported(copy.deepcopy(model), spec, **how)
        runs.append(sum("batch 1 of" in one for one in said))
        found.append(applied.model.state_dict())
        if spec.startswith("sparse-ffn"):
            assert [one for one in said if "fitting" in one] == [f"fitting feed-forward {index} of 3" for index in (1, 2, 3)]
    assert runs[0] == runs[1] < runs[2]
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())
