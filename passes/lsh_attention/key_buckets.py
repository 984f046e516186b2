"""The buckets of keys, stored in a growing cache, so that a decoding step hashes only its own keys.

The bucket of a vector in each round is a locality-sensitive hash by fixed random rotations.

    bucket(x) = argmax [x R; −x R]          R: (d, buckets / 2), one for each round

Vectors at a small angle are likely to have the same bucket. The index of the largest number does not depend on the length of x, so
nothing is normalized.

The cache also stores lists of the newest keys of every bucket, by their positions in the cache; a decoding step reads no others.

    places[round, row, bucket, i mod room]          the place of the i-th key of the bucket
    counts[round, row, bucket]                      the number of its keys

Rows are the key heads of all sequences. `room` exceeds the number of keys that a query sees, so that keys can be removed; after
more removals the lists are rebuilt from the buckets of all keys. Padding is in no list.

Buckets and lists follow all changes of the keys: rows selected by beam search, repeated rows, removed tokens. With a cache of fixed
length, or one that drops keys, all keys are hashed at each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.sdk.modules import histories_of, staying_tokens

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

AT_ONCE, MANY_AT_ONCE = 4096, 1 << 18  # vectors, on a CPU and elsewhere


def random_rotations(width: int, rounds: int, buckets: int, seed: int, like: Tensor) -> Tensor:
    """Return R of all rounds, (rounds, d, buckets / 2), the same for the same seed on every device; no values if `like` is meta."""
    if like.is_meta:
        return torch.empty(rounds, width, buckets // 2, device="meta", dtype=like.dtype)
    drawn = torch.randn(rounds, width, buckets // 2, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device=like.device, dtype=like.dtype)


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """Return the bucket of each vector in each round: x (…, tokens, d), R (rounds, d, b / 2) to (rounds, …, tokens)."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, rotations.dtype), torch.float32)
    x, rotations = x.detach().to(dtype), rotations.detach().to(dtype)
    vectors = x.numel() // x.shape[-1] if not torch.compiler.is_compiling() else 0
    at_once = AT_ONCE if x.device.type == "cpu" else MANY_AT_ONCE
    if vectors <= at_once:
        return torch.stack([buckets_of(x, rotation) for rotation in rotations])
    parts = x.reshape(-1, x.shape[-1]).split(at_once)  # products of this size stay in a processor's cache
    rounds = [torch.cat([buckets_of(part, rotation) for part in parts]) for rotation in rotations]
    return torch.stack(rounds).view(len(rotations), *x.shape[:-1])


def buckets_of(x: Tensor, rotation: Tensor) -> Tensor:
    """Return the bucket of each vector by one rotation."""
    y = x @ rotation
    largest = y.abs().argmax(-1, keepdim=True)
    return (largest + rotation.shape[-1] * (y.gather(-1, largest) < 0)).squeeze(-1)


SPARE = 64  # keys of each list beyond those that a query sees


