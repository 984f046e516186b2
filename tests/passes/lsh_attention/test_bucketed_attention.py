"""Attention in buckets: against a loop over queries and keys, against transformers' Reformer, against torch where it is exact."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from retrofit.inputs.model_memory import peak_bytes
from retrofit.passes.lsh_attention import seen_keys
from retrofit.passes.lsh_attention.bucketed_attention import OWN, BucketedAttention
from retrofit.passes.lsh_attention.key_buckets import SPARE, hash_buckets, random_rotations
from retrofit.passes.lsh_attention.key_orders import order_by_bucket
from retrofit.passes.lsh_attention.seen_keys import Operands, combine, one_round

CHUNK, WIDTH = 4, 6


def attention(
    causal: bool, shared: bool = False, heads: int = 2, rounds: int = 2, buckets: int = 4, chunk: int = CHUNK
) -> BucketedAttention:
    rotations = random_rotations(WIDTH, rounds, buckets, 0, torch.empty((), dtype=torch.float64))
    return BucketedAttention("attention", heads, causal, shared, chunk, rotations)


def drawn(batch: int, heads: int, tokens: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(batch, heads, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(tokens: int, batch: int = 2, heads: int = 2, key_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(batch, heads, tokens, seed=1), drawn(batch, key_heads, tokens, seed=2), drawn(batch, key_heads, tokens, 5, seed=3)


# ── A loop over queries and keys ─────────────────────────────────────────────────────────────────────────────────────────────────


def bucket(x: list[float], rotation: list[list[float]]) -> int:
    """argmax [x R; −x R]."""
    y = [sum(x[i] * rotation[i][j] for i in range(len(x))) for j in range(len(rotation[0]))]
    both = y + [-one for one in y]
    return both.index(max(both))


def seen_in_loop(module: BucketedAttention, q: Tensor, k: Tensor, real: list[bool]) -> list[set[int]]:
    """The keys that each query of one head sees."""
    n, chunk = len(q), module.chunk
    seen = [set(range(max(0, i - chunk + 1), i + 1)) if module.causal else set() for i in range(n)]
    for rotation in module.rotations.tolist():
        places = [bucket(one, rotation) if real[j] else math.inf for j, one in enumerate(k.tolist())]
        for i, own in enumerate(q.tolist()):
            mine = bucket(own, rotation)
            if module.causal:
                seen[i] |= set([j for j in range(i + 1) if places[j] == mine][-chunk:])
                continue
            order = sorted(range(n), key=lambda j: (places[j], j))
            before = sum((places[j], j) <= (mine, i) for j in order)
            number = max(before - 1, 0) // chunk
            seen[i] |= set(order[max(number - 1, 0) * chunk :][: 2 * chunk])
    return seen


def in_loop(module: BucketedAttention, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """The attention query by query; `visible` is (batch, n_q, n_k)."""
    batch, heads, n_q, width = q.shape
    group, y = heads // k.shape[1], torch.zeros(batch, heads, n_q, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group], v[b, h // group]
            all_seen = seen_in_loop(module, q[b, h], keys, visible[b].any(0).tolist())
            s = q[b, h] @ keys.T / width**0.5
            if module.shared:
                s = (q[b, h] @ (keys / keys.norm(dim=-1, keepdim=True)).T).fill_diagonal_(OWN)
            s = s if bias is None else s + bias[h]
            for i, seen in enumerate(all_seen):
                if module.causal and bool(visible[b, i].any()):
                    seen.add(int(visible[b, i].nonzero()[0]))
                kept = [j for j in sorted(seen) if visible[b, i, j] and (j <= i or not module.causal)]
                y[b, h, i] = s[i, kept].softmax(0) @ values[kept] if kept else values[i]
    return y


def everything(batch: int, tokens: int, causal: bool) -> Tensor:
    visible = torch.ones(batch, tokens, tokens, dtype=torch.bool)
    return visible.tril() if causal else visible


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("key_heads", "tokens"), [(2, 19), (1, 24)])
def test_it_is_a_softmax_over_the_keys_of_its_buckets(causal: bool, shared: bool, key_heads: int, tokens: int) -> None:
    module, (q, k, v) = attention(causal, shared), operands(tokens, key_heads=key_heads)
    expected = in_loop(module, q, k, v, everything(2, tokens, causal))
    found = module(q, k, v, is_causal=causal, enable_gqa=key_heads == 1)
    torch.testing.assert_close(found, expected)
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert not torch.allclose(found, dense, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("key_heads", "tokens", "chunk"), [(2, 19, 4), (1, 57, 4), (2, 40, 5)])
@torch.no_grad()
def test_the_fused_kernel_computes_the_same(
    causal: bool, key_heads: int, tokens: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, without gradients; part by part too."""
    module = attention(causal, chunk=chunk)
    q, k, v = drawn(2, 2, tokens, seed=1), drawn(2, key_heads, tokens, seed=2), drawn(2, key_heads, tokens, seed=3)
    expected = in_loop(module, q, k, v, everything(2, tokens, causal)).float()
    given = {"is_causal": causal, "enable_gqa": key_heads == 1}
    calls: list[int] = []
    fused = seen_keys.fused

    def counting(*args: Any) -> Any:
        calls.append(len(args[0]))
        return fused(*args)

    monkeypatch.setattr(seen_keys, "fused", counting)
    for at_once in (seen_keys.AT_ONCE, 1):
        monkeypatch.setattr(seen_keys, "AT_ONCE", at_once)
        torch.testing.assert_close(module.float()(q.float(), k.float(), v.float(), **given), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) > 2
    later = module(q[:, :, -9:].float(), k.float(), v.float(), enable_gqa=key_heads == 1) if causal else None
    if later is not None:  # the last tokens alone
        torch.testing.assert_close(later, expected[:, :, -9:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["_no_such_kernel", "_scaled_dot_product_flash_attention"], ids=["none", "with-other-arguments"])
@torch.no_grad()
def test_without_the_private_kernel_the_numbers_are_the_same(causal: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention(causal).float()
    q, k, v = (drawn(2, 2, 57, seed=seed).float() for seed in (1, 2, 3))
    expected = module(q, k, v, is_causal=causal)
    assert seen_keys.is_fused(q, k, v)
    monkeypatch.setattr(seen_keys, "KERNEL", name)
    monkeypatch.setattr(seen_keys, "fused", None)  # an error where it is called
    assert not seen_keys.is_fused(q, k, v)
    torch.testing.assert_close(module(q, k, v, is_causal=causal), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_and_biases_hide_and_weigh_what_they_do_in_the_dense_attention(causal: bool) -> None:
    module, (q, k, v) = attention(causal), operands(21)
    visible = everything(2, 21, causal)
    visible[0, :, :5] = False  # padding on the left
    visible[1, :, 17:] = False  # and on the right
    expected = in_loop(module, q, k, v, visible)
    real = visible.any(1)
    found = module(q, k, v, attn_mask=visible.unsqueeze(1)).transpose(1, 2)[real]
    torch.testing.assert_close(found, expected.transpose(1, 2)[real])
    bias = drawn(1, 2, 21, 21, seed=9)
    added = torch.where(visible.unsqueeze(1), bias, torch.finfo(torch.float64).min)
    expected = in_loop(module, q, k, v, visible, bias[0])
    torch.testing.assert_close(module(q, k, v, attn_mask=added).transpose(1, 2)[real], expected.transpose(1, 2)[real])


def test_a_query_that_sees_nothing_has_its_own_value_and_no_gradient_is_infinite() -> None:
    module, (q, k, v) = attention(causal=True), operands(13)
    visible = everything(2, 13, causal=True)
    visible[:, 6] = False
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    found = module(*leaves, attn_mask=visible.unsqueeze(1))
    torch.testing.assert_close(found[:, :, 6], v[:, :, 6])
    found.sum().backward()
    assert all(bool(one.grad.isfinite().all()) for one in leaves)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_computed_one_by_one_are_those_computed_at_once(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (q, k, v) = attention(causal), operands(19, key_heads=1)
    visible = everything(2, 19, causal).unsqueeze(1).expand(-1, 2, -1, -1).clone()
    visible[0, 1, :, 3] = False  # for one head of one sequence only
    whole = module(q, k, v, attn_mask=visible, enable_gqa=True)
    monkeypatch.setattr(seen_keys, "AT_ONCE", 1)
    torch.testing.assert_close(module(q, k, v, attn_mask=visible, enable_gqa=True), whole)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_is_that_of_the_numbers_with_the_buckets_fixed(shared: bool) -> None:
    module, leaves = attention(True, shared), [one[:1, :, :11].clone().requires_grad_() for one in operands(11)]
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, is_causal=True), leaves, eps=1e-7, fast_mode=True)


# ── Where it is exact, and what it must not depend on ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_the_dense_attention_bit_for_bit_and_the_first_chunk_of_many(causal: bool) -> None:
    module, (q, k, v) = attention(causal), operands(16)
    first = [one[:, :, :CHUNK] for one in (q, k, v)]
    expected = F.scaled_dot_product_attention(*first, is_causal=causal)
    assert torch.equal(module(*first, is_causal=causal), expected)
    if causal:
        torch.testing.assert_close(module(q, k, v, is_causal=True)[:, :, :CHUNK], expected)
    else:  # two chunks see each other
        both = [one[:, :, : 2 * CHUNK] for one in (q, k, v)]
        torch.testing.assert_close(module(*both), F.scaled_dot_product_attention(*both))


def test_later_tokens_change_nothing_before_them() -> None:
    module, (q, k, v) = attention(causal=True), operands(24)
    whole = module(q, k, v, is_causal=True)
    for length in (5, 11, 23):
        part = module(*(one[:, :, :length] for one in (q, k, v)), is_causal=True)
        torch.testing.assert_close(part, whole[:, :, :length])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", [(1,) * 24, (9, 1, 2, 7, 1, 4)])
def test_steps_on_a_cache_find_what_one_forward_finds(shared: bool, lengths: tuple[int, ...]) -> None:
    module, (q, k, v) = attention(True, shared), operands(24)
    whole, cache, parts, start = module(q, k, v, is_causal=True), DynamicCache(), [], 0
    for length in lengths:
        stop = start + length
        mask = torch.ones(stop, stop, dtype=torch.bool).tril()[start:stop]
        cache.update(k[:, :, start:stop], v[:, :, start:stop], 0)
        parts.append(module(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], attn_mask=mask, cache=cache))
        start = stop
    torch.testing.assert_close(torch.cat(parts, 2), whole)


@dataclasses.dataclass
class Decoding:
    """An attention that decodes on a cache, next to the same without any: that compares its queries with all keys."""

    module: BucketedAttention
    batch: int
    heads: int = 4
    key_heads: int = 2
    tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.cache = DynamicCache()
        self.mask = torch.ones(self.batch, 0, dtype=torch.bool)

    def step(self, count: int, shown: Tensor | None = None, masked: bool = False) -> None:
        """`count` tokens more, of which those `shown` (batch, count) are no padding; the last result is that without a cache."""
        self.seed += 1
        q, k, v = (
            drawn(self.batch, heads, count, seed=10 * self.seed + n) for n, heads in enumerate((self.heads, *[self.key_heads] * 2))
        )
        keys, values = self.cache.update(k, v, 0)
        self.mask = torch.cat([self.mask, torch.ones(self.batch, count, dtype=torch.bool) if shown is None else shown], 1)
        n = keys.shape[2]
        visible = torch.ones(n, n, dtype=torch.bool).tril()[n - count :] & self.mask[:, None, None]
        given = {"attn_mask": visible} if masked or count > 1 or not bool(self.mask.all()) else {}
        found = self.module(q, keys, values, **given, enable_gqa=True, cache=self.cache)
        expected = self.module(q, keys, values, **given, enable_gqa=True)
        torch.testing.assert_close(found, expected)

    @property
    def listed(self) -> Any:
        """The lists that the cache keeps."""
        return self.cache.histories["attention"].lists  # type: ignore[attr-defined]

    def crop(self, length: int) -> None:
        self.cache.crop(length - self.cache.get_seq_length())
        self.mask = self.mask[:, :length]

    def choose(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.mask = self.mask[rows]


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys(shared: bool) -> None:
    run = Decoding(attention(True, shared, heads=4, buckets=6), batch=3)
    run.step(70)
    for count in (1, 1, 3, 1, 2, 9, 1):  # what is behind nine new tokens is listed anew
        run.step(count)
    assert run.listed is not None and run.listed.room == CHUNK + SPARE
    run.choose([2, 2, 0])  # beams
    run.step(1)
    run.crop(run.mask.shape[1] - 2)
    for _ in range(4):  # up to where the buckets of what was taken back would be those of so many keys
        run.step(1)
    for length in (83, 82, 60, 40):  # tokens taken back, a few and many
        run.crop(length)
        run.step(1)
        run.step(2)
    run.cache.batch_repeat_interleave(2)
    run.mask, run.batch = run.mask.repeat_interleave(2, 0), 6
    run.step(1)
    run.cache.batch_select_indices(torch.tensor([5, 0, 3]))
    run.mask, run.batch = run.mask[[5, 0, 3]], 3
    run.step(1, masked=True)


@torch.no_grad()
def test_padding_is_in_no_list_wherever_it_is() -> None:
    run = Decoding(attention(True, heads=4, buckets=2), batch=3)
    shown = torch.ones(3, 60, dtype=torch.bool)
    shown[0, :25], shown[1, 20:], shown[2, 5:40:2] = False, False, False  # left, right, in between
    run.step(60, shown)
    for number in range(12):
        run.step(1, torch.tensor([[True], [number > 3], [number % 2 == 0]]))
    hidden, run.mask = run.mask.clone(), run.mask | (torch.arange(72) == 30)
    run.step(1)  # a key is shown that was hidden
    run.mask = torch.cat([hidden, torch.ones(3, 1, dtype=torch.bool)], 1)
    run.crop(70)
    run.choose([1, 1, 2])
    run.step(2)
    run.mask[:] = True
    run.step(1)


@torch.no_grad()
def test_a_step_reads_no_more_of_a_long_cache_than_of_a_short_one() -> None:
    """What a step makes is the same at 8 times the length; it reads lists, and of keys and values those it sees."""
    made: dict[int, int] = {}
    for tokens in (500, 4000):
        run = Decoding(attention(True, heads=4, buckets=64), batch=1)
        run.step(tokens)
        run.step(1)
        q, k, v = drawn(1, 4, 1), drawn(1, 2, 1, seed=1), drawn(1, 2, 1, seed=2)
        layer = run.cache.layers[0]
        keys, values = torch.cat([layer.keys, k], 2), torch.cat([layer.values, v], 2)

        def step(q: Tensor = q, keys: Tensor = keys, values: Tensor = values, run: Decoding = run) -> None:
            run.module(q, keys, values, enable_gqa=True, cache=run.cache)

        made[tokens] = peak_bytes(step)
    assert made[4000] < 1.1 * made[500]


def test_a_decoding_step_hashes_its_own_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit.passes.lsh_attention import key_buckets

    hashed: list[int] = []

    def counting(x: Tensor, rotations: Tensor) -> Tensor:
        hashed.append(x.shape[-2])
        return hash_buckets(x, rotations)

    monkeypatch.setattr(key_buckets, "hash_buckets", counting)
    module, (q, k, v), cache = attention(causal=True), operands(24), DynamicCache()
    cache.update(k[:, :, :20], v[:, :, :20], 0)
    module(q[:, :, :20], k[:, :, :20], v[:, :, :20], is_causal=True, cache=cache)
    for stop in (21, 22):
        cache.update(k[:, :, stop - 1 : stop], v[:, :, stop - 1 : stop], 0)
        module(q[:, :, stop - 1 : stop], k[:, :, :stop], v[:, :, :stop], cache=cache)
    assert hashed == [20, 1, 1]


def test_queries_packed_as_heads_of_one_token_are_heads() -> None:
    """As transformers has it where heads share a key and one token is decoded."""
    module, (q, k, v) = attention(causal=True), operands(24, key_heads=1)
    expected = module(q[:, :, -1:], k, v, enable_gqa=True)
    packed = module(q[:, :, -1:].reshape(2, 1, 2, WIDTH), k, v)
    torch.testing.assert_close(packed.reshape(expected.shape), expected)


# ── Reformer ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reformer(rounds: int, is_decoder: bool) -> Any:
    sizes = {"hidden_size": 12, "num_attention_heads": 2, "attention_head_size": WIDTH, "num_hashes": rounds, "num_buckets": 4}
    chunks = {"lsh_attn_chunk_length": CHUNK, "lsh_num_chunks_before": 1, "lsh_num_chunks_after": 0, "hash_seed": 3}
    torch.manual_seed(0)
    config = ReformerConfig(is_decoder=is_decoder, lsh_attention_probs_dropout_prob=0.0, **sizes, **chunks)
    return LSHSelfAttention(config, layer_idx=0).double().eval()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_rounds_are_those_of_reformer(rounds: int, is_decoder: bool, padded: bool) -> None:
    """On the same weights and hashes, for all tokens but those of first chunks: Reformer's see the last chunk of another round.

    Reformer counts a key in every round in which it is seen; so do rounds that are computed each by itself.
    """
    layer, tokens = reformer(rounds, is_decoder), 8 * CHUNK
    x, mask = torch.randn(2, tokens, 12, dtype=torch.float64), torch.ones(2, tokens, dtype=torch.long)
    if padded:
        mask[1, -7:] = 0
    expected = layer(x, attention_mask=mask)
    q, v = (layer._split_hidden_size_dim(one(x), 2, WIDTH) for one in (layer.query_key, layer.value))
    number = 4 + padded  # of buckets: padding has its own
    buckets = (expected.buckets - number * torch.arange(rounds).view(-1, 1)).permute(2, 0, 1, 3).flatten(1, 2)
    k = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / WIDTH**0.5
    given = Operands(
        q=q.flatten(0, 1),
        k=k.flatten(0, 1),
        v=v.flatten(0, 1),
        mask=mask.bool().view(2, 1, 1, -1),
        positions=torch.arange(tokens),
        first_keys=None,
        heads=2,
        group=1,
        causal=is_decoder,
        own=-1e5,
        scale=1.0,
    )
    orders = [order_by_bucket(one, one, given.positions, number, CHUNK, causal=False) for one in buckets]
    found = combine(given, [one_round(given, order, ()) for order in orders])
    found = layer._merge_hidden_size_dims(found.view(2, 2, tokens, WIDTH), 2, WIDTH)
    first = torch.stack([order.chunks.view(2, 2, -1) == 0 for order in orders]).any(0).any(1)
    compared = ~first & mask.bool()
    assert int(compared.sum()) > 20
    torch.testing.assert_close(found[compared], expected.hidden_states[compared])


@torch.no_grad()
def test_hashes_are_those_of_reformer() -> None:
    layer = reformer(3, is_decoder=False)
    q = drawn(2, 2, 9)
    expected = layer._hash_vectors(q, 3, None).view(2, 2, 3, 9) - 4 * torch.arange(3).view(-1, 1)
    torch.manual_seed(3)
    rotations = torch.randn(2, WIDTH, 3, 2, dtype=torch.float64)
    for head in range(2):
        found = hash_buckets(q[:, head], rotations[head].permute(1, 0, 2))  # (rounds, batch, tokens)
        assert torch.equal(found, expected[:, head].transpose(0, 1))
