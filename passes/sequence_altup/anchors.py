"""Every k-th token of a sequence: which they are, and the entries of a tensor that are about them.

The position of a token is the number of real tokens before it in its row, so that padding on either side moves nothing. Its anchor
is the last token at or before it whose position is a multiple of k. Where nothing tells of padding there is none: anchors are the
columns 0, k, 2k, … of every row (`EvenAnchors`). Else they are counted in each row (`CountedAnchors`), in the fixed number of ⌈T/k⌉
that tracing needs, of which those that a row has not are hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrofit.sdk import DoesNotFitError

Where = slice | Tensor  # which entries along a dimension: the same in every row, or (rows, n) indices


# ── Entries along a dimension ────────────────────────────────────────────────────────────────────────────────────────────────────


def take(value: Tensor, dim: int, where: Where, batch: int | None = 0) -> Tensor:
    """The entries `where` of the positions along `dim`; `batch` is the dimension of the rows, None where there is one for all."""
    if isinstance(where, slice):
        return value[(slice(None),) * dim + (where,)]
    if where.shape[0] == 1:
        return value.index_select(dim, where[0])
    value, index = by_row(value, where, batch)
    shape = [1] * value.dim()
    shape[batch or 0], shape[dim] = index.shape
    size = list(value.shape)
    size[dim] = index.shape[1]
    return value.gather(dim, index.view(shape).expand(size))


def by_row(value: Tensor, rows: Tensor, batch: int | None) -> tuple[Tensor, Tensor]:
    """`value` with a row for each of `rows`, and these as often as each stands in `value`, once a head where heads are rows."""
    if batch is None:
        batch = 0
        if value.shape[0] != 1:
            raise DoesNotFitError(
                f"a strided layer was handed a table of shape {tuple(value.shape)} for a batch with padding",
                why="its rows keep tokens at different positions, and the table has no dimension for the rows",
                remedy="run sequences of one length without padding",
            )
    if value.shape[batch] == 1:
        value = value.expand([rows.shape[0] if dim == batch else -1 for dim in range(value.dim())])
    times = value.shape[batch] // rows.shape[0]
    return value, rows.repeat_interleave(times, 0) if times > 1 else rows


def hide(mask: Tensor, dim: int, keys: Tensor, batch: int | None) -> Tensor:
    """`mask`, along whose dimension `dim` only the `keys` (rows, n) that are true may be seen."""
    if keys.shape[0] > 1:
        mask, keys = by_row(mask, keys, batch)
    shape = [1] * mask.dim()
    shape[batch or 0], shape[dim] = keys.shape
    keys = keys.view(shape)
    if mask.dtype == torch.bool:
        return mask & keys
    added = mask.is_floating_point() and mask.dim() > 2
    return mask.masked_fill(~keys, torch.finfo(mask.dtype).min if added else 0)


# ── Anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class EvenAnchors:
    """The anchors among `length` tokens after `before` others, the same in every row: columns first, first + k, …"""

    valid: Tensor | None = None  # all are anchors

    def __init__(self, before: int, length: int, k: int) -> None:
        self.k, self.length = k, length
        self.first = -before % k
        self.count = max(0, (length - self.first + k - 1) // k)

    @property
    def where(self) -> Where:
        return slice(self.first, None, self.k)

    def columns(self, device: torch.device) -> Tensor:
        """(1, anchors)"""
        return torch.arange(self.first, self.first + self.count * self.k, self.k, device=device)[None]

    def pick(self, x: Tensor) -> Tensor:
        """The anchors' states: (batch, T, d) gives (batch, anchors, d)."""
        return x[:, self.first :: self.k].contiguous()  # as layers are handed their stream everywhere else

    def mean(self, x: Tensor) -> Tensor:
        """The mean over each anchor's window, of a sequence that begins with an anchor: (batch, anchors, d)."""
        missing = self.count * self.k - self.length
        sums = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(1, (self.count, self.k)).sum(2)
        sizes = torch.full((self.count, 1), self.k, dtype=x.dtype, device=x.device)
        sizes[-1] -= missing
        return sums / sizes

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """For each token its anchor's value; `earlier` (batch, 1, d) is that of the last anchor before them."""
        k = self.k
        spread = values.unsqueeze(2).expand(-1, -1, k, -1).flatten(1, 2)  # (batch, anchors · k, d)
        if earlier is None:
            return spread.narrow(1, 0, self.length)
        head = min(self.first, self.length)
        return torch.cat([earlier.expand(-1, head, -1), spread.narrow(1, 0, self.length - head)], 1)

    def are(self, x: Tensor) -> Tensor:
        """Which tokens are anchors: (1, T, 1)."""
        return ((torch.arange(self.length, device=x.device) - self.first) % self.k == 0)[None, :, None]


class CountedAnchors:
    """The anchors among tokens of which those are real where `real` (rows, T) is true, after `before` (rows, 1) real ones.

    There are `count` of them in every row; where a row has fewer, its first one stands in for the others, which `valid` leaves out.
    These come last, so that a causal layer cannot see them, or with `filled_last` first, so that a recurrent one ends on an anchor.
    """

    def __init__(
        self, real: Tensor, k: int, before: Tensor | int = 0, count: int | None = None, *, filled_last: bool = False
    ) -> None:
        length = real.shape[1]
        self.k, self.real = k, real
        self.count = (length + k - 1) // k if count is None else count
        position = real.cumsum(1) - 1 + before
        self.anchors = real & (position % k == 0)  # (rows, T)
        number = self.anchors.cumsum(1)  # of anchors up to each token
        own = self.anchors.sum(1, keepdim=True)  # of anchors in each row
        start = self.count - own if filled_last else torch.zeros_like(own)
        self.slot = number - 1 + start  # of each token's anchor, below `start` for tokens before the first
        self.early = number == 0
        columns = torch.arange(length, device=real.device).expand_as(real)
        slots = torch.where(self.anchors, self.slot, self.count)
        first = self.anchors.int().argmax(1, keepdim=True)
        self.index = first.expand(-1, self.count + 1).scatter(1, slots, columns).narrow(1, 0, self.count)
        place = torch.arange(self.count, device=real.device)
        self.valid = (place >= start) & (place < start + own)  # (rows, anchors)

    @property
    def where(self) -> Where:
        return self.index

    def columns(self, device: torch.device) -> Tensor:
        """(rows, anchors)"""
        return self.index

    def pick(self, x: Tensor) -> Tensor:
        """The anchors' states: (batch, T, d) gives (batch, anchors, d)."""
        return take(x, 1, self.index)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the real tokens of each anchor's window, of sequences that begin with an anchor: (batch, anchors, d)."""
        slots = torch.where(self.real, self.slot, self.count).expand(x.shape[0], -1)
        sums = x.new_zeros(x.shape[0], self.count + 1, x.shape[2]).scatter_add(1, slots.unsqueeze(-1).expand_as(x), x)
        sizes = x.new_zeros(x.shape[0], self.count + 1).scatter_add(1, slots, x.new_ones(slots.shape))
        return (sums / sizes.clamp(min=1).unsqueeze(-1)).narrow(1, 0, self.count)

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """For each token its anchor's value; `earlier` (batch, 1, d) is that of the last anchor before them."""
        if earlier is None:
            return take(values, 1, self.slot.clamp(min=0))
        return take(torch.cat([earlier, values], 1), 1, torch.where(self.early, 0, self.slot + 1))

    def are(self, x: Tensor) -> Tensor:
        """Which tokens are anchors: (rows, T, 1)."""
        return self.anchors.unsqueeze(-1)
