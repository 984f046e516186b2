"""Histories of tokens in a cache, against a plain list of everything that was pushed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticLayer

from retrofit.errors import RetrofitError
from retrofit.surgery.cache_memory import SLACK, CacheWithHistories, FixedHistory, TokenHistory, cache_among, histories_of

steps = st.lists(st.tuples(st.sampled_from(["push", "back", "reorder"]), st.integers(1, 9)), max_size=12)


@given(length=st.integers(1, 5), kind=st.sampled_from([TokenHistory, FixedHistory]), steps=steps)
@settings(deadline=None, max_examples=120)
def test_a_history_is_the_end_of_the_sequence(length: int, kind: Any, steps: list[tuple[str, int]]) -> None:
    history, sequence, counter = kind(length, torch.zeros(2, 0, 1), SLACK), torch.zeros(2, 0, 1), 0
    values = history.values
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
    assert kind is TokenHistory or (history.values is values and history.end == values.shape[1])


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


def test_a_fixed_history_moves_only_where_its_old_values_are_needed() -> None:
    """By a gradient, or where inference mode, which made it, is over; and it is marked wherever it is."""
    with torch.inference_mode():
        history = FixedHistory(2, torch.zeros(1, 0, 1), 0)
        history.push(torch.ones(1, 1, 1))
    history.push(torch.ones(1, 3, 1))
    stays = history.values
    history.push(torch.tensor([2.0, 3.0]).view(1, 2, 1))
    earlier = history.last()
    history.push(torch.zeros(1, 1, 1))
    assert history.values is stays and earlier.flatten().tolist() == [2, 3] and history.last().flatten().tolist() == [3, 0]
    weight = torch.ones((), requires_grad=True)
    history.push(weight.view(1, 1, 1))
    y = history.last().square()
    history.push(2 * weight.view(1, 1, 1))
    history.last().square().sum().add(y.sum()).backward()
    assert weight.grad == 2 + 2 + 8
    new = weight.expand(1, 4, 1).clone()
    history.push(new)
    with torch.no_grad():
        history.push(torch.zeros(1, 2, 1))
    assert new.flatten().tolist() == [1] * 4
    history.repeat(2)
    history.reset()
    assert history.values._dynamo_static_input_type and history.last().tolist() == [[[0.0], [0.0]]] * 2
    assert stays.flatten().tolist() == [3, 0]


class CroppableLayer(StaticLayer):
    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.add_(tokens_to_remove)


@pytest.mark.parametrize(("layer", "slack"), [(StaticLayer, 0), (CroppableLayer, SLACK)])
def test_a_static_cache_keeps_its_histories_where_they_are(layer: Any, slack: int) -> None:
    cache: Any = filled(Cache(layers=[layer(max_cache_len=8) for _ in range(2)]))
    history = histories_of(cache)["layer"] = TokenHistory.in_cache(cache, 2, torch.zeros(2, 0, 1))
    address = history.values.data_ptr()
    assert history.values.shape[1] == 2 + slack
    history.push(torch.arange(10.0).view(2, 5, 1))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert history.last().flatten().tolist() == [8, 9, 3, 4]
    if slack:
        cache.crop(-2)
        assert history.last().flatten().tolist() == [6, 7, 1, 2]
        cache.crop(-3)
        assert history.last().flatten().tolist() == [0, 0, 0, 0] and history.missing == 0
    cache.reset()
    assert histories_of(cache)["layer"] is history and not history.last().any()
    assert history.values.data_ptr() == address


def test_what_was_pushed_out_cannot_be_taken_back() -> None:
    history = TokenHistory(2, torch.zeros(1, 0, 1))
    history.push(torch.ones(1, SLACK + 10, 1))
    history.take_back(SLACK + 1)
    with refused(RetrofitError, code="cropped"):
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


def test_a_cache_with_histories_may_be_kept_in_a_file() -> None:
    """What follows a prompt may be computed from its cache in another process."""
    keys = torch.arange(6.0).view(1, 1, 3, 2)
    cache: Any = DynamicCache()
    cache.update(keys, -keys, 0)
    histories_of(cache)["one"] = TokenHistory.in_cache(cache, 2, keys[0])
    cache.histories["one"].push(keys[0])
    other = pickle.loads(pickle.dumps(EncoderDecoderCache(cache, DynamicCache()))).self_attention_cache
    assert type(other) is type(cache) and torch.equal(other.layers[0].keys, keys)
    assert torch.equal(other.histories["one"].last(), keys[0, :, 1:])
    other.crop(-1)
    assert torch.equal(other.histories["one"].last(), keys[0, :, :2])
    assert torch.equal(cache.histories["one"].last(), keys[0, :, 1:])


@pytest.mark.parametrize("how", ["crop", "reorder", "copy", "pickle", "reset"])
def test_a_cache_that_compiled_code_gives_histories_is_followed(how: str) -> None:
    """Compiled code cannot change its class: the first call of a method that moves tokens does."""
    keys = torch.arange(12.0).view(2, 1, 3, 2)

    def fill(keys: torch.Tensor) -> Any:
        cache: Any = DynamicCache()
        cache.update(keys, -keys, 0)
        histories_of(cache)["one"] = TokenHistory.in_cache(cache, 2, keys[:, 0])
        histories_of(cache)["one"].push(keys[:, 0])
        return cache

    torch._dynamo.reset()
    cache = torch.compile(fill, backend="eager", fullgraph=True)(keys)
    assert type(cache) is DynamicCache and torch.equal(cache.histories["one"].last(), keys[:, 0, 1:])
    if how in ("copy", "pickle"):
        other = copy.deepcopy(cache) if how == "copy" else pickle.loads(pickle.dumps(cache))
        other.crop(-1)
        assert torch.equal(other.histories["one"].last(), keys[:, 0, :2]) and torch.equal(other.layers[0].keys, keys[:, :, :2])
        assert torch.equal(cache.layers[0].keys, keys)
    elif how == "crop":
        cache.crop(-1)
        assert torch.equal(histories_of(cache)["one"].last(), keys[:, 0, :2])
    elif how == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(histories_of(cache)["one"].last(), keys.flip(0)[:, 0, 1:])
        assert torch.equal(cache.layers[0].keys, keys.flip(0))
    else:
        cache.reset()
        assert not histories_of(cache)
    histories = histories_of(cache)
    assert histories_of(cache) is histories and issubclass(type(cache), CacheWithHistories)


def test_the_cache_is_found_among_the_arguments() -> None:
    cache = DynamicCache()
    assert cache_among((1, None), {"past_key_values": cache}) is cache
    assert cache_among((cache,), {}) is cache
    assert cache_among((torch.zeros(1),), {"use_cache": True}) is None


def test_the_cache_of_continuous_batching_is_refused() -> None:
    """It has no room for histories: `generate_batch` with a layer that needs some would go on with wrong tokens."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    paged = object.__new__(PagedAttentionCache)
    with refused(RetrofitError, code="paged-cache") as caught:
        cache_among((torch.zeros(1),), {"cache": paged})
    assert "generate" in caught.value.remedy
