"""Anchors, the tokens that a strided layer computes: which tokens they are, and how to index tensors by them.

The position of a token is the number of real tokens before it in its row, so that padding on either side moves nothing. The anchor
of a token is the last token at or before it whose position is a multiple of k. Where nothing says which tokens are padding there is
none: anchors are the columns 0, k, 2k, … of every row (`EvenAnchors`). Otherwise they are counted row by row (`CountedAnchors`), in
the fixed number of ⌈T/k⌉ that tracing needs; the slots that a row does not need are hidden. While a layer is annealed, some of the
tokens between are anchors too (`is_computed`), the same in every layer, and their number is counted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from retrofit.sdk import DoesNotFitError
from retrofit.sdk.modules import holds_one_way

GOLDEN_RATIO = 0.6180339887498949  # whose multiples are spread evenly over the unit interval
Indices = slice | Tensor  # along one dimension: a slice for all rows, or (rows, n), a list of indices for each row


# ── Indexing along a dimension ───────────────────────────────────────────────────────────────────────────────────────────────────


def take(value: Tensor, dim: int, indices: Indices, batch: int | None = 0) -> Tensor:
    """Return the entries of `value` at `indices` along `dim`; `batch` is the dimension of the rows, None where it has none."""
    if isinstance(indices, slice):
        return value[(slice(None),) * dim + (indices,)]
    if indices.shape[0] == 1:
        return value.index_select(dim, indices[0])
    value, index = match_rows(value, indices, batch)
    shape = [1] * value.dim()
    shape[batch or 0], shape[dim] = index.shape
    size = list(value.shape)
    size[dim] = index.shape[1]
    return value.gather(dim, index.view(shape).expand(size))


def match_rows(value: Tensor, rows: Tensor, batch: int | None) -> tuple[Tensor, Tensor]:
    """`value` and `rows` with as many rows: a single row of `value` is expanded, `rows` are repeated where heads are folded in."""
    if batch is None:
        batch = 0
        if value.shape[0] != 1:
            raise DoesNotFitError(
                f"a strided layer received a table of shape {tuple(value.shape)} for a batch with padding",
                why="its rows keep tokens at different positions, and the table has no batch dimension",
                remedy="run sequences of one length without padding",
            )
    if value.shape[batch] == 1:
        value = value.expand([rows.shape[0] if dim == batch else -1 for dim in range(value.dim())])
    times = value.shape[batch] // rows.shape[0]
    return value, rows.repeat_interleave(times, 0) if times > 1 else rows


def hide_keys(mask: Tensor, dim: int, visible: Tensor, batch: int | None, zero_is_real: bool = False) -> Tensor:
    """`mask`, in which keys, along `dim`, are hidden where `visible` (rows, keys) is false.

    With `zero_is_real` a mask by tokens alone is added to the scores, or not zero where there is padding.
    """
    if visible.shape[0] > 1:
        mask, visible = match_rows(mask, visible, batch)
    shape = [1] * mask.dim()
    shape[batch or 0], shape[dim] = visible.shape
    visible = visible.view(shape)
    if mask.dtype == torch.bool:
        return mask | ~visible if zero_is_real else mask & visible
    if mask.is_floating_point() and (mask.dim() > 2 or zero_is_real):
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
    return mask.masked_fill(~visible, int(zero_is_real))


def is_computed(position: Tensor, k: int, dense_share: float) -> Tensor:
    """Return which positions are multiples of k, or in the evenly spread `dense_share` of the others; larger shares contain it."""
    anchors = position % k == 0
    return anchors | (position.double() * GOLDEN_RATIO % 1.0 < dense_share) if dense_share else anchors


# ── Anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class EvenAnchors:
    """The anchors among `length` tokens after `before` others, the same in every row: columns first, first + k, …"""

    valid: Tensor | None = None  # every slot holds an anchor

    def __init__(self, before: int, length: int, k: int) -> None:
        self.k, self.length = k, length
        self.first = -before % k
        self.count = max(0, (length - self.first + k - 1) // k)

    @property
    def indices(self) -> Indices:
        return slice(self.first, None, self.k)

    def columns(self, device: torch.device) -> Tensor:
        """(1, anchors)"""
        return torch.arange(self.first, self.first + self.count * self.k, self.k, device=device)[None]

    def pick(self, x: Tensor) -> Tensor:
        """Return the anchors' states: (batch, T, d) gives (batch, anchors, d)."""
        return x[:, self.first :: self.k].contiguous()  # the memory layout that layers get from the model's own code

    def window_means(self, x: Tensor) -> Tensor:
        """Return the mean over each anchor's window, of a sequence that begins with an anchor: (batch, anchors, d)."""
        missing = self.count * self.k - self.length
        sums = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(1, (self.count, self.k)).sum(2)
        sizes = torch.full((self.count, 1), self.k, dtype=x.dtype, device=x.device)
        sizes[-1] -= missing
        return sums / sizes

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """For each token the value of its anchor; `earlier` (batch, 1, d) is that of the last anchor before these tokens."""
        spread = values.unsqueeze(2).expand(-1, -1, self.k, -1).flatten(1, 2)  # (batch, anchors · k, d)
        if earlier is None:
            return first_tokens(spread, self.length)
        head = min(self.first, self.length)
        return torch.cat([earlier.expand(-1, head, -1), first_tokens(spread, self.length - head)], 1)

    def is_anchor(self, x: Tensor) -> Tensor:
        """Return which tokens of `x` are anchors: (1, T, 1)."""
        return ((torch.arange(self.length, device=x.device) - self.first) % self.k == 0)[None, :, None]


