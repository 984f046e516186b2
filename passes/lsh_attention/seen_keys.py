"""Attention over the keys that each query sees: by an order of the keys, tile by tile, or by comparison with all keys.

Without gradients torch's fused CPU kernel computes the tiles, while their scores are in the processor's cache; it also returns the
logarithm of each sum. A bias, composed of rows of small tables, hides the keys that a query does not see.

The kernel is private to torch. In a version without it, or with another signature or result, tiles are computed by a product, a
softmax and a product, as on other devices, with the same results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.passes.lsh_attention.key_buckets import BucketLists
from retrofit.passes.lsh_attention.key_orders import KeyOrder, Tiles, tiles_of

UNSEEN = -1e30  # the score, or bias, of a key that is not seen
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
TAKES = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")


@functools.cache
def kernel(name: str) -> Any:
    """Return torch's operation of this name; None if there is none with the expected signature and results."""
    operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if operation is None:
        return None
    takes = tuple(argument.name for argument in operation._schema.arguments)
    returns = [str(result.type) for result in operation._schema.returns]
    return operation if takes == TAKES and returns == ["Tensor", "Tensor"] else None


def is_fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel exists and can be called: on a CPU in float32, without tracing and gradients."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(operand.requires_grad for operand in (q, k, v))):
        return False
    plain = all(operand.device.type == "cpu" and operand.dtype == torch.float32 for operand in (q, k, v))
    return plain and q.shape[-1] == v.shape[-1] and kernel(KERNEL) is not None


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return Σ softmax(s) v and the logarithm of Σ exp(s): q (rows, tiles, C, d), k and v (rows, tiles, keys, d), bias likewise."""
    bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    y, total = kernel(KERNEL)(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return y, total


def window_bias(first: Tensor, last: Tensor, size: int) -> Tensor:
    """Return 0 for each place in [first, last) of a window of `size` places, else `UNSEEN` or less: (…, size)."""
    place = torch.arange(size + 1, device=first.device)
    behind = torch.where(place[:-1] >= place.unsqueeze(-1), 0.0, UNSEEN)  # a row for each place: 0 at it and behind it
    before = torch.where(place[:-1] < place.unsqueeze(-1), 0.0, UNSEEN)
    bias, other = (table.index_select(0, end.clamp(0, size).flatten()) for table, end in ((behind, first), (before, last)))
    return bias.add_(other).view(*first.shape, size)


def last_keys(q: Tensor, k: Tensor, v: Tensor, first: int, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention, (rows, n_q, d), of each query to the last `chunk` keys up to its own, and the logarithms of its sums.

    The first query is at position `first`. The queries of every tile see a window of keys with the same bias; windows overlap, and
    none is copied.
    """
    rows, n_q, d = q.shape
    size = max(1, chunk // 2)
    n_k, tiles, before = k.shape[1], -(-n_q // size), -(-chunk // size)  # windows of `before` tiles begin before the first key
    place = torch.arange(chunk + size, device=q.device)
    own = torch.arange(size, device=q.device).unsqueeze(-1)
    bias = torch.where((place > own) & (place <= own + chunk), 0.0, UNSEEN)
    queries = F.pad(q, (0, 0, 0, tiles * size - n_q)).view(rows, tiles, size, d)
    behind = max(0, first + tiles * size - n_k)
    windows = []
    for x in (k, v):
        padded = F.pad(x, (0, 0, chunk, behind)).contiguous()
        shape, strides = (rows, tiles, chunk + size, d), (padded.stride(0), size * d, d, 1)
        windows.append(padded.as_strided(shape, strides, padded.storage_offset() + first * d))
    ys, totals = [], []
    for part in (*(slice(number, number + 1) for number in range(before)), slice(before, None)):
        if part.start < tiles:
            seen = bias if part.stop is None else bias.where(place >= chunk - first - part.start * size, UNSEEN)
            y, total = fused(queries[:, part], windows[0][:, part], windows[1][:, part], seen, scale)
            ys.append(y.flatten(1, 2))
            totals.append(total.flatten(1, 2))
    return torch.cat(ys, 1)[:, :n_q], torch.cat(totals, 1)[:, :n_q]


AT_ONCE = 1 << 20  # scores computed at once on a CPU, so that they stay in its cache
MANY_AT_ONCE = 1 << 25  # on other devices, where each operation takes time to start
HIDDEN = -1e4  # an additive mask below this hides
NONE_SEEN = -1e29  # a logarithm of a sum below this is a sum over unseen keys


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of an attention. Rows are the heads of all sequences; q holds those from `first` on."""

    q: Tensor  # (rows, n_q, d)
    k: Tensor  # (all rows / group, n_k, d)
    v: Tensor  # (all rows / group, n_k, d_v)
    mask: Tensor | None  # (batch or 1, heads or 1, n_q or 1, n_k), a bias or the visible keys
    positions: Tensor  # (n_q), of the queries among the keys
    first_keys: Tensor | None  # (batch or 1, heads or 1, n_q or 1), the first key that each query may see; None: no such round
    heads: int
    group: int  # heads that share a key
    causal: bool  # hide later keys
    own: float | None  # the score of a query's own key; None: as of any other
    scale: float
    dropout: float = 0.0
    first: int = 0
    unit_keys: bool = False  # normalize keys to length 1 when they are read

    def part(self, rows: slice) -> Operands:
        """Return the operands of some rows."""
        return self if rows.stop is None else dataclasses.replace(self, q=self.q[rows], first=rows.start)

    @property
    def is_plain(self) -> bool:
        """Return whether no mask or dropout is applied and the fused kernel can be called."""
        plain = self.mask is None and self.own is None and not self.causal and not self.dropout
        return plain and is_fused(self.q, self.k, self.v)

    @property
    def rows(self) -> Tensor:
        """Return the indices of the rows among all rows."""
        return torch.arange(self.q.shape[0], device=self.q.device) + self.first

    def at_keys(self, x: Tensor, index: Tensor) -> Tensor:
        """Return x of the keys at `index` (rows, m): (rows, m, width)."""
        rows = (self.rows // self.group).unsqueeze(-1) * x.shape[1]
        return x.flatten(0, 1).index_select(0, (rows + index).flatten()).view(*index.shape, x.shape[-1])

    def keys_at(self, index: Tensor) -> Tensor:
        """Return the keys at `index` (rows, m): (rows, m, d)."""
        keys = self.at_keys(self.k, index)
        return F.normalize(keys, dim=-1) if self.unit_keys else keys

    def at_queries(self, index: Tensor, scale: float) -> Tensor:
        """Return scale · q of the queries at `index` (rows, m): (rows, m, d)."""
        rows = torch.arange(self.q.shape[0], device=self.q.device).unsqueeze(-1) * self.q.shape[1]
        q = self.q.flatten(0, 1).index_select(0, (rows + index).flatten()).view(*index.shape, self.q.shape[-1])
        return q if scale == 1 else q * scale

    def scores(self, products: Tensor, visible: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return scores in float32 or wider: products (rows, …, queries, keys), queries (…, queries, 1), keys (…, 1, keys).

        Scores of keys that are not `visible`, or that the mask hides, are `UNSEEN`.
        """
        s = products.to(torch.promote_types(products.dtype, torch.float32))
        own = self.positions[queries]
        if self.causal:
            visible = visible & (keys <= own)
        if self.mask is not None:
            row = self.rows.view(-1, *(1,) * (keys.dim() - 1))
            batch, heads, n_q, _ = self.mask.shape
            row, head = (row // self.heads).clamp(max=batch - 1), (row % self.heads).clamp(max=heads - 1)
            value = self.mask[row, head, queries.clamp(max=n_q - 1), keys]
            if value.dtype == torch.bool:
                visible = visible & value
            else:
                s, visible = s + value, visible & (value > HIDDEN)
        if self.own is not None:
            s = torch.where(keys == own, self.own, s)
        return torch.where(visible, s, UNSEEN)

    def first_of_rows(self) -> Tensor | None:
        """Return the first key that each query may see, (rows, n_q); None if there is no such round."""
        if self.first_keys is None:
            return None
        batch, heads, _ = self.first_keys.shape
        row, head = (self.rows // self.heads).clamp(max=batch - 1), (self.rows % self.heads).clamp(max=heads - 1)
        return self.first_keys[row, head].expand(-1, self.q.shape[1])

    def own_values(self, y: Tensor, total: Tensor) -> Tensor:
        """Return y, (rows, n_q, d_v), with the own value of queries that see no key, according to `total` (rows, n_q)."""
        own = self.at_keys(self.v, self.positions.expand(self.q.shape[0], -1))
        return torch.where(total.unsqueeze(-1) > NONE_SEEN, y, own.to(y.dtype))


def weighed(s: Tensor, v: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Return Σ softmax(s) v and the logarithm of Σ exp(s): s (…, queries, keys), v (…, keys, d_v)."""
    p = s.softmax(-1)
    total = s.amax(-1) - p.amax(-1).log()
    p = F.dropout(p, dropout) if dropout else p
    return (p.to(v.dtype) @ v).to(s.dtype), total


# In orders of the keys.


def by_order(operands: Operands, orders: Sequence[KeyOrder], local: KeyOrder | None, chunk: int) -> Tensor:
    """Return the output, (rows, n_q, d_v), of rounds with these orders of the keys. A key counts in the first round that shows it.

    `local` is the order by position, whose keys no query sees in another round.
    """
    rows, n_q, _ = operands.q.shape
    outputs = []
    for part in slices(rows, 2 * chunk * (n_q + operands.k.shape[1]), operands.q.device):
        sliced, ordered = operands.part(part), [order.rows(part) for order in orders]
        rounds = [one_round(sliced, order, ordered[:number]) for number, order in enumerate(ordered)]
        if local is not None:
            rounds.append(last_keys_round(sliced, local, chunk))
            ordered.append(local)
        if (first := sliced.first_of_rows()) is not None:
            rounds.append(first_key_round(sliced, first, ordered))
        outputs.append(combine(sliced, rounds))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def slices(count: int, scores: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of `count` items that are computed at once, with `scores` scores each; one slice while a program is traced."""
    if torch.compiler.is_compiling():  # bounds would fix the number of items
        yield slice(None)
        return
    step = max(1, (AT_ONCE if device.type == "cpu" else MANY_AT_ONCE) // scores)
    for start in range(0, count, step):
        yield slice(start, start + step)


def one_round(operands: Operands, order: KeyOrder, before: Sequence[KeyOrder]) -> tuple[Tensor, Tensor]:
    """Return the output of one round, (rows, n_q, d_v), without keys of rounds `before`, and the log of its sum, (rows, n_q)."""
    rows = operands.q.shape[0]
    tiles = tiles_of(order)
    parts = slices(tiles.keys.shape[1], order.tile * order.window * rows, tiles.keys.device)
    results = [some_tiles(operands, order, before, tiles.part(part)) for part in parts]
    y, total = (torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0] for tensors in zip(*results, strict=True))
    places = tiles.places.expand(rows, -1)
    index = places + torch.arange(rows, device=places.device).unsqueeze(-1) * y.shape[1]
    return y.flatten(0, 1).index_select(0, index.flatten()).view(*places.shape, -1), total.gather(1, places)


def some_tiles(operands: Operands, order: KeyOrder, before: Sequence[KeyOrder], tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return the output (rows, tiles · size, d_v) of the queries of the tiles, and the log of its sum (rows, tiles · size)."""
    rows = operands.q.shape[0]
    queries, keys = tiles.queries.expand(rows, -1), tiles.keys.expand(rows, -1, -1)
    shape = rows, tiles.keys.shape[1], tiles.size  # rows, tiles, queries of a tile
    k, v = (operands.at_keys(x, keys.flatten(1)).view(*keys.shape, -1) for x in (operands.k, operands.v))
    if operands.is_plain:
        q = operands.at_queries(queries, 1.0).view(*shape, -1)
        y, total = fused(q, k, v, bias_of(order, before, tiles, queries, keys), operands.scale)
        return y.flatten(1, 2), total.flatten(1)
    q = operands.at_queries(queries, operands.scale).view(*shape, -1)
    visible = in_window(order, tiles)
    for other in before:
        visible = visible & ~seen_before(other, queries, keys)
    s = operands.scores(q @ k.mT, visible, queries.view(*shape, 1), keys.unsqueeze(-2))
    y, total = weighed(s, v, operands.dropout)
    return y.flatten(1, 2), total.flatten(1)


def first_key_round(operands: Operands, first: Tensor, orders: Sequence[KeyOrder]) -> tuple[Tensor, Tensor]:
    """Return the round in which each query sees the first key it may see, `first` (rows, n_q), unless another round shows it."""
    if operands.is_plain:  # the first key of all, for every query
        k, v = (x[:, :1].index_select(0, operands.rows // operands.group) for x in (operands.k, operands.v))
        s = (operands.q @ k.mT).squeeze(-1) * operands.scale
        for order in orders:
            rank = order.ranks[:, :1]
            s = s.masked_fill_((rank >= order.first) & (rank < order.last), UNSEEN)
        return v.expand(-1, s.shape[1], -1), s
    visible = torch.ones_like(first, dtype=torch.bool)
    for order in orders:
        rank = order.ranks.expand(len(first), -1).gather(-1, first)
        visible = visible & ~((rank >= order.first) & (rank < order.last))
    k, v = (operands.at_keys(x, first) for x in (operands.k, operands.v))
    products = (operands.q * operands.scale * k).sum(-1, keepdim=True)
    queries = torch.arange(first.shape[1], device=first.device).view(1, -1, 1)
    s = operands.scores(products, visible.unsqueeze(-1), queries, first.unsqueeze(-1))
    y, total = weighed(s.unsqueeze(-2), v.unsqueeze(-2), operands.dropout)
    return y.squeeze(-2), total.squeeze(-1)


def bias_of(order: KeyOrder, before: Sequence[KeyOrder], tiles: Tiles, queries: Tensor, keys: Tensor) -> Tensor:
    """Return 0 if a query of a tile sees a key that no earlier round shows it, else a negative bias: (rows, tiles, C, keys)."""
    first, last = places_in_windows(order, tiles)
    bias = window_bias(first, last, tiles.ranks.shape[-1])
    for other in before:
        bias.masked_fill_(seen_before(other, queries, keys), UNSEEN)
    return bias


def seen_before(other: KeyOrder, queries: Tensor, keys: Tensor) -> Tensor:
    """Return True where a query (rows, tiles · C) sees a key (rows, tiles, keys) in another round: (rows, tiles, C, keys)."""
    rows, count, _ = keys.shape
    ranks = other.ranks.expand(rows, -1).gather(-1, keys.flatten(1)).int().view(rows, count, 1, -1)
    ends = (other.first, other.last)
    first, last = (end.expand(rows, -1).gather(-1, queries).int().view(rows, count, -1, 1) for end in ends)
    return (ranks >= first) & (ranks < last)


def last_keys_round(operands: Operands, local: KeyOrder, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the round in which each query sees the last `chunk` keys, with the results of `one_round`."""
    if not operands.is_plain:
        return one_round(operands, local, ())
    k, v = (x.index_select(0, operands.rows // operands.group) for x in (operands.k, operands.v))
    return last_keys(operands.q, k, v, int(operands.positions[0]), chunk, operands.scale)


def in_window(order: KeyOrder, tiles: Tiles) -> Tensor:
    """Return True where a query of a tile sees a key of its window: (rows, tiles, C, keys)."""
    size = tiles.ranks.shape[-1]
    place = torch.arange(size + 1, device=tiles.ranks.device)
    table = place[:-1] >= place.unsqueeze(-1)  # a row for each place in a window: True at it and behind it
    ends = places_in_windows(order, tiles)
    behind, beyond = (table.index_select(0, end.clamp(0, size).flatten()).view(*end.shape, size) for end in ends)
    return behind & ~beyond


def places_in_windows(order: KeyOrder, tiles: Tiles) -> Iterator[Tensor]:
    """Yield the first and last rank that each query of the tiles sees, counted from the first of its window: (rows, tiles, C)."""
    rows, count, _ = tiles.ranks.shape
    for end in (order.first, order.last):
        yield end.gather(-1, tiles.queries).view(rows, count, -1) - tiles.ranks[..., :1]


def combine(operands: Operands, rounds: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of the outputs of all rounds, weighted by their shares of the softmax."""
    totals = torch.stack([total for _, total in rounds])
    weights = totals.softmax(0).unsqueeze(-1)
    y = sum((output * weight for (output, _), weight in zip(rounds[1:], weights[1:], strict=True)), rounds[0][0] * weights[0])
    y = y.to(operands.v.dtype)
    return y if operands.is_plain else operands.own_values(y, totals.amax(0))  # without a mask every query sees a key


# By comparison with all keys.


def by_comparison(operands: Operands, buckets: tuple[Tensor, Tensor] | None, chunk: int) -> Tensor:
    """Return the output, (rows, n_q, d_v), of few queries of causal attention, or of queries that see all keys.

    `buckets` has the buckets of queries and keys, (rounds, rows, n_q) and (rounds, rows, n_k); None: all keys are visible.
    """
    rows, n_q, _ = operands.q.shape
    n_k = operands.k.shape[1]
    place = torch.arange(n_k, device=operands.q.device)
    queries = torch.arange(n_q, device=place.device).view(1, -1, 1)
    most = n_k if buckets is None else most_seen(len(buckets[0]), chunk)
    if buckets is None:
        visible = torch.ones((), dtype=torch.bool, device=place.device)
    else:
        visible = seen_by_comparison(*buckets, operands.positions, chunk)
        if (first := operands.first_of_rows()) is not None:
            visible = visible | (place == first.unsqueeze(-1))
    if most < n_k // 2:
        found, keys = torch.where(visible, place, -1).topk(most, sorted=False)  # (rows, n_q, most)
        return over_keys(operands, keys, found >= 0)
    k, v = operands.keys_at(place.expand(rows, -1)), operands.at_keys(operands.v, place.expand(rows, -1))
    s = operands.scores((operands.q * operands.scale) @ k.mT, visible, queries, place.view(1, 1, -1))
    y, total = weighed(s, v, operands.dropout)
    return operands.own_values(y.to(operands.v.dtype), total)


def most_seen(rounds: int, chunk: int) -> int:
    """Return the largest number of keys that a query of causal attention sees."""
    return (rounds + 1) * chunk + 1


def over_keys(operands: Operands, keys: Tensor, visible: Tensor) -> Tensor:
    """Return the output, (rows, n_q, d_v), over the `visible` ones of the keys of each query, (rows, n_q, m)."""
    index = keys.flatten(1)
    k, v = (selected.view(*keys.shape, -1) for selected in (operands.keys_at(index), operands.at_keys(operands.v, index)))
    queries = torch.arange(keys.shape[1], device=keys.device).view(1, -1, 1)
    s = operands.scores(((operands.q * operands.scale).unsqueeze(-2) @ k.mT).squeeze(-2), visible, queries, keys)
    y, total = weighed(s.unsqueeze(-2), v, operands.dropout)
    return operands.own_values(y.squeeze(-2).to(operands.v.dtype), total.squeeze(-1))


def by_lists(operands: Operands, query: Tensor, lists: BucketLists, key: Tensor, chunk: int) -> Tensor:
    """Return the output, (rows, n_q, d_v), of few queries of causal attention, the last tokens, from the keys in `lists` alone.

    `query` and `key` are buckets: (rounds, rows, n_q) of the queries, (rounds, batch, heads, n_k) of all keys.
    """
    rounds, rows, n_q = query.shape
    own = operands.positions.view(-1, 1)
    places, exists = lists.newest(query, chunk + n_q - 1)  # (rounds, rows, n_q, …)
    exists = exists & (places <= own)
    exists = exists & (exists.cumsum(-1) <= chunk)
    oldest = torch.where(exists, places, key.shape[-1]).amin(-1, keepdim=True)
    near = own - torch.arange(chunk, device=own.device)
    seen = [(near.clamp(min=0).expand(rows, -1, -1), (near >= 0).expand(rows, -1, -1))]
    owner = operands.rows.view(-1, 1, 1) // (rows // lists.counts.shape[1])
    for number in range(rounds):
        visible = exists[number] & (places[number] <= own - chunk)
        for other in range(number):
            same = key[other].flatten(0, 1)[owner, places[number]] == query[other].unsqueeze(-1)
            visible = visible & ~(same & (places[number] >= oldest[other]))
        seen.append((places[number], visible))
    if (first := operands.first_of_rows()) is not None:
        first = first.unsqueeze(-1)
        known = (exists & (places == first)).any(0).any(-1, keepdim=True)
        seen.append((first, (first <= own - chunk) & ~known))
    keys, visible = (torch.cat(parts, -1) for parts in zip(*seen, strict=True))
    return over_keys(operands, keys, visible)


def seen_by_comparison(query: Tensor, key: Tensor, positions: Tensor, chunk: int) -> Tensor:
    """Return True where a query sees a key in some round of causal attention, (rows, n_q, n_k)."""
    place, own = torch.arange(key.shape[-1], device=key.device), positions.unsqueeze(-1)
    earlier = place <= own
    seen = earlier & (place > own - chunk)
    for q, k in zip(query, key, strict=True):
        same = (q.unsqueeze(-1) == k.unsqueeze(-2)) & earlier
        so_many = same.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # keys of the bucket from each key on
        seen = seen | (same & (so_many <= chunk))
    return seen
