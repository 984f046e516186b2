"""The buckets of the keys of a growing cache, which keeps them: a decoding step hashes its own keys and no others.

They follow what becomes of the keys: rows that beams choose, rows that are repeated, tokens that are taken back. So do the lists of
the newest keys of every bucket, which a decoding step reads. A cache of fixed length, or one that drops keys, has its keys hashed
as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retrofit.passes.lsh_attention.bucket_lists import BucketLists
from retrofit.passes.lsh_attention.hashing import hash_buckets
from retrofit.sdk import histories_of, staying_tokens

SMALLEST = 64  # tokens there is room for behind those so far


class KeyBuckets:
    """The buckets of the keys so far: `values` is (rounds, batch, key heads, tokens)."""

    follows_from_keys = True  # an exported file need not hold them

    def __init__(self, values: Tensor) -> None:
        self.stored, self.length = values.int(), values.shape[-1]
        self.lists: BucketLists | None = None  # of the first `listed` keys, once a step has asked for them
        self.listed = 0

    @property
    def values(self) -> Tensor:
        return self.stored[..., : self.length]

    def append(self, new: Tensor) -> None:
        """The buckets of further keys; room for them grows with how many there are, so that few steps copy the others."""
        end = self.length + new.shape[-1]
        fixed = self.stored.is_inference() and not torch.is_inference_mode_enabled()
        if end > self.stored.shape[-1] or fixed:
            room = self.stored.new_zeros(*self.stored.shape[:-1], end + max(SMALLEST, end // 4))
            room[..., : self.length] = self.values
            self.stored = room
        self.stored[..., self.length : end] = new
        self.length = end

    def lists_for(self, hidden: Tensor | None, tokens: int, buckets: int, chunk: int) -> BucketLists:
        """The lists of all keys, the last `tokens` of which are new; `hidden` (batch, n) says which of them are padding."""
        old = self.length - tokens
        if self.lists is not None and self.listed == old and same(self.lists.hidden, None if hidden is None else hidden[:, :old]):
            self.lists.append(self.values[..., old:], None if hidden is None else hidden[:, old:], old)
        else:
            hidden = hidden if hidden is not None and bool(hidden.any()) else None
            self.lists = BucketLists(self.values, hidden, buckets, chunk)
        self.listed = self.length
        return self.lists

    def take_back(self, count: int) -> None:
        """The last `count` tokens are removed."""
        left = max(0, self.length - count)
        if self.lists is not None and self.listed > left and not self.lists.take_back(self.values[..., left : self.listed]):
            self.lists = None
        self.listed, self.length = min(self.listed, left), left

    def choose(self, rows: Tensor) -> None:
        """Only these rows are left, in this order; a row that is named twice is there twice."""
        rows = rows.to(self.stored.device)
        self.stored = self.stored.index_select(1, rows)
        if self.lists is not None:
            self.lists.choose(rows, self.stored.shape[2])

    def repeat(self, times: int) -> None:
        """Each row is there so many times."""
        self.choose(torch.arange(self.stored.shape[1], device=self.stored.device).repeat_interleave(times))


def same(known: Tensor | None, hidden: Tensor | None) -> bool:
    """Whether both say the same of the same keys; None: none is hidden."""
    if known is None or hidden is None:
        one = known if hidden is None else hidden
        return one is None or not bool(one.any())
    return torch.equal(known.expand_as(hidden), hidden)


def known_buckets(key: Tensor, tokens: int, rotations: Tensor, cache: Cache | None, name: str) -> KeyBuckets | None:
    """The buckets that the cache keeps of the keys, (batch, heads, n_k, d), the last `tokens` of which are new; None: none.

    Heads that the model repeats for its queries have the buckets of one.
    """
    if cache is None or torch.compiler.is_compiling():
        return None
    histories: dict[str, Any] = histories_of(cache)
    if staying_tokens(cache) is not None:  # keys may change places when the others are removed
        histories.pop(name, None)
        return None
    n_k = key.shape[2]
    known: KeyBuckets | None = histories.get(name)
    if known is not None and known.stored.shape[1] == key.shape[0] and known.length + tokens == n_k:
        known.append(in_heads(hash_buckets(key[:, :, n_k - tokens :], rotations), known.stored.shape[2]))
    elif n_k == tokens:
        known = histories[name] = KeyBuckets(hash_buckets(key, rotations))
    else:
        return None
    return known


def in_heads(values: Tensor, heads: int) -> Tensor:
    """The buckets (rounds, batch, h, tokens) for another number of heads, each key head having been repeated or not."""
    held = values.shape[2]
    return values[:, :, :: held // heads] if held >= heads else values.repeat_interleave(heads // held, 2)
