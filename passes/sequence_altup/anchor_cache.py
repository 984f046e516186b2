"""What a strided layer keeps in the model's cache: keys and values of its anchors, and the last correction.

To the model the cache layer stands for every token: lengths and mask sizes are those of the cache layer it takes the place of,
which goes on counting on one number a token (`tally`). To the attention inside it holds what it was given, which is anchors only:
keys, values, and where the attention chooses among its keys by others (an indexer), these too. Beams, cropping, repeating and
resetting are the cache's own, and reach it like any other layer of the cache. A layer that keeps no keys (a recurrent one, a
feed-forward) has its own among the memories of `retrofit.caching`.

While no row has padding, anchors are counted in numbers, and nothing waits for the device. Otherwise rows reach their anchors at
different steps: whoever is not at one then leaves a hole, which no query sees, and which is closed at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from retrofit.passes.sequence_altup.anchors import CountedAnchors, EvenAnchors, Where
from retrofit.sdk import SLACK, DoesNotFitError, RetrofitError, histories_of

SERIES = {"keys": 2, "values": 2, "indexed": 1}  # what is held of each anchor, and along which dimension


@dataclasses.dataclass
class Roll:
    """Values of anchors in the order of their columns: (batch, n, …) each; where rows have different ones, the holes come first."""

    columns: Tensor  # (batch, n)
    valid: Tensor  # (batch, n)
    values: tuple[Tensor, ...]

    def appended(self, columns: Tensor, valid: Tensor, values: tuple[Tensor, ...]) -> Roll:
        joined = tuple(torch.cat(pair, 1) for pair in zip(self.values, values, strict=True))
        return Roll(torch.cat([self.columns, columns], 1), torch.cat([self.valid, valid], 1), joined)

    def closed(self, valid: Tensor, most: int | None = None) -> Roll:
        """The valid entries of each row, `most` at the most, with as few holes before them as there can be."""
        width = int(valid.sum(1).max()) if valid.numel() else 0
        if width == valid.shape[1] and most is None:
            return Roll(self.columns, valid, self.values)
        width = width if most is None else min(width, most)
        order = torch.argsort(valid.int(), dim=1, stable=True)[:, valid.shape[1] - width :]

        def pick(value: Tensor) -> Tensor:
            index = order.view(*order.shape, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:])
            return value.gather(1, index)

        return Roll(pick(self.columns), pick(valid), tuple(pick(value) for value in self.values))


class AnchorKeys(CacheLayerMixin):
    """One layer of a cache, of which the model sees every token and an attention inside the strided layer every k-th."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # the strided layer's
        self.tally: CacheLayerMixin | None = None  # the cache layer whose place this one took
        self.forget()

    def forget(self) -> None:
        self.keys = self.values = None  # (batch, heads, anchors, head width)
        self.indexed: Tensor | None = None  # (batch, anchors, width)
        self.is_initialized = False

    def take_place(self, layer: Any) -> None:
        """This layer stands for `layer`, an empty one, from here on."""
        if isinstance(layer, AnchorKeys) or int(layer.get_seq_length()):
            raise DoesNotFitError(
                f"the strided layer {self.name} was handed a cache with tokens in it",
                why="another layer put them there, which saw every token",
                remedy="start from an empty cache",
            )
        self.tally = copy.copy(layer)
        self.tally.is_initialized = False

    def passed(self, length: int) -> None:
        """To the model, `length` tokens more are held."""
        if self.tally is not None and self.keys is not None:
            token = self.keys.new_zeros(1, 1, length, 1)
            self.tally.update(token, token)

    # What the attention inside asks.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        return self.keys, self.values

    # What the model asks.

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """As the layer it stands for: the model leaves masks out where a cache says that it grows."""
        return self.tally is not None and self.tally.is_compileable

    @property
    def is_sliding(self) -> bool:
        return bool(getattr(self.tally, "is_sliding", False))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.tally is not None
        return self.tally.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.tally.get_seq_length() if self.tally is not None else 0

    def get_max_length(self) -> int:
        return self.tally.get_max_length() if self.tally is not None else -1

    def activate_past_recording(self) -> None:
        record = getattr(self.tally, "activate_past_recording", None)
        if record is not None:
            record()

    def crop(self, tokens_to_remove: int) -> None:
        assert self.tally is not None
        self.tally.crop(tokens_to_remove)  # type: ignore[attr-defined]

    def reset(self) -> None:
        if self.tally is not None:
            self.tally.reset()
        self.forget()


