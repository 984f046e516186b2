"""Faults of lsh-attention: hashes, orders and stretches of keys, tiles, rounds and their sum, masks, the cache."""

from __future__ import annotations

import functools

from mutant import Mutant, on

SPEC = "lsh-attention(rounds=2, buckets=4, chunk=4)"
MODELS, DECODERS = "gpt2 llama bert", "gpt2 llama"
DEFAULT, DECODING, ENCODING = on(MODELS, SPEC), on(DECODERS, SPEC), on("bert", SPEC)
SHARED = on("bert", "lsh-attention(rounds=2, buckets=4, chunk=4, share=queries)")
LISTED = on(DECODERS, "lsh-attention(rounds=1, buckets=2, chunk=2)")  # few keys are seen, so that lists are read
TESTS = "tests/passes/lsh_attention/test_bucketed_attention.py::"

hashes = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/key_buckets.py")
orders = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/key_orders.py")
attention = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/seen_keys.py")
module = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/bucketed_attention.py")
kept = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/key_buckets.py")
lists = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/key_buckets.py")
tiles = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/seen_keys.py")
whole = functools.partial(Mutant, "lsh-attention", "passes/lsh_attention/lsh_attention.py")

MUTANTS = [
    hashes(
        "a vector and its opposite have one bucket",
        "(y.gather(-1, largest) < 0)",
        "(y.gather(-1, largest) < -torch.inf)",
        trials=DEFAULT,
    ),
    hashes(
        "every round hashes by the first rotation",
        "[buckets_of(x, rotation) for rotation in rotations]",
        "[buckets_of(x, rotations[0]) for rotation in rotations]",
        trials=DEFAULT,
    ),
    orders(
        "a query stands before the key at its own position",
        " ends * 2 + 1",
        " ends * 2 - 1",
        trials=DEFAULT,
    ),
    orders(
        "the last keys before a query may be of another bucket",
        "torch.maximum(before - chunk, start)",
        "(before - chunk).clamp(min=0)",
        trials=DECODING,
    ),
    orders(
        "a query sees one key too few of its bucket",
        "torch.maximum(before - chunk, start)",
        "torch.maximum(before - chunk + 1, start)",
        trials=DECODING,
    ),
    orders(
        "without causality a query sees its own chunk only",
        "first = (chunks - 1).clamp(min=0) * chunk\n    return KeyOrder(",
        "first = chunks * chunk\n    return KeyOrder(",
        trials=ENCODING,
    ),
    orders(
        "where a tile is full the next query overwrites its first",
        "tile = (needed.cumsum(-1) - needed).gather(-1, order.chunks) + within // chunk",
        "tile = (needed.cumsum(-1) - needed).gather(-1, order.chunks)",
        trials=DEFAULT,
    ),
    attention(
        "a key counts in every round in which it is seen",
        "return (ranks >= first) & (ranks < last)",
        "return (ranks >= first) & (ranks < last) & False",
        trials=DEFAULT,
    ),
    attention(
        "the rounds weigh the same",
        "weights = totals.softmax(0)",
        "weights = (torch.ones_like(totals) / len(totals))",
        trials=DEFAULT,
    ),
    attention(
        "the sum of a round is that of its largest score",
        "total = s.amax(-1) - p.amax(-1).log()",
        "total = s.amax(-1)",
        trials=DEFAULT,
    ),
    attention(
        "scores are not scaled",
        "return q if scale == 1 else q * scale",
        "return q",
        trials=DEFAULT,
    ),
    attention(
        "the mask of the first query is that of all",
        "self.mask[row, head, queries.clamp(max=n_q - 1), keys]",
        "self.mask[row, head, queries * 0, keys]",
        trials=DECODING,
    ),
    attention(
        "few queries see all keys of their bucket, however many",
        "seen = seen | (same & (so_many <= chunk))",
        "seen = seen | same",
        trials=DECODING,
    ),
    attention(
        "few queries see no keys but the last",
        "seen = seen | (same & (so_many <= chunk))",
        "seen = seen | (same & (so_many < 0))",
        trials=DECODING,
    ),
    attention(
        "heads that share a key read those of the first",
        "rows = (self.rows // self.group).unsqueeze(-1) * x.shape[1]",
        "rows = (self.rows // self.group // 2 * 2).unsqueeze(-1) * x.shape[1]",
        trials=on("llama", SPEC),
    ),
    attention(
        "in the fused kernel a key counts in every round in which it is seen",
        "        bias.masked_fill_(seen_before(other, queries, keys), UNSEEN)",
        "        seen_before(other, queries, keys)",
        trials=DEFAULT,
        test=f"{TESTS}test_the_fused_kernel_computes_the_same",
    ),
    attention(
        "where it decodes by lists a key counts in every round in which it is seen",
        "visible = visible & ~(same & (places[number] >= oldest[other]))",
        "visible = visible & ~(same & (places[number] < 0))",
        trials=LISTED,
        test=f"{TESTS}test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys",
    ),
    attention(
        "where it decodes by lists the first key counts twice where a list has it",
        "(first <= own - chunk) & ~known)",
        "(first <= own - chunk))",
        trials=LISTED,
        test=f"{TESTS}test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys",
    ),
    module(
        "padding is in the buckets of what it hashes to",
        "codes = torch.where(visible_keys_of(operands.mask).any(2), codes, self.buckets)",
        "pass",
        trials=DEFAULT,
    ),
    module(
        "the last tokens are not seen where they hash to other buckets",
        "order_by_position(operands.positions, n_k, self.chunk) if self.causal else None",
        "None",
        trials=DECODING,
    ),
    module(
        "queries after others in a cache are at the first positions",
        "(0 if is_causal else n_k - n_q)",
        "0",
        trials=DECODING,
    ),
    module(
        "keys that are queries keep their length",
        "k=(F.normalize(key, dim=-1) if self.shared and not few else key).flatten(0, 1)",
        "k=key.flatten(0, 1)",
        trials=SHARED,
    ),
    module(
        "where queries are keys a token attends to itself",
        "own=OWN if self.shared else None",
        "own=None",
        trials=SHARED,
    ),
    kept(
        "beams do not take the buckets of their keys with them",
        "self.stored = self.stored.index_select(1, rows)",
        "pass",
        trials=DECODING,
    ),
    kept(
        "tokens that are taken back leave their buckets",
        "left = max(0, self.length - count)",
        "left = self.length",
        trials=DECODING,
        test=f"{TESTS}test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys",
    ),
    tiles(
        "in the fused kernel a query sees one key too many behind it",
        "bias = torch.where((place > own) & (place <= own + chunk), 0.0, UNSEEN)",
        "bias = torch.where((place >= own) & (place <= own + chunk), 0.0, UNSEEN)",
        trials=DECODING,
        test=f"{TESTS}test_the_fused_kernel_computes_the_same",
    ),
    tiles(
        "in the fused kernel the first queries see zeros before all keys",
        "bias.where(place >= chunk - first - part.start * size, UNSEEN)",
        "bias",
        trials=DECODING,
        test=f"{TESTS}test_the_fused_kernel_computes_the_same",
    ),
    tiles(
        "in the fused kernel a query sees the key behind its stretch",
        "before = torch.where(place[:-1] < place.unsqueeze(-1), 0.0, UNSEEN)",
        "before = torch.where(place[:-1] <= place.unsqueeze(-1), 0.0, UNSEEN)",
        trials=DEFAULT,
        test=f"{TESTS}test_the_fused_kernel_computes_the_same",
    ),
    lists(
        "a decoding step sees the oldest keys of its bucket, not the newest",
        "number = total - 1 - torch.arange(count, device=bucket.device)",
        "number = (total - count).clamp(max=0) + torch.arange(count, device=bucket.device).flip(0)",
        trials=LISTED,
        test=f"{TESTS}test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys",
    ),
    lists(
        "a new key is not counted in its list",
        "self.counts.scatter_(-1, bucket, count + 1)",
        "self.counts.scatter_(-1, bucket, count)",
        trials=LISTED,
        test=f"{TESTS}test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys",
    ),
    lists(
        "padding is in the lists of what it hashes to",
        "codes = values if hidden is None else torch.where(hidden.unsqueeze(1), self.buckets, values)",
        "codes = values",
        trials=LISTED,
        test=f"{TESTS}test_padding_is_in_no_list_wherever_it_is",
    ),
    kept(
        "beams do not take the lists of their keys with them",
        "            self.lists.choose(rows, self.stored.shape[2])",
        "            pass",
        trials=LISTED,
        test=f"{TESTS}test_a_step_by_the_lists_of_buckets_is_the_comparison_with_all_keys",
    ),
    whole(
        "all attentions have the same rotations",
        "self.seed + number",
        "self.seed",
        trials=DEFAULT,
    ),
    whole(
        "an encoder is taken for causal",
        "query[1], query[3], causal, times",
        "query[1], query[3], True, times",
        trials=ENCODING,
    ),
]