class BucketLists:
    """The newest keys of each of `buckets` buckets; a query sees the last `chunk` keys of its bucket."""

    def __init__(self, values: Tensor, hidden: Tensor | None, buckets: int, chunk: int) -> None:
        """Build the lists of `values`, the buckets of all keys, (rounds, batch, heads, n). `hidden`, (batch, n), marks padding."""
        self.buckets, self.hidden, self.room, self.removed = buckets, hidden, chunk + SPARE, 0
        codes = self.codes(values, hidden)
        rounds, rows, n = codes.shape
        self.counts = codes.new_zeros(rounds, rows, buckets + 1).scatter_add_(-1, codes, torch.ones_like(codes))
        place = torch.arange(n, device=codes.device)
        keys = (codes * n + place).sort(-1).values % n  # by bucket, then by place
        owners = codes.gather(-1, keys)
        number = place - (self.counts.cumsum(-1) - self.counts).gather(-1, owners)  # of a key in its bucket
        recent = number >= self.counts.gather(-1, owners) - self.room
        slots = torch.where(recent, owners * self.room + number % self.room, buckets * self.room)  # others: a slot of padding
        self.places = codes.new_zeros(rounds, rows, (buckets + 1) * self.room).scatter_(-1, slots, keys)

    def codes(self, values: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the list of each key, (rounds, rows, tokens): its bucket, or the one after all buckets for padding."""
        codes = values if hidden is None else torch.where(hidden.unsqueeze(1), self.buckets, values)
        return codes.flatten(1, 2).long()

    def append(self, new: Tensor, hidden: Tensor | None, first: int) -> None:
        """Append keys with the buckets `new`, (rounds, batch, heads, tokens), at the places from `first` on."""
        if hidden is not None:
            before = self.hidden if self.hidden is not None else hidden.new_zeros(hidden.shape[0], first)
            self.hidden = torch.cat([before, hidden], -1)
        elif self.hidden is not None:
            self.hidden = F.pad(self.hidden, (0, new.shape[-1]))
        self.places, self.counts = writable(self.places), writable(self.counts)
        for token, bucket in enumerate(self.codes(new, hidden).unbind(-1)):  # (rounds, rows) each
            bucket = bucket.unsqueeze(-1)
            count = self.counts.gather(-1, bucket)
            self.places.scatter_(-1, bucket * self.room + count % self.room, first + token)
            self.counts.scatter_(-1, bucket, count + 1)

    def remove_last(self, values: Tensor) -> bool:
        """Remove the last keys, with the buckets `values`. Return True if the lists still have all keys that a query may see."""
        hidden, count = self.hidden, values.shape[-1]
        if hidden is not None:
            self.hidden, hidden = hidden[:, :-count], hidden[:, -count:]
        codes = self.codes(values, hidden)
        self.counts = self.counts.scatter_add(-1, codes, -torch.ones_like(codes))
        self.removed += count
        return self.removed <= SPARE // 2

    def choose(self, rows: Tensor, heads: int) -> None:
        """Keep only the sequences `rows`, in this order."""
        self.places, self.counts = (
            table.unflatten(1, (-1, heads)).index_select(1, rows).flatten(1, 2) for table in (self.places, self.counts)
        )
        self.hidden = None if self.hidden is None else self.hidden.index_select(0, rows)

    def newest(self, bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the places of the newest `count` keys of each bucket, newest first, and True for those that exist.

        (rounds, rows · group, n_q) gives (rounds, rows · group, n_q, count) each.
        """
        group = bucket.shape[1] // self.counts.shape[1]
        owner = torch.arange(bucket.shape[1], device=bucket.device).view(1, -1, 1) // group
        each = torch.arange(bucket.shape[0], device=bucket.device).view(-1, 1, 1)
        total = self.counts[each, owner, bucket].unsqueeze(-1)
        number = total - 1 - torch.arange(count, device=bucket.device)
        slots = bucket.unsqueeze(-1) * self.room + number % self.room
        return self.places[each.unsqueeze(-1), owner.unsqueeze(-1), slots], number >= 0


def writable(x: Tensor) -> Tensor:
    """Return x, or a copy if x was created in inference mode and the caller, which writes to it, is not in it."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


SMALLEST = 64  # least number of tokens that `KeyBuckets` allocates beyond those so far


class KeyBuckets:
    """The buckets of the keys so far: `values` is (rounds, batch, key heads, tokens)."""

    follows_from_keys = True  # an exported file need not contain them

    def __init__(self, values: Tensor) -> None:
        self.stored, self.length = values.int(), values.shape[-1]
        self.lists: BucketLists | None = None  # of the first `listed` keys, built by the first step that reads them
        self.listed = 0

    @property
    def values(self) -> Tensor:
        return self.stored[..., : self.length]

    def append(self, new: Tensor) -> None:
        """Append the buckets of new keys. The capacity grows with the number of keys, so that few steps copy the others."""
        end = self.length + new.shape[-1]
        self.stored = writable(self.stored)
        if end > self.stored.shape[-1]:
            self.stored = F.pad(self.values, (0, end + max(SMALLEST, end // 4) - self.length))
        self.stored[..., self.length : end] = new
        self.length = end

    def lists_for(self, hidden: Tensor | None, tokens: int, buckets: int, chunk: int) -> BucketLists:
        """Return the lists of all keys, the last `tokens` of which are new; `hidden` (batch, n) marks padding."""
        old = self.length - tokens
        before, new = (None, None) if hidden is None else (hidden[:, :old], hidden[:, old:])
        if self.lists is not None and self.listed == old and same(self.lists.hidden, before):
            self.lists.append(self.values[..., old:], new, old)
        else:
            hidden = hidden if hidden is not None and bool(hidden.any()) else None
            self.lists = BucketLists(self.values, hidden, buckets, chunk)
        self.listed = self.length
        return self.lists

    def take_back(self, count: int) -> None:
        left = max(0, self.length - count)
        if self.lists is not None and self.listed > left and not self.lists.remove_last(self.values[..., left : self.listed]):
            self.lists = None
        self.listed, self.length = min(self.listed, left), left

    def choose(self, rows: Tensor) -> None:
        """Keep only the sequences `rows`, in this order; indices may repeat."""
        rows = rows.to(self.stored.device)
        self.stored = self.stored.index_select(1, rows)
        if self.lists is not None:
            self.lists.choose(rows, self.stored.shape[2])

    def repeat(self, times: int) -> None:
        self.choose(torch.arange(self.stored.shape[1], device=self.stored.device).repeat_interleave(times))


def same(known: Tensor | None, hidden: Tensor | None) -> bool:
    """Return whether both hide the same keys; None hides none."""
    if known is None or hidden is None:
        marks = known if hidden is None else hidden
        return marks is None or not bool(marks.any())
    return torch.equal(known.expand_as(hidden), hidden)


def cached_buckets(key: Tensor, tokens: int, rotations: Tensor, cache: Cache | None, name: str) -> KeyBuckets | None:
    """Return the buckets that the cache stores of the keys, (batch, heads, n_k, d), after adding those of the last `tokens` keys.

    Returns None if it stores none. Copies of a head that the model repeats for its queries share its buckets.
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
        return known
    if n_k != tokens:
        return None
    histories[name] = KeyBuckets(hash_buckets(key, rotations))
    return histories[name]


def in_heads(values: Tensor, heads: int) -> Tensor:
    """Return the buckets (rounds, batch, h, tokens) for `heads` heads, which are h heads repeated, or of which h are copies."""
    stored = values.shape[2]
    return values[:, :, :: stored // heads] if stored >= heads else values.repeat_interleave(heads // stored, 2)