def first_tokens(x: Tensor, length: int) -> Tensor:
    """Return the first tokens of `x`: (batch, T, d) gives (batch, length, d).

    While a program is exported, as a copy: a tracer asks of a view whether it is the whole, which binds the parity of T.
    """
    return x.index_select(1, torch.arange(length, device=x.device)) if holds_one_way() else x.narrow(1, 0, length)


class CountedAnchors:
    """The anchors among tokens of which `real` (rows, T) are no padding, after `before` (rows, 1) real ones.

    Every row has `count` slots. Where a row has fewer anchors, its first one fills the other slots, and `valid` is false there. The
    filled slots come last, so that a causal layer cannot see them, or with `filled_first` first, so that a recurrent layer ends on
    an anchor. With a `dense_share` so much of the tokens between are anchors as well.
    """

    def __init__(
        self,
        real: Tensor,
        k: int,
        before: Tensor | int = 0,
        count: int | None = None,
        *,
        filled_first: bool = False,
        dense_share: float = 0.0,
    ) -> None:
        length = real.shape[1]
        self.k, self.real = k, real
        position = real.cumsum(1) - 1 + before
        self.anchors = real & is_computed(position, k, dense_share)  # (rows, T)
        number = self.anchors.cumsum(1)  # of anchors up to each token
        own = self.anchors.sum(1, keepdim=True)  # of anchors in each row
        self.count = (length + k - 1) // k if count is None else count
        if dense_share:
            self.count = int(own.max())
        start = self.count - own if filled_first else torch.zeros_like(own)
        self.slot = number - 1 + start  # of each token's anchor, below `start` for tokens before the first
        self.early = number == 0
        columns = torch.arange(length, device=real.device).expand_as(real)
        slots = torch.where(self.anchors, self.slot, self.count)
        first = self.anchors.int().argmax(1, keepdim=True)
        self.index = first.expand(-1, self.count + 1).scatter(1, slots, columns).narrow(1, 0, self.count)
        slot = torch.arange(self.count, device=real.device)
        self.valid = (slot >= start) & (slot < start + own)  # (rows, anchors)

    @property
    def indices(self) -> Indices:
        return self.index

    def columns(self, device: torch.device) -> Tensor:
        """(rows, anchors)"""
        return self.index

    def pick(self, x: Tensor) -> Tensor:
        """Return the anchors' states: (batch, T, d) gives (batch, anchors, d)."""
        return take(x, 1, self.index)

    def window_means(self, x: Tensor) -> Tensor:
        """Return the mean over the real tokens of each window, of sequences that begin with an anchor: (batch, anchors, d)."""
        slots = torch.where(self.real, self.slot, self.count).expand(x.shape[0], -1)
        sums = x.new_zeros(x.shape[0], self.count + 1, x.shape[2]).scatter_add(1, slots.unsqueeze(-1).expand_as(x), x)
        sizes = x.new_zeros(x.shape[0], self.count + 1).scatter_add(1, slots, x.new_ones(slots.shape))
        return (sums / sizes.clamp(min=1).unsqueeze(-1)).narrow(1, 0, self.count)

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """For each token the value of its anchor; `earlier` (batch, 1, d) is that of the last anchor before these tokens."""
        if earlier is None:
            return take(values, 1, self.slot.clamp(min=0))
        return take(torch.cat([earlier, values], 1), 1, torch.where(self.early, 0, self.slot + 1))

    def is_anchor(self, x: Tensor) -> Tensor:
        """Return which tokens of `x` are anchors: (rows, T, 1)."""
        return self.anchors.unsqueeze(-1)


class NoAnchors:
    """No anchor among new tokens, of which there are any number."""

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """For all tokens the value of the last anchor before them: (batch, 1, d)."""
        assert earlier is not None
        return earlier


Anchors = EvenAnchors | CountedAnchors


@dataclasses.dataclass
class RaggedAnchors:
    """Values of anchors in the order of their columns, (batch, n, …) each. Entries that are not valid are holes, and come first."""

    columns: Tensor  # (batch, n), of the sequence
    valid: Tensor  # (batch, n)
    values: tuple[Tensor, ...]

    def append(self, columns: Tensor, valid: Tensor, values: tuple[Tensor, ...]) -> RaggedAnchors:
        """These entries and then the new ones."""
        joined = tuple(torch.cat(pair, 1) for pair in zip(self.values, values, strict=True))
        return RaggedAnchors(torch.cat([self.columns, columns], 1), torch.cat([self.valid, valid], 1), joined)

    def compact(self, valid: Tensor, most: int | None = None) -> RaggedAnchors:
        """Return the valid entries of each row, its last `most` at the most, with as few holes before them as possible."""
        width = int(valid.sum(1).max()) if valid.numel() else 0
        if width == valid.shape[1] and most is None and bool((valid[:, 1:] >= valid[:, :-1]).all()):
            return RaggedAnchors(self.columns, valid, self.values)
        width = width if most is None else min(width, most)
        order = torch.argsort(valid.int(), dim=1, stable=True)[:, valid.shape[1] - width :]

        def pick(value: Tensor) -> Tensor:
            index = order.view(*order.shape, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:])
            return value.gather(1, index)

        return RaggedAnchors(pick(self.columns), pick(valid), tuple(pick(value) for value in self.values))
