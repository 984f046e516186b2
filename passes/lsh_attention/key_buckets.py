"""The buckets of the keys of a growing cache, which keeps them: a decoding step hashes its own keys and no others.

They follow what becomes of the keys: rows that beams choose, rows that are repeated, tokens that are taken back. A cache of fixed
length, or one that drops keys, has its keys hashed as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retrofit.passes.lsh_attention.hashing import hash_buckets
from retrofit.sdk import histories_of


class KeyBuckets:
    """The buckets of the keys so far: `values` is (rounds, batch, key heads, tokens)."""

    follows_from_keys = True  # an exported file need not hold them

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def take_back(self, count: int) -> None:
        """The last `count` tokens are removed."""
        self.values = self.values[..., : max(0, self.values.shape[-1] - count)]

    def choose(self, rows: Tensor) -> None:
        """Only these rows are left, in this order; a row that is named twice is there twice."""
        self.values = self.values.index_select(1, rows.to(self.values.device))

    def repeat(self, times: int) -> None:
        """Each row is there so many times."""
        self.values = self.values.repeat_interleave(times, 1)


def buckets_of_keys(key: Tensor, tokens: int, rotations: Tensor, cache: Cache | None, name: str) -> Tensor:
    """The bucket of each key, (batch, heads, n_k, d), in each round: (rounds, batch, heads, n_k).

    The last `tokens` keys are new. Heads that the model repeats for its queries have the buckets of one.
    """
    if cache is None or torch.compiler.is_compiling():
        return hash_buckets(key, rotations)
    histories: dict[str, Any] = histories_of(cache)
    heads, n_k = key.shape[1], key.shape[2]
    known = histories.get(name)
    if known is not None and known.values.shape[1] == key.shape[0] and known.values.shape[-1] + tokens == n_k:
        new = in_heads(hash_buckets(key[:, :, n_k - tokens :], rotations), known.values.shape[2])
        known.values = torch.cat([known.values, new], -1)
    elif n_k == tokens:
        known = histories[name] = KeyBuckets(hash_buckets(key, rotations))
    else:
        return hash_buckets(key, rotations)
    return in_heads(known.values, heads)


def in_heads(values: Tensor, heads: int) -> Tensor:
    """The buckets (rounds, batch, h, tokens) for another number of heads, each key head having been repeated or not."""
    held = values.shape[2]
    return values[:, :, :: held // heads] if held >= heads else values.repeat_interleave(heads // held, 2)
