"""What a strided layer stores in the cache, as tensors that a program takes and returns: the state of an exported decoder.

    key, value   (batch, heads, ⌈tokens/k⌉, head width)   of the anchors, at the index of their number in their row
    correction   (batch, 1, d)                            of the last anchor; zeros before the first
    real         (batch, 1, tokens)                       which tokens so far were no padding

The sizes follow from the number of tokens, so that a program can be traced with them. A row with fewer anchors has unused entries
behind its own, which no query may see.

In a step of no anchor, which the sizes do not tell, what the layer computes changes nothing. The program says so: its results are
chosen by whether there is one (`torch.where`), so that an exported file need not compute what it does not choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from retrofit.passes.sequence_altup.anchor_layer import AnchorLayer, MaskArgument
from retrofit.passes.sequence_altup.anchors import Anchors, CountedAnchors, Indices


class PlacedAnchorLayer(AnchorLayer):
    """A strided layer's keys and values, each anchor at the index of its number in its row. It lives for one call of a program."""

    def __init__(self, name: str, k: int, states: dict[str, Tensor], mask: MaskArgument | None = None) -> None:
        super().__init__(name, k)
        self.counter = DynamicLayer()
        self.recurrent = ()
        self.mask = mask
        self.keys, self.values = states.get("key"), states.get("value")
        self.last = states.get("correction")
        self.real = states["real"][:, 0] if "real" in states else None
        self.tokens = self.real.shape[1] if self.real is not None else 0
        self.before = self.keys, self.values
        self.any: Tensor | None = None  # whether there are anchors among the new tokens
        if self.keys is not None and self.values is not None:
            self.lazy_initialization(self.keys, self.values)

    def carried(self) -> dict[str, Tensor]:
        assert self.keys is not None and self.values is not None and self.last is not None and self.real is not None
        keys, values = (self.chosen(now, then) for now, then in zip((self.keys, self.values), self.before, strict=True))
        return {"key": keys, "value": values, "correction": self.last, "real": self.real[:, None]}

    def chosen(self, now: Tensor, before: Tensor | None) -> Tensor:
        """The keys or values with those of the new anchors; where there is none, as they were `before`, and room for later ones."""
        if self.any is None:  # no step has been taken
            return now
        (batch, count), (_, heads, _, width) = self.every.index.shape, now.shape
        room = now.new_zeros(batch, heads, count - (0 if before is None else before.shape[2]), width)
        return torch.where(self.any, now, room if before is None else torch.cat([before, room], 2))

    def settled(self, y: Tensor, between: Callable[[], Tensor]) -> Tensor:
        return y if self.any is None or self.last is None else torch.where(self.any, y, between())

    def carrying(self, states: dict[str, Tensor]) -> PlacedAnchorLayer:
        return PlacedAnchorLayer(self.name, self.k, states, self.mask)

    @property
    def earlier(self) -> Tensor | None:
        return self.last

    def offset(self, length: int) -> int:
        return 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length + self.tokens, 0

    def anchors(self, length: int, real: Tensor | None, batch: int) -> CountedAnchors:
        if self.real is None:
            self.real = torch.ones(batch, 0, dtype=torch.bool, device=None if real is None else real.device)
        new = self.real.new_ones(batch, length) if real is None else real.expand(batch, -1)
        self.every = CountedAnchors(torch.cat([self.real, new], 1), self.k)
        before = self.real.sum(1, keepdim=True)
        found = CountedAnchors(new, self.k, before, filled_first=True)
        number = torch.cumsum(found.valid, 1) - 1 + (before + self.k - 1) // self.k
        self.numbers = torch.where(found.valid, number, self.every.count)
        self.any = found.valid.any()
        return found

    def key_indices(self, new: Anchors, offset: int, extent: int, device: torch.device) -> tuple[Indices, Tensor | None]:
        return self.every.index, self.every.valid

    def sees_all(self, new: Anchors) -> bool:
        """While a program is traced this is unknown: every layer gets a mask, except those that take none and see no padding."""
        if torch.compiler.is_compiling():
            return self.mask is None
        return bool(self.every.valid.all()) and (new.count == 1 or new.valid is None or bool(new.valid.all()))

    def visible(self, new: CountedAnchors) -> Tensor:
        number = torch.arange(self.every.count, device=self.numbers.device)
        return self.every.valid[:, None, None, :] & (number <= self.numbers[:, None, :, None])

    def advance(self, new: Anchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        assert corrections is not None and new.valid is not None and self.any is not None
        latest = corrections[:, -1:]
        if self.last is not None:
            latest = torch.where(self.any, torch.where(new.valid[:, -1:, None], latest, self.last), self.last)
        self.last = latest
        self.real = self.every.real
        self.tokens = self.tokens + length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.insert(self.keys, key_states), self.insert(self.values, value_states)
        self.lazy_initialization(self.keys, self.values)
        return self.keys, self.values

    def insert(self, stored: Tensor | None, new: Tensor) -> Tensor:
        """The stored anchors and the new ones, each at the index of its number: (batch, heads, anchors, width)."""
        batch, heads, _, width = new.shape
        count = self.every.count
        room = new.new_zeros(batch, heads, count + 1 - (0 if stored is None else stored.shape[2]), width)
        whole = room if stored is None else torch.cat([stored, room], 2)
        return whole.scatter(2, self.numbers[:, None, :, None].expand(new.shape), new)[:, :, :count]
