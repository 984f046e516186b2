"""The newest keys of every bucket, by their places in the cache: what a decoding step sees is found without looking at any others.

    places[round, row, bucket, i mod room]          the place of the i-th key of the bucket
    counts[round, row, bucket]                      how many keys it has

Rows are the key heads of all sequences. `room` is more than a query sees, so that keys may be taken back; behind more of them the
lists are made again, from the buckets of all keys. Padding is in no list.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 64  # keys that may be taken back


class BucketLists:
    """The lists of `buckets` buckets, of which a query sees the last `chunk` keys."""

    def __init__(self, values: Tensor, hidden: Tensor | None, buckets: int, chunk: int) -> None:
        """`values` are the buckets of all keys, (rounds, batch, heads, n); `hidden` (batch, n) which of them are padding."""
        self.hidden, self.room, self.taken = hidden, chunk + SPARE, 0
        codes = values if hidden is None else torch.where(hidden.unsqueeze(1), buckets, values)
        codes = codes.flatten(1, 2).long()  # (rounds, rows, n)
        rounds, rows, n = codes.shape
        self.counts = codes.new_zeros(rounds, rows, buckets + 1).scatter_add_(-1, codes, torch.ones_like(codes))
        place = torch.arange(n, device=codes.device)
        keys = (codes * n + place).sort(-1).values % n  # by bucket, then by place
        owners = codes.gather(-1, keys)
        number = place - (self.counts.cumsum(-1) - self.counts).gather(-1, owners)  # of a key in its bucket
        recent = number >= self.counts.gather(-1, owners) - self.room
        slots = torch.where(recent, owners * self.room + number % self.room, buckets * self.room)  # one of padding, read by nobody
        self.places = codes.new_zeros(rounds, rows, (buckets + 1) * self.room).scatter_(-1, slots, keys)

    def append(self, new: Tensor, hidden: Tensor | None, first: int) -> None:
        """Keys of these buckets, (rounds, batch, heads, tokens), come behind the others, at the places from `first` on."""
        if hidden is not None:
            padding = self.counts.shape[-1] - 1
            new = torch.where(hidden.unsqueeze(1), padding, new)
            before = self.hidden if self.hidden is not None else hidden.new_zeros(hidden.shape[0], first)
            self.hidden = torch.cat([before, hidden], -1)
        elif self.hidden is not None:
            self.hidden = torch.cat([self.hidden, self.hidden.new_zeros(self.hidden.shape[0], new.shape[-1])], -1)
        self.places, self.counts = writable(self.places), writable(self.counts)
        for token, bucket in enumerate(new.flatten(1, 2).long().unbind(-1)):  # (rounds, rows) each
            bucket = bucket.unsqueeze(-1)
            count = self.counts.gather(-1, bucket)
            self.places.scatter_(-1, bucket * self.room + count % self.room, first + token)
            self.counts.scatter_(-1, bucket, count + 1)

    def take_back(self, removed: Tensor) -> bool:
        """The last keys, of these buckets, are removed; whether the lists still hold what a query may see."""
        count = removed.shape[-1]
        self.taken += count
        if self.hidden is not None:
            left, padding = self.hidden.shape[1] - count, self.counts.shape[-1] - 1
            removed = torch.where(self.hidden[:, left:].unsqueeze(1), padding, removed)
            self.hidden = self.hidden[:, :left]
        codes = removed.flatten(1, 2).long()
        self.counts = self.counts.scatter_add(-1, codes, -torch.ones_like(codes))
        return self.taken <= SPARE // 2

    def choose(self, rows: Tensor, heads: int) -> None:
        """Only these sequences are left, in this order."""
        self.places, self.counts = (
            one.unflatten(1, (-1, heads)).index_select(1, rows).flatten(1, 2) for one in (self.places, self.counts)
        )
        self.hidden = None if self.hidden is None else self.hidden.index_select(0, rows)

    def newest(self, bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The newest `count` keys of a bucket, (rounds, rows · group, n_q): their places, the newest first, and which there are.

        (rounds, rows · group, n_q, count) each.
        """
        group = bucket.shape[1] // self.counts.shape[1]
        owner = torch.arange(bucket.shape[1], device=bucket.device).view(1, -1, 1) // group
        each = torch.arange(bucket.shape[0], device=bucket.device).view(-1, 1, 1)
        total = self.counts[each, owner, bucket].unsqueeze(-1)
        number = total - 1 - torch.arange(count, device=bucket.device)
        slots = bucket.unsqueeze(-1) * self.room + number % self.room
        return self.places[each.unsqueeze(-1), owner.unsqueeze(-1), slots], number >= 0


def writable(x: Tensor) -> Tensor:
    """x, or a copy of it where it was made in inference mode and is written to outside of it."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x
