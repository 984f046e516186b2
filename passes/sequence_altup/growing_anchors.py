"""A strided layer's part of the model's cache in decoding: keys and values of its anchors, and their corrections.

If the attention selects its keys by other ones (an indexer), these are stored too. Beam search, cropping, repeating and resetting
work as with any other layer of the cache.

While no row has padding, anchors are counted in Python numbers, and nothing waits for the device. Otherwise rows reach their
anchors at different steps: a row without an anchor leaves a hole, which no query sees and which is closed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from retrofit.passes.sequence_altup.anchor_cache import AnchorKeys, AnchorLayer, PlacedAnchorLayer
from retrofit.passes.sequence_altup.arguments import Anchors, CountedAnchors, EvenAnchors, Indices, MaskArgument, RaggedAnchors
from retrofit.sdk import CaptureError, RetrofitError
from retrofit.sdk.modules import SLACK

SERIES = {"keys": 2, "values": 2, "indexed": 1}  # stored tensors of each anchor, and their dimension of anchors


class GrowingAnchorLayer(AnchorLayer):
    """The anchor layer that keys are appended to; it also stores the corrections that cropping may need again.

    `mask_argument` is the argument with the layer's mask when the model was rewritten, None if it takes none.
    """

    def __init__(self, name: str, k: int, mask_argument: MaskArgument | None = None) -> None:
        self.mask_argument = mask_argument
        super().__init__(name, k)

    def forget(self) -> None:
        super().forget()
        self.dropped = 0  # anchors that have left the window, while all rows have the same
        self.left: RaggedAnchors | None = None  # anchors outside the window that cropping may restore
        self.lost = 0  # columns before this one cannot be restored
        self.corrections: Tensor | None = None  # (batch, n, d), of the last anchors
        self.real: Tensor | None = None  # (batch, tokens); None if all are real
        self.columns: Tensor | None = None  # (batch, anchors) of each entry, if rows differ
        self.valid: Tensor | None = None
        self.ragged: RaggedAnchors | None = None  # the corrections, if rows differ

    # Parts of a step.

    @property
    def kept(self) -> int:
        """The number of stored corrections: that of the last anchor, and those that cropping may need again."""
        return SLACK // self.k + 2

    @property
    def earlier(self) -> Tensor | None:
        stored = self.ragged.values[0] if self.ragged is not None else self.corrections
        return None if stored is None or not stored.shape[1] else stored[:, -1:]

    @property
    def stored(self) -> int:
        """The number of stored anchors, while all rows have the same."""
        return -(-self.tokens // self.k) - self.dropped

    def offset(self, length: int) -> int:
        return int(self.counter.get_mask_sizes(length)[1]) if self.counter is not None else 0

    def anchors(self, length: int, real: Tensor | None, batch: int) -> Anchors:
        tracing = torch.compiler.is_compiling()
        if real is not None and self.real is None and not tracing and bool(real.all()):
            real = None
        if real is None and self.real is None:
            return EvenAnchors(self.tokens, length, self.k)
        if self.real is None:
            assert real is not None
            self.begin_ragged(batch, real.device)
        assert self.real is not None
        real = self.real.new_ones(batch, length) if real is None else real.expand(batch, -1)
        before = self.real.sum(1, keepdim=True)
        found = CountedAnchors(real, self.k, before, filled_first=not self.tokens)
        if tracing:
            return found
        most = int(found.anchors.sum(1).max())
        most = most if self.earlier is not None else max(1, most)
        return CountedAnchors(real, self.k, before, most, filled_first=not self.tokens)

    def begin_ragged(self, batch: int, device: torch.device) -> None:
        """Allow rows with different anchors from now on."""
        for name in [name for name, history in self.histories.items() if getattr(history, "follows_from_keys", False)]:
            del self.histories[name]  # keys change places when holes are closed
        self.real = torch.ones(batch, self.tokens, dtype=torch.bool, device=device)
        columns = (torch.arange(self.dropped + self.stored, device=device) * self.k).expand(batch, -1)
        valid = torch.ones_like(columns, dtype=torch.bool)
        self.columns, self.valid = columns[:, self.dropped :], valid[:, self.dropped :]
        if self.corrections is not None:  # also of anchors that have left the window
            last = self.corrections.shape[1]
            self.ragged = RaggedAnchors(columns[:, -last:], valid[:, -last:], (self.corrections,))
            self.corrections = None

    def make_room(self, new: Anchors, key_extents: Callable[[], list[int]]) -> None:
        """Give attention as many entries at every step in a static cache: kernels are chosen, or built, for each number."""
        room = self.room_for(new.count, key_extents)
        for layer in (self, *self.secondary):
            layer.room = room

    def room_for(self, count: int, key_extents: Callable[[], list[int]]) -> int:
        """Return the room for anchors; 0 if the cache grows, or masks do not show its size."""
        if self.counter is None or not self.counter.is_compileable or self.is_sliding:
            return 0
        size, extents = int(self.counter.get_mask_sizes(1)[0]), key_extents()
        if not extents or any(extent != size for extent in extents):
            return 0
        most = -(-size // self.k)
        if self.columns is None:
            return most
        most += 1  # if rows differ, one may wait for the others
        return most if self.columns.shape[1] + count <= most else 0

    def key_indices(self, new: Anchors, offset: int, extent: int, device: torch.device) -> tuple[Indices, Tensor | None]:
        if self.real is None and self.room:
            return slice(0, extent, self.k), (torch.arange(self.room, device=device) < self.stored + new.count)[None]
        if self.real is None:
            start = self.dropped * self.k - offset
            return slice(start, start + (self.stored + new.count) * self.k, self.k), None
        assert self.columns is not None and self.valid is not None and new.valid is not None
        keys = torch.cat([self.columns, self.tokens + new.columns(device)], 1) - offset
        visible = torch.cat([self.valid, new.valid], 1) & (keys >= 0) & (keys < extent)
        if self.room:
            unused = (0, self.room - keys.shape[1])
            keys, visible = torch.nn.functional.pad(keys, unused), torch.nn.functional.pad(visible, unused)
        return keys.clamp(0, extent - 1), visible

    def series(self) -> list[tuple[AnchorKeys, str, Tensor]]:
        """Return the stored tensors of each anchor: by cache layer and name."""
        layers = (self, *self.secondary)
        return [(layer, name, value) for layer in layers for name in SERIES if (value := getattr(layer, name)) is not None]

    def sees_all(self, new: Anchors) -> bool:
        if self.valid is None or new.valid is None:
            return True
        return bool(self.valid.all()) and (new.count == 1 or bool(new.valid.all()))

    def visible(self, new: CountedAnchors) -> Tensor:
        assert self.valid is not None
        keys = torch.cat([self.valid, new.valid], 1)[:, None, None, :]
        order = torch.ones(new.count, keys.shape[-1], dtype=torch.bool, device=keys.device)
        return keys & order.tril(self.valid.shape[1])

    def advance(self, new: Anchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        for layer in (self, *self.secondary):
            layer.count_tokens(length)
        if self.real is None:
            self.tokens += length
            if corrections is not None:
                joined = corrections if self.corrections is None else torch.cat([self.corrections, corrections], 1)
                self.corrections = joined[:, -self.kept :]
            self.drop_outside_window()
            return
        assert self.columns is not None and self.valid is not None
        batch, device = len(self.real), self.real.device
        passed = self.real.new_ones(batch, length) if real is None else real.expand(batch, -1)
        self.real = torch.cat([self.real, passed], 1)
        if corrections is not None:
            assert new.valid is not None
            columns = self.tokens + new.columns(device)
            if self.ragged is None:
                nothing = columns[:, :0]
                self.ragged = RaggedAnchors(nothing, nothing.bool(), (corrections[:, :0],))
            self.ragged = self.ragged.append(columns, new.valid, (corrections,))
            self.columns, self.valid = torch.cat([self.columns, columns], 1), torch.cat([self.valid, new.valid], 1)
        self.tokens += length
        if not torch.compiler.is_dynamo_compiling():  # how many there are is in the values
            self.close_holes()

    def drop_outside_window(self) -> None:
        """Remove anchors that no later mask covers; all rows have the same."""
        gone = -(-self.offset(1) // self.k) - self.dropped
        if gone > 0:
            if self.records_past:
                values = tuple(layer[:, :gone] for layer in self.values_by_anchor())
                columns = (torch.arange(gone, device=values[0].device) + self.dropped) * self.k
                columns = columns.expand(len(values[0]), -1)
                self.keep_left(RaggedAnchors(columns, torch.ones_like(columns, dtype=torch.bool), values))
            self.dropped += gone
            for layer, name, value in self.series():
                setattr(layer, name, value.narrow(SERIES[name], gone, value.shape[SERIES[name]] - gone))
        self.note_lost()

    def values_by_anchor(self) -> tuple[Tensor, ...]:
        """Return the stored tensors by anchor: (batch, anchors, …) each."""
        return tuple(value.transpose(1, SERIES[name]) for _, name, value in self.series())

    @property
    def records_past(self) -> bool:
        """True if tokens may be removed after a window is full, which assisted decoding requests from a cache."""
        return bool(getattr(self.counter, "record_past", False))

    def keep_left(self, out: RaggedAnchors) -> None:
        """Set aside these anchors, which left the window; cropping by up to SLACK tokens may need them again."""
        left = out if self.left is None else self.left.append(out.columns, out.valid, out.values)
        left = left.compact(left.valid & (left.columns >= self.offset(1) - SLACK))
        self.left = RaggedAnchors(left.columns, left.valid, tuple(value.clone() for value in left.values))  # no views of all

    def note_lost(self) -> None:
        """Forget anchors before the window, or far before it if the past is recorded."""
        self.lost = max(self.lost, self.offset(1) - (SLACK if self.records_past else 0))

    def bring_back(self) -> None:
        """Bring anchors that had left the window back: it begins earlier after tokens were removed."""
        first = self.offset(1)
        if first < self.lost:
            raise self.cropped_too_far()
        if self.left is None or not self.left.columns.shape[1]:
            return
        left = self.left
        back = left.compact(left.valid & (left.columns >= first))
        self.left = left.compact(left.valid & (left.columns < first))
        for (layer, name, value), earlier in zip(self.series(), back.values, strict=True):
            setattr(layer, name, torch.cat([earlier.transpose(1, SERIES[name]), value], SERIES[name]))
        if self.columns is None or self.valid is None:
            self.dropped -= back.columns.shape[1]
        else:
            self.columns, self.valid = torch.cat([back.columns, self.columns], 1), torch.cat([back.valid, self.valid], 1)

    def close_holes(self) -> None:
        """Keep the anchors of rows inside the window and the sequence, without the holes that all of them have."""
        assert self.columns is not None and self.valid is not None
        real, inside = self.valid & (self.columns < self.tokens), self.columns >= self.offset(1)
        stored = RaggedAnchors(self.columns, self.valid, self.values_by_anchor())
        if self.records_past:
            self.keep_left(stored.compact(real & ~inside))
        self.note_lost()
        ragged = stored.compact(real & inside)
        self.columns, self.valid = ragged.columns, ragged.valid
        for (layer, name, _), value in zip(self.series(), ragged.values, strict=True):
            setattr(layer, name, value.transpose(1, SERIES[name]))
        if self.ragged is not None:
            self.ragged = self.ragged.compact(self.ragged.valid & (self.ragged.columns < self.tokens), self.kept)

    # Methods of a layer of a cache.

    def replace(self, layer: Any) -> None:
        super().replace(layer)
        if isinstance(layer, LinearAttentionLayer):
            self.__class__ = RecurrentAnchorLayer
            shared = vars(LinearAttentionLayer()).keys()
            self.__dict__.update((name, value) for name, value in vars(layer).items() if name in shared)
        elif hasattr(layer, "update_indexer"):
            self.__class__ = IndexedAnchorLayer
            self.indexer_position_ids = getattr(layer, "indexer_position_ids", None)

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.counter is not None else self.tokens

    # States in and out of a program that decodes.

    def carried(self) -> dict[str, Tensor]:
        """Raises `CaptureError` if states are stored that no exported program carries."""
        held = [history for history in self.histories.values() if not getattr(history, "follows_from_keys", False)]
        if self.keys is None or self.values is None or self.indexed is not None or self.recurrent or self.secondary or held:
            raise CaptureError(
                f"the strided layer {self.name} keeps more than the keys and values of one attention",
                why="an exported program does not carry recurrent states, indexer keys, a second attention's, or earlier tokens",
                remedy="convolutions with kernel=1, or in other layers by layers=…" if held else "",
                code="cache-state",
            )
        real = self.keys.new_ones(len(self.keys), 1, self.tokens, dtype=torch.bool)
        last = self.earlier
        assert last is not None
        return {"key": self.keys, "value": self.values, "correction": last, "real": real}

    def carrying(self, states: dict[str, Tensor]) -> PlacedAnchorLayer:
        return PlacedAnchorLayer(self.name, self.k, states, self.mask or self.mask_argument)

    # Changes by generation.

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        left = int(self.get_seq_length())
        if tokens_to_remove <= 0 and left != self.tokens + tokens_to_remove:  # a window counts the tokens left in it
            raise self.cropped_too_far()
        self.take_back(self.tokens - left)

    def take_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        if count <= 0:
            return
        if self.real is None:
            removed: int | Tensor = -(-self.tokens // self.k) - -(-max(0, self.tokens - count) // self.k)
        else:
            before, after = (-(-layer.sum(1) // self.k) for layer in (self.real, self.real[:, : max(0, self.tokens - count)]))
            removed = before - after
        for history in self.histories.values():
            history.take_back(removed)
        self.tokens -= count
        if not self.tokens:
            self.forget()
            return
        self.bring_back()
        if self.real is not None:
            self.real = self.real[:, : self.tokens]
            self.close_holes()
            lost = self.ragged is None or not bool((self.ragged.valid.any(1) | ~self.real.any(1)).all())
        else:
            if self.stored < 0:
                raise self.cropped_too_far()
            gone = -(-(self.tokens + count) // self.k) - self.dropped - self.stored
            for layer, name, value in self.series():
                setattr(layer, name, value.narrow(SERIES[name], 0, self.stored))
            assert self.corrections is not None
            self.corrections = self.corrections[:, : max(0, self.corrections.shape[1] - gone)]
            lost = not self.corrections.shape[1]
        if lost:
            raise self.cropped_too_far()

    def cropped_too_far(self) -> RetrofitError:
        return RetrofitError(
            "the cache was cropped by too many tokens",
            why=f"strided layers keep the corrections of the last {self.kept} anchors only",
            remedy=f"crop by at most {SLACK} tokens at a time, or start from an empty cache",
            code="cropped",
        )

    def each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer, name, value in self.series():
            setattr(layer, name, change(value))
        for name in ("corrections", "real", "columns", "valid"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, change(value))
        self.ragged = None if self.ragged is None else self.ragged.each_row(change)
        self.left = None if self.left is None else self.left.each_row(change)


class IndexedAnchorLayer(GrowingAnchorLayer):
    """A growing anchor layer whose attention selects among its keys by an indexer's keys, which are stored too.

    The model may keep the positions of all tokens there; the stride does not affect them.
    """

    indexer_position_ids: Tensor | None = None  # (numberings, batch, tokens)

    def forget(self) -> None:
        super().forget()
        self.indexer_position_ids = None

    def crop(self, tokens_to_remove: int) -> None:
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., : -abs(tokens_to_remove)]
        super().crop(tokens_to_remove)

    def each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        super().each_row(change)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = change(self.indexer_position_ids.transpose(0, 1)).transpose(0, 1)

    def room_for(self, count: int, key_extents: Callable[[], list[int]]) -> int:
        return 0  # the indexer's keys grow, and select among equally many

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Return all keys of the indexer, (batch, anchors, width), the new ones last."""
        stored = self.indexed
        self.indexed = indexer_key_states if stored is None else torch.cat([stored, indexer_key_states], 1)
        return self.indexed


class RecurrentAnchorLayer(GrowingAnchorLayer, LinearAttentionLayer):  # type: ignore[misc,override]
    """A growing anchor layer with the recurrent states of the layer it replaced, next to keys and values."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (GrowingAnchorLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        GrowingAnchorLayer.reset(self)

    def choose(self, rows: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, rows)  # type: ignore[arg-type]
        GrowingAnchorLayer.choose(self, rows)
