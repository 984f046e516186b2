"""Histories of tokens in a cache, against a plain list of everything that was pushed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from retrofit.errors import RetrofitError
from retrofit.surgery.cache_memory import SLACK, TokenHistory, cache_among, histories_of

steps = st.lists(st.tuples(st.sampled_from(["push", "back", "reorder"]), st.integers(1, 9)), max_size=12)


@given(length=st.integers(1, 5), steps=steps)
@settings(deadline=None, max_examples=60)
def test_a_history_is_the_end_of_the_sequence(length: int, steps: list[tuple[str, int]]) -> None:
    history, sequence, counter = TokenHistory(length, torch.zeros(2, 0, 1)), torch.zeros(2, 0, 1), 0
    for what, count in steps:
        if what == "push":
            new = torch.arange(counter, counter + 2 * count).view(2, count, 1).float() + 1
            counter += 2 * count
            history.push(new)
            sequence = torch.cat([sequence, new], 1)
        elif what == "back":
            history.take_back(min(count, sequence.shape[1]))
            sequence = sequence[:, : sequence.shape[1] - min(count, sequence.shape[1])]
        else:
            rows = torch.tensor([count % 2, 0])
            history.choose(rows)
            sequence = sequence[rows]
    expected = torch.cat([torch.zeros(2, length, 1), sequence], 1)[:, -length:]
    assert torch.equal(history.last(), expected)


def test_decoding_writes_in_place_where_it_may() -> None:
    """Step by step in one buffer, which changes neither a tensor returned earlier nor a gradient."""
    history = TokenHistory(2, torch.zeros(1, 0, 1))
    history.push(torch.tensor([1.0]).view(1, 1, 1))
    earlier, buffers = history.last(), set()
    for step in range(2, 3 * SLACK):
        history.push(torch.full((1, 1, 1), float(step)))
        buffers.add(history.values.data_ptr())
        assert history.last().flatten().tolist() == [step - 1, step]
    assert earlier.flatten().tolist() == [0, 1] and len(buffers) < 5
    weight = torch.ones((), requires_grad=True)
    history.push(weight.view(1, 1, 1))
    seen = history.last()
    history.push(2 * weight.view(1, 1, 1))
    (seen.square().sum() + history.last().square().sum()).backward()
    assert weight.grad == 2 + 2 + 8


def test_what_was_pushed_out_cannot_be_taken_back() -> None:
    history = TokenHistory(2, torch.zeros(1, 0, 1))
    history.push(torch.ones(1, SLACK + 10, 1))
    history.take_back(SLACK + 1)
    with pytest.raises(RetrofitError, match="cropped"):
        history.last()
    history.push(torch.ones(1, 2, 1))
    assert history.last().shape == (1, 2, 1)


def filled(cache: Any, tokens: int = 5) -> Cache:
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for layer in range(2):
        inner.update(torch.randn(2, 1, tokens, 4), torch.randn(2, 1, tokens, 4), layer)
    return cache  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [DynamicCache, lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())], ids=["decoder", "both"]
)
def test_what_happens_to_the_keys_happens_to_the_histories(make: Any) -> None:
    cache: Any = filled(make())
    kind = type(cache)
    history = histories_of(cache)["layer"] = TokenHistory(2, torch.zeros(2, 0, 1))
    history.push(torch.arange(10.0).view(2, 5, 1))
    assert isinstance(cache, kind) and type(cache).__name__ == kind.__name__
    cache.reorder_cache(torch.tensor([1, 1]))
    assert history.last().flatten().tolist() == [8, 9, 8, 9]
    cache.batch_repeat_interleave(2)
    assert history.last().shape[0] == 4
    cache.batch_select_indices(torch.tensor([0]))
    assert history.last().flatten().tolist() == [8, 9]
    length = cache.get_seq_length()
    cache.crop(-1)
    assert cache.get_seq_length() == length - 1
    assert history.last().flatten().tolist() == [7, 8]
    twin = copy.deepcopy(cache)
    histories_of(twin)["layer"].push(torch.zeros(1, 1, 1))
    assert history.last().flatten().tolist() == [7, 8]
    cache.reset()
    assert not histories_of(cache)


def test_the_cache_is_found_among_the_arguments() -> None:
    cache = DynamicCache()
    assert cache_among((1, None), {"past_key_values": cache}) is cache
    assert cache_among((cache,), {}) is cache
    assert cache_among((torch.zeros(1),), {"use_cache": True}) is None
