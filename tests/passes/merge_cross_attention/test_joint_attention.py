"""One softmax over two sets of keys: held against loops, for shared heads and masks of every kind; the second layers of a cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, T5Config

from retrofit.passes.merge_cross_attention.joint_attention import JointAttention
from retrofit.passes.merge_cross_attention.merged_layer import second_layers

HEADS, WIDTH = 4, 6


def mask_of(kind: str, batch: int, queries: int, keys: int, generator: torch.Generator) -> Tensor | None:
    """A mask that leaves every query its first key."""
    if kind == "none":
        return None
    shown = torch.rand(batch, 1, 1 if kind == "padding" else queries, keys, generator=generator) > 0.4
    shown[..., 0] = True
    if kind == "bias":
        bias = torch.randn(batch, HEADS, queries, keys, generator=generator)
        return bias.masked_fill(~shown, torch.finfo(bias.dtype).min)
    return shown


def by_loops(sets: list[dict[str, Any]], weights: list[float]) -> Tensor:
    """Σ_j softmax_j(scale · q·k_j + mask_j + log w) v_j over the keys of all sets."""
    batch, queries = len(sets[0]["query"]), sets[0]["query"].shape[2]
    result = torch.zeros(batch, HEADS, queries, WIDTH)
    for b in range(batch):
        for h in range(HEADS):
            for i in range(queries):
                total, sum_ = 0.0, torch.zeros(WIDTH)
                for one, w in zip(sets, weights, strict=True):
                    shared = HEADS // one["key"].shape[1]
                    for j in range(one["key"].shape[2]):
                        s = float(one["query"][b, h, i] @ one["key"][b, h // shared, j]) * one["scale"]
                        if one["attn_mask"] is not None:
                            shown = one["attn_mask"].expand(batch, HEADS, queries, -1)[b, h, i, j]
                            s = s + float(shown) if shown.is_floating_point() else s if bool(shown) else -math.inf
                        if one["is_causal"] and j > i:
                            s = -math.inf
                        p = w * math.exp(s)
                        total, sum_ = total + p, sum_ + p * one["value"][b, h // shared, j]
                result[b, h, i] = sum_ / total
    return result


kinds = st.sampled_from(("none", "padding", "boolean", "bias"))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    queries=st.sampled_from((1, 3, 12)),
    shared=st.sampled_from((1, 2, 4)),
    masks=st.tuples(kinds, kinds),
    causal=st.booleans(),
    one_query=st.booleans(),
    weight=st.sampled_from((1.0, 0.3)),
)
def test_it_is_one_softmax_over_the_keys_of_both_sets(
    seed: int, queries: int, shared: int, masks: tuple[str, str], causal: bool, one_query: bool, weight: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    causal = causal and masks[0] == "none"
    sets: list[dict[str, Any]] = []
    for kind, keys in zip(masks, (queries, 5), strict=True):
        key, value = (torch.randn(2, HEADS // shared, keys, WIDTH, generator=generator) for _ in range(2))
        query, mask = torch.randn(2, HEADS, queries, WIDTH, generator=generator), mask_of(kind, 2, queries, keys, generator)
        sets.append({"query": query, "key": key, "value": value, "attn_mask": mask, "is_causal": False, "scale": 0.4})
    sets[0]["is_causal"] = causal
    attention = JointAttention(HEADS, "none", encoder_is_own=False, weight=weight, like=torch.empty(()))
    other = {**sets[1], "query": None} if one_query else sets[1]
    if one_query:
        sets[1]["query"] = sets[0]["query"]
    found = attention(**sets[0], enable_gqa=shared > 1, other=other)
    torch.testing.assert_close(found, by_loops(sets, [1.0, weight]), rtol=1e-4, atol=1e-5)


def test_heads_that_come_as_queries_of_one_token_stay_separate() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, 1, WIDTH, generator=generator)
    own, other = ([torch.randn(2, 2, keys, WIDTH, generator=generator) for _ in range(2)] for keys in (4, 7))
    attention = JointAttention(HEADS, "none", encoder_is_own=False, weight=1.0, like=torch.empty(()))
    besides = {"query": None, "key": other[0], "value": other[1], "scale": 0.4}
    packed = attention(query.reshape(2, 2, 2, WIDTH), *own, scale=0.4, other=besides)
    assert packed.shape == (2, 2, 2, WIDTH)
    torch.testing.assert_close(packed.reshape(query.shape), attention(query, *own, scale=0.4, enable_gqa=True, other=besides))


@pytest.mark.parametrize("static", [False, True])
def test_second_layers_follow_what_generation_does_to_a_cache(static: bool) -> None:
    config = T5Config(num_layers=2, d_model=16, d_kv=8, num_heads=2)
    parts = [StaticCache(config=config, max_cache_len=6) if static else DynamicCache() for _ in range(2)]
    cache, row = EncoderDecoderCache(*parts), torch.randn(3, 2, 4, 8)
    for layer in range(2):
        with second_layers(cache, 2) as second:
            assert second.get_seq_length(layer) == 0 and not second.is_updated[layer]
            second.self_attention_cache.update(row + layer, row, layer)
            second.cross_attention_cache.update(row - layer, row, layer)
            second.is_updated[layer] = True
        cache.self_attention_cache.update(row, row, layer)
    assert [len(one.layers) for one in (cache.self_attention_cache, cache.cross_attention_cache)] == [4, 4]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    with second_layers(cache, 2) as second:
        assert second.is_updated == {0: True, 1: True}
        torch.testing.assert_close(second.self_attention_cache.layers[1].keys[:, :, :4], (row + 1)[[2, 0, 0]])
        torch.testing.assert_close(second.cross_attention_cache.layers[1].keys[:, :, :4], (row - 1)[[2, 0, 0]])
    if not static:
        cache.crop(-1)
        assert cache.self_attention_cache.layers[3].keys.shape[2] == 3
    cache.reset()
    assert not any(cache.is_updated.values())