class FellowLayer(AnchorKeys):
    """Keys and values of a strided layer's second and later attention; the layer of its first looks after them."""

    def take_place(self, layer: Any) -> None:
        if isinstance(layer, LinearAttentionLayer) or hasattr(layer, "update_indexer"):
            raise DoesNotFitError(
                f"the strided layer {self.name} has several attentions, one of which keeps more than keys and values",
                why="their states are moved on by anchors for one attention a layer only",
                remedy="leave the layer out with layers=…",
            )
        super().take_place(layer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Done with the first's."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Done with the first's."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Done with the first's."""


class AnchorLayer(AnchorKeys):
    """The cache's layer of a strided layer's first attention; it keeps the anchors' corrections, and looks after its fellows."""

    def __init__(self, name: str, k: int) -> None:
        self.k = k
        self.fellows: list[FellowLayer] = []  # where the strided layer has several attentions, those of the others
        super().__init__(name)

    def forget(self) -> None:
        super().forget()
        self.tokens = 0  # columns so far, padding included
        self.dropped = 0  # anchors that have left the window, while all rows have the same
        self.corrections: Tensor | None = None  # (batch, n, d), of the last anchors
        self.real: Tensor | None = None  # (batch, tokens), None while all are
        self.columns: Tensor | None = None  # (batch, anchors) of each entry, where rows differ
        self.valid: Tensor | None = None
        self.roll: Roll | None = None  # the corrections, where rows differ
        self.mask: tuple[Any, torch.dtype] | None = None  # where the last mask was handed over, and of which type it was
        self.template: Any = None  # how the layer's last output is made from the arguments of a call
        self.recurrent: tuple[Place, ...] | None = None  # the states in the cache that the layer inside moves on

    # What a step needs.

    @property
    def kept(self) -> int:
        """How many corrections are kept: those of the last anchor, and of as many as may be taken back."""
        return SLACK // self.k + 2

    @property
    def earlier(self) -> Tensor | None:
        """The correction of the last anchor, (batch, 1, d); None before the first."""
        held = self.roll.values[0] if self.roll is not None else self.corrections
        return None if held is None or not held.shape[1] else held[:, -1:]

    def held(self) -> int:
        """How many anchors are held, while all rows have the same."""
        return -(-self.tokens // self.k) - self.dropped

    def offset(self, length: int) -> int:
        """The column that a mask's first key stands for."""
        return int(self.tally.get_mask_sizes(length)[1]) if self.tally is not None else 0

    def anchors(self, length: int, real: Tensor | None, batch: int) -> EvenAnchors | CountedAnchors:
        """The anchors among the next `length` tokens, of which `real` (1 or batch, length) are; None: all."""
        tracing = torch.compiler.is_compiling()
        if real is not None and self.real is None and not tracing and bool(real.all()):
            real = None
        if real is None and self.real is None:
            return EvenAnchors(self.tokens, length, self.k)
        if self.real is None:
            assert real is not None
            self.part_ways(batch, real.device)
        assert self.real is not None
        real = self.real.new_ones(batch, length) if real is None else real.expand(batch, -1)
        before = self.real.sum(1, keepdim=True)
        found = CountedAnchors(real, self.k, before, filled_last=True)
        if tracing:
            return found
        most = int(found.anchors.sum(1).max())
        return CountedAnchors(real, self.k, before, most if self.earlier is not None else max(1, most), filled_last=True)

    def part_ways(self, batch: int, device: torch.device) -> None:
        """From here on rows may have anchors of their own."""
        self.real = torch.ones(batch, self.tokens, dtype=torch.bool, device=device)
        columns = (torch.arange(self.held(), device=device) + self.dropped) * self.k
        self.columns = columns.expand(batch, -1)
        self.valid = torch.ones_like(self.columns, dtype=torch.bool)
        if self.corrections is not None:
            last = self.corrections.shape[1]
            self.roll = Roll(self.columns[:, -last:], self.valid[:, -last:], (self.corrections,))
            self.corrections = None

    def seen(
        self, new: EvenAnchors | CountedAnchors, offset: int, extent: int, device: torch.device
    ) -> tuple[Where, Tensor | None]:
        """Which keys of a mask stand for the anchors held and the `new` ones, and which of these may be seen (None: all)."""
        if self.real is None:
            start = self.dropped * self.k - offset
            return slice(start, start + (self.held() + new.count) * self.k, self.k), None
        assert self.columns is not None and self.valid is not None and new.valid is not None
        keys = torch.cat([self.columns, self.tokens + new.columns(device)], 1) - offset
        seen = torch.cat([self.valid, new.valid], 1) & (keys >= 0) & (keys < extent)
        return keys.clamp(0, extent - 1), seen

    def series(self) -> list[tuple[AnchorKeys, str, Tensor]]:
        """What is held of each anchor: whose, its name, its values."""
        held = (self, *self.fellows)
        return [(one, name, value) for one in held for name in SERIES if (value := getattr(one, name)) is not None]

    def sees_all(self, new: EvenAnchors | CountedAnchors) -> bool:
        """Whether the `new` anchors may see every entry held, and of one another those before them."""
        if self.valid is None or new.valid is None:
            return True
        return bool(self.valid.all()) and (new.count == 1 or bool(new.valid.all()))

    def visible(self, new: CountedAnchors) -> Tensor:
        """Which entries held, and which of one another, the `new` anchors may see: (batch, 1, anchors, keys)."""
        assert self.valid is not None
        keys = torch.cat([self.valid, new.valid], 1)[:, None, None, :]
        order = torch.ones(new.count, keys.shape[-1], dtype=torch.bool, device=keys.device)
        return keys & order.tril(self.valid.shape[1])

    def advance(self, new: EvenAnchors | CountedAnchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        """`length` tokens have passed; their anchors' `corrections` (batch, anchors, d) are None where there were no anchors."""
        for one in (self, *self.fellows):
            one.passed(length)
        if self.real is None:
            self.tokens += length
            if corrections is not None:
                joined = corrections if self.corrections is None else torch.cat([self.corrections, corrections], 1)
                self.corrections = joined[:, -self.kept :]
            self.leave_behind()
            return
        assert self.columns is not None and self.valid is not None
        batch, device = len(self.real), self.real.device
        passed = self.real.new_ones(batch, length) if real is None else real.expand(batch, -1)
        self.real = torch.cat([self.real, passed], 1)
        if corrections is not None:
            assert new.valid is not None
            columns = self.tokens + new.columns(device)
            if self.roll is None:
                nothing = columns[:, :0]
                self.roll = Roll(nothing, nothing.bool(), (corrections[:, :0],))
            self.roll = self.roll.appended(columns, new.valid, (corrections,))
            self.columns, self.valid = torch.cat([self.columns, columns], 1), torch.cat([self.valid, new.valid], 1)
        self.tokens += length
        self.close()

    def leave_behind(self) -> None:
        """Anchors that no later mask covers are dropped."""
        gone = -(-self.offset(1) // self.k) - self.dropped
        if gone > 0:
            self.dropped += gone
            for one, name, value in self.series():
                setattr(one, name, value.narrow(SERIES[name], gone, value.shape[SERIES[name]] - gone))

    def close(self) -> None:
        """Rows keep what is still theirs, without the holes that all of them have."""
        assert self.columns is not None and self.valid is not None
        theirs = self.columns < self.tokens
        held = self.valid & theirs & (self.columns >= self.offset(1))
        series = self.series()
        turned = tuple(value.transpose(1, SERIES[name]) for _, name, value in series)
        roll = Roll(self.columns, self.valid, turned).closed(held)
        self.columns, self.valid = roll.columns, roll.valid
        for (one, name, _), value in zip(series, roll.values, strict=True):
            setattr(one, name, value.transpose(1, SERIES[name]))
        if self.roll is not None:
            self.roll = self.roll.closed(self.roll.valid & (self.roll.columns < self.tokens), self.kept)

    # As a layer of a cache.

    def take_place(self, layer: Any) -> None:
        super().take_place(layer)
        if isinstance(layer, LinearAttentionLayer):
            self.__class__ = RecurrentAnchorLayer
            shared = vars(LinearAttentionLayer()).keys()
            self.__dict__.update((name, value) for name, value in vars(layer).items() if name in shared)
        elif hasattr(layer, "update_indexer"):
            self.__class__ = IndexedAnchorLayer
            self.indexer_position_ids = getattr(layer, "indexer_position_ids", None)

    def make_room(self, layer: Any) -> AnchorKeys:
        """What takes the place of `layer`, which an attention inside is about to write to: this layer, or a new fellow."""
        held: AnchorKeys = self
        if self.tally is not None:
            held = FellowLayer(self.name)
        held.take_place(layer)
        if isinstance(held, FellowLayer):
            if held.is_sliding != self.is_sliding:
                raise DoesNotFitError(
                    f"the strided layer {self.name} has attentions with windows of their own",
                    why="anchors leave the cache together",
                    remedy="leave the layer out with layers=…",
                )
            self.fellows.append(held)
        return held

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.tally is not None else self.tokens

    # What a program that decodes takes and returns.

    def carried(self) -> dict[str, Tensor]:
        """What is held, as tensors by name."""
        from retrofit.passes.sequence_altup.anchor_states import states_of

        return states_of(self)

    def carrying(self, states: dict[str, Tensor]) -> AnchorLayer:
        """A layer like this one that holds these states; nothing where there are none."""
        from retrofit.passes.sequence_altup.anchor_states import PlacedAnchorLayer

        return PlacedAnchorLayer(self.name, self.k, states)

    # What generation does to it.

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.take_back(self.tokens - int(self.get_seq_length()))

    def take_back(self, count: int) -> None:
        """The last `count` tokens never were."""
        if count <= 0:
            return
        self.tokens -= count
        if not self.tokens:
            self.forget()
            return
        if self.real is not None:
            self.real = self.real[:, : self.tokens]
            self.close()
            lost = self.roll is None or not bool((self.roll.valid.any(1) | ~self.real.any(1)).all())
        else:
            gone = -(-(self.tokens + count) // self.k) - self.dropped - self.held()
            for one, name, value in self.series():
                setattr(one, name, value.narrow(SERIES[name], 0, self.held()))
            assert self.corrections is not None
            self.corrections = self.corrections[:, : max(0, self.corrections.shape[1] - gone)]
            lost = not self.corrections.shape[1]
        if lost:
            raise RetrofitError(
                f"the cache was cropped by {count} tokens, more than it can take back",
                why=f"strided layers keep the corrections of the last {self.kept} anchors",
                remedy=f"crop by at most {SLACK} tokens at a time, or start from an empty cache",
            )

    def choose(self, rows: Tensor) -> None:
        """The rows are those chosen; one that is chosen twice is there twice."""
        self.each_row(lambda value: value.index_select(0, rows.to(value.device)))

    def repeat(self, times: int) -> None:
        self.each_row(lambda value: value.repeat_interleave(times, 0))

    def each_row(self, change: Any) -> None:
        for one, name, value in self.series():
            setattr(one, name, change(value))
        for name in ("corrections", "real", "columns", "valid"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, change(value))
        if self.roll is not None:
            self.roll = Roll(change(self.roll.columns), change(self.roll.valid), (change(self.roll.values[0]),))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.choose(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.repeat(repeats)


class IndexedAnchorLayer(AnchorLayer):
    """The same for a layer whose attention also keeps what it chooses among the keys by.

    The model may keep the positions of all tokens there, which no layer's stride concerns.
    """

    indexer_position_ids: Tensor | None = None  # (numberings, batch, tokens)

    def forget(self) -> None:
        super().forget()
        self.indexer_position_ids = None

    def crop(self, tokens_to_remove: int) -> None:
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., : -abs(tokens_to_remove)]
        super().crop(tokens_to_remove)

    def each_row(self, change: Any) -> None:
        super().each_row(change)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = change(self.indexer_position_ids.transpose(0, 1)).transpose(0, 1)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """What is held with the new states, (batch, anchors, width), behind it."""
        held = self.indexed
        self.indexed = indexer_key_states if held is None else torch.cat([held, indexer_key_states], 1)
        return self.indexed


class RecurrentAnchorLayer(AnchorLayer, LinearAttentionLayer):  # type: ignore[misc,override]
    """The same for a layer that has recurrent states beside keys and values: they are those of the layer it stands for."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (AnchorLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        AnchorLayer.reset(self)

    def choose(self, rows: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, rows)  # type: ignore[arg-type]
        AnchorLayer.choose(self, rows)


# ── The cache as one strided layer sees it ───────────────────────────────────────────────────────────────────────────────────────


class Anchoring(Cache):
    """A cache in which the layer that is written to makes room for `anchor_layer`; never made by itself, see `seen_through`."""

    anchor_layer: AnchorLayer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.make_room(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self.make_room(layer_idx)
        return super().update_indexer(indexer_key_states, layer_idx)

    def make_room(self, layer_idx: int) -> None:
        """The layer that is written to is the anchors'."""
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
        theirs = (self.anchor_layer, *self.anchor_layer.fellows)
        if not any(self.layers[layer_idx] is one for one in theirs):
            self.layers[layer_idx] = self.anchor_layer.make_room(self.layers[layer_idx])


@functools.cache
def anchoring(kind: type[Cache]) -> type[Cache]:
    """The caches of class `kind` that make room."""
    return type(kind.__name__, (Anchoring, kind), {"__module__": kind.__module__})


def seen_through(cache: Cache, layer: AnchorLayer) -> Cache:
    """`cache`, whose layers it shares, in which self-attention keeps its keys and values in `layer`."""
    made: Any = object.__new__(type(cache) if isinstance(cache, EncoderDecoderCache) else anchoring(type(cache)))  # type: ignore[arg-type]
    made.__dict__.update(cache.__dict__)
    if isinstance(cache, EncoderDecoderCache):
        made.self_attention_cache = seen_through(cache.self_attention_cache, layer)
    else:
        made.anchor_layer = layer
    return made  # type: ignore[no-any-return]


def self_attention(cache: Cache) -> Cache:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def recalled(cache: Cache, name: str) -> AnchorLayer | None:
    """What the strided layer `name` keeps in the cache; None where it has kept nothing yet."""
    for layer in self_attention(cache).layers:
        if isinstance(layer, AnchorLayer) and layer.name == name:
            return layer
    found: Any = getattr(cache, "memories", {}).get(name)
    return found  # type: ignore[no-any-return]


def keep(cache: Cache, layer: AnchorLayer) -> None:
    """The cache holds `layer`, among its layers where it took the place of one, else among its memories."""
    if layer.tally is None:
        histories_of(cache)[layer.name] = layer  # type: ignore[assignment]


# ── Recurrent states ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

Place = tuple[str, int | str, int | str]  # an attribute of a cache or of one of its layers, the layer, the entry of the attribute


def anchor_states(cache: Cache) -> dict[Place, Tensor]:
    """The states in the cache that are no keys and values: those of recurrent layers, and whatever its class keeps in lists."""
    held = self_attention(cache)
    found: dict[Place, Any] = {}
    for index, layer in enumerate(held.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                found.update({(name, index, key): value for key, value in getattr(layer, name).items()})
    for name, value in vars(held).items():
        if name not in ("layers", "memories"):
            found.update({(name, "", key): item for key, item in entries(value)})
    return {place: value for place, value in found.items() if isinstance(value, Tensor)}


def entries(value: Any) -> list[tuple[int | str, Any]]:
    """The entries of a list or dictionary; none of anything else."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []


def copied(cache: Cache, places: Collection[Place] | None = None) -> dict[Place, Tensor]:
    """A copy of the states, or of those at `places`: a state may be moved on in place."""
    return {place: value.clone() for place, value in anchor_states(cache).items() if places is None or place in places}


def moved_on(before: Mapping[Place, Tensor], cache: Cache) -> tuple[Place, ...]:
    """The states that are new, or other than `before`."""
    return tuple(
        place for place, value in anchor_states(cache).items() if place not in before or not torch.equal(before[place], value)
    )


def give_back(cache: Cache, before: dict[Place, Tensor], moving: Tensor) -> None:
    """The states of the rows that are not `moving` (batch) are again what they were."""
    held = self_attention(cache)
    for place, old in before.items():
        name, index, key = place
        table: Any = getattr(held.layers[index] if isinstance(index, int) else held, name)
        rows = moving.view(-1, *[1] * (old.dim() - 1))
        table[key].copy_(torch.where(rows, table[key], old))  # where it lies: static caches promise that it stays there
