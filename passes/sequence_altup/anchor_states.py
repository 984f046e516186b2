"""A strided layer's part of a cache as tensors that a program takes and returns: what an exported decoder goes on from.

    key, value   (batch, heads, ⌈tokens/k⌉, head width)   of the anchors, those of each row first
    correction   (batch, 1, d)                            of the last anchor; zeros before the first
    real         (batch, 1, tokens)                       which tokens so far were no padding

Their sizes follow from the number of tokens, so that a program can be traced with them: rows of fewer anchors leave places empty
behind theirs, which no query sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from retrofit.passes.sequence_altup.anchor_cache import AnchorLayer
from retrofit.passes.sequence_altup.anchors import CountedAnchors, EvenAnchors, Where
from retrofit.sdk import CaptureError


class PlacedAnchorLayer(AnchorLayer):
    """A strided layer's keys and values, each anchor in the place of its number in its row."""

    def __init__(self, name: str, k: int, states: dict[str, Tensor]) -> None:
        super().__init__(name, k)
        self.tally = DynamicLayer()
        self.recurrent = ()
        self.keys, self.values = states.get("key"), states.get("value")
        self.last = states.get("correction")
        self.real = states["real"][:, 0] if "real" in states else None
        self.tokens = self.real.shape[1] if self.real is not None else 0
        if self.keys is not None and self.values is not None:
            self.lazy_initialization(self.keys, self.values)

    def carried(self) -> dict[str, Tensor]:
        assert self.keys is not None and self.values is not None and self.last is not None and self.real is not None
        return {"key": self.keys, "value": self.values, "correction": self.last, "real": self.real[:, None]}

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
        found = CountedAnchors(new, self.k, before, filled_last=True)
        number = torch.cumsum(found.valid, 1) - 1 + (before + self.k - 1) // self.k
        self.places = torch.where(found.valid, number, self.every.count)
        return found

    def seen(
        self, new: EvenAnchors | CountedAnchors, offset: int, extent: int, device: torch.device
    ) -> tuple[Where, Tensor | None]:
        return self.every.index, self.every.valid

    def all_seen(self) -> bool:
        return not torch.compiler.is_compiling() and bool(self.every.valid.all())

    def advance(self, new: EvenAnchors | CountedAnchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        assert corrections is not None and new.valid is not None
        latest = corrections[:, -1:]
        self.last = latest if self.last is None else torch.where(new.valid[:, -1:, None], latest, self.last)
        self.real = self.every.real
        self.tokens = self.tokens + length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.placed(self.keys, key_states), self.placed(self.values, value_states)
        self.lazy_initialization(self.keys, self.values)
        return self.keys, self.values

    def placed(self, held: Tensor | None, new: Tensor) -> Tensor:
        """The anchors held and the new ones: (batch, heads, places, width)."""
        batch, heads, _, width = new.shape
        count = self.every.count
        room = new.new_zeros(batch, heads, count + 1 - (0 if held is None else held.shape[2]), width)
        whole = room if held is None else torch.cat([held, room], 2)
        return whole.scatter(2, self.places[:, None, :, None].expand(new.shape), new)[:, :, :count]


def states_of(layer: AnchorLayer) -> dict[str, Tensor]:
    """What the layer holds, by name; raises `CaptureError` where it holds other states as well."""
    if layer.keys is None or layer.values is None or layer.indexed is not None or layer.recurrent or layer.fellows:
        raise CaptureError(
            f"the strided layer {layer.name} keeps more than the keys and values of one attention",
            why="recurrent states, keys to choose by, or those of a second attention move on with its anchors",
        )
    real = layer.keys.new_ones(len(layer.keys), 1, layer.tokens, dtype=torch.bool)
    last = layer.earlier
    assert last is not None
    return {"key": layer.keys, "value": layer.values, "correction": last, "real": real}
