"""An order of the keys for each round of hashes, and the interval of it that each query sees.

Keys are sorted by bucket, then by position. The place of a query is after the last key of its bucket that is not later than it. It
sees an interval of ranks:

    causal        the last `chunk` keys of its bucket up to its own position, whatever comes later, so that a token changes
                  nothing before it and decoding gives the results of a prefill; without those among the last `chunk` keys of
                  all, which it sees in a separate round
    otherwise     the chunk of keys that contains its place and the one before, of any bucket (Reformer); of the first, the next

Keys that no query may see, which are padding, are in a separate bucket after all others.

In Reformer the chunks of a causal stack depend on the buckets of later tokens, so a later token changes the earlier keys that a
query sees. A key also counts once for every round in which it is seen, and chunks look back across the border of two rounds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class KeyOrder:
    """The keys in an order, and the ranks [first, last) that each query sees; rows are heads of sequences, or one for all."""

    keys: Tensor  # (rows, n_k), the key at each rank
    ranks: Tensor  # (rows, n_k), of each key
    query_ranks: Tensor  # (rows, n_q), of each query among the queries
    chunks: Tensor  # (rows, n_q), the chunk of `tile` keys that contains the place of each query
    first: Tensor  # (rows, n_q)
    last: Tensor  # (rows, n_q)
    tile: int  # queries computed together
    window: int  # consecutive keys that contain all that they see; the last are those of their chunk

    def rows(self, part: slice) -> KeyOrder:
        if part.stop is None or self.keys.shape[0] == 1:
            return self
        parts: dict[str, Any] = {name: value[part] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **parts)


def order_by_bucket(query: Tensor, key: Tensor, positions: Tensor, buckets: int, chunk: int, causal: bool) -> KeyOrder:
    """Return the order of one round, from the buckets of the queries (rows, n_q), at `positions` (n_q), and keys (rows, n_k).

    `buckets` is the number of buckets, including the one of padding.
    """
    n_q, n_k = query.shape[-1], key.shape[-1]
    place = torch.arange(n_k, device=key.device)
    ends = query * n_k + positions  # the key at the query's own position is before it
    codes = torch.cat([(key * n_k + place) * 2, ends * 2 + 1, *([(ends - chunk) * 2 + 1] if causal else [])], -1)
    joint = codes.argsort(-1)
    slots = torch.zeros_like(joint).scatter(-1, joint, torch.arange(codes.shape[-1], device=key.device).expand_as(joint))
    so_far = (joint < n_k).long().cumsum(-1)  # keys up to each slot
    ranks = so_far.gather(-1, slots[..., :n_k]) - 1
    before = so_far.gather(-1, slots[..., n_k : n_k + n_q])  # the keys before each query
    keys = torch.zeros_like(ranks).scatter(-1, ranks, place.expand_as(ranks))
    counts = torch.zeros(*key.shape[:-1], buckets, dtype=torch.long, device=key.device).scatter_add(-1, key, torch.ones_like(key))
    start = (counts.cumsum(-1) - counts).gather(-1, query)  # of the bucket of each query
    if not causal:
        return key_order(keys, ranks, slots[..., n_k:] - before, before, start, chunk, causal)
    far = so_far.gather(-1, slots[..., n_k + n_q :]).maximum(start)  # the keys before those among the last of all
    queries = ((joint >= n_k) & (joint < n_k + n_q)).long().cumsum(-1).gather(-1, slots[..., n_k : n_k + n_q]) - 1
    return dataclasses.replace(key_order(keys, ranks, queries, before, start, chunk, causal), last=far)


def order_by_position(positions: Tensor, n_k: int, chunk: int) -> KeyOrder:
    """Return the order of the keys by position, one for all rows, in which each query sees the last `chunk` keys up to its own."""
    place = torch.arange(n_k, device=positions.device).unsqueeze(0)
    before = positions.unsqueeze(0) + 1
    query_ranks = torch.arange(positions.shape[0], device=positions.device).unsqueeze(0)
    return key_order(place, place, query_ranks, before, torch.zeros_like(before), chunk, causal=True)


def key_order(
    keys: Tensor, ranks: Tensor, query_ranks: Tensor, before: Tensor, start: Tensor, chunk: int, causal: bool
) -> KeyOrder:
    """Return the order in which the place of each query is after `before` keys and its bucket begins at `start`."""
    tile = chunk // 2 if causal and chunk % 2 == 0 else chunk  # smaller tiles compute fewer scores of unseen keys
    chunks = (before - 1).clamp(min=0) // tile
    if causal:
        return KeyOrder(keys, ranks, query_ranks, chunks, torch.maximum(before - chunk, start), before, tile, chunk + tile)
    first = (chunks - 1).clamp(min=0) * chunk
    return KeyOrder(keys, ranks, query_ranks, chunks, first, (first + 2 * chunk).clamp(max=keys.shape[-1]), tile, 2 * chunk)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries in tiles. Those of a tile are in the same chunk of keys, so that one window of keys contains all that they see."""

    size: int  # queries of a tile
    queries: Tensor  # (rows, tiles · size), the query at each place, 0 if there is none
    places: Tensor  # (rows, n_q), of each query
    ranks: Tensor  # (rows, tiles, window), of the keys of each tile
    keys: Tensor  # (rows, tiles, window)

    def part(self, tiles: slice) -> Tiles:
        """Return the tiles in `tiles`; `places` still count from the first of all tiles."""
        if tiles.stop is None:
            return self
        queries = self.queries[:, tiles.start * self.size : tiles.stop * self.size]
        return Tiles(self.size, queries, self.places, self.ranks[:, tiles], self.keys[:, tiles])


def tiles_of(order: KeyOrder) -> Tiles:
    """Return the queries of an order in tiles, at most n_q/C + n_k/C: a chunk of keys with few queries has a tile too."""
    chunk = order.tile
    rows, n_q = order.chunks.shape
    n_k = order.keys.shape[-1]
    device, chunks = order.keys.device, n_k // chunk + 1
    counts = torch.zeros(rows, chunks, dtype=torch.long, device=device).scatter_add(-1, order.chunks, torch.ones_like(order.chunks))
    needed = (counts + chunk - 1) // chunk
    tiles = n_q // chunk + chunks if torch.compiler.is_compiling() else int(needed.sum(-1).max())
    within = order.query_ranks - (counts.cumsum(-1) - counts).gather(-1, order.chunks)  # rank among the queries of its chunk
    tile = (needed.cumsum(-1) - needed).gather(-1, order.chunks) + within // chunk
    places = tile * chunk + within % chunk
    indices = torch.arange(n_q, device=device).expand_as(places)
    queries = torch.zeros(rows, tiles * chunk, dtype=torch.long, device=device).scatter(-1, places, indices)
    chunk_of = torch.zeros(rows, tiles, dtype=torch.long, device=device).scatter(-1, tile, order.chunks)
    first = ((chunk_of + 1) * chunk - order.window).clamp(min=0)
    ranks = first.unsqueeze(-1) + torch.arange(order.window, device=device)
    keys = order.keys.gather(-1, ranks.flatten(1).clamp(max=n_k - 1)).view_as(ranks)
    return Tiles(chunk, queries, places, ranks, keys)
