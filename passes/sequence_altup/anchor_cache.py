"""A strided layer's part of the model's cache: keys and values of its anchors, the last correction, recurrent states.

`AnchorKeys` replaces a layer of the cache and reports to the model the number of all tokens. `AnchorLayer` is the interface that a
strided layer uses. Of its two kinds `growing_anchors` has the one for decoding with the model's own code, which appends anchors;
`PlacedAnchorLayer` is the one for exported programs, which take and return what is stored as tensors:

    key, value   (batch, heads, ⌈tokens/k⌉, head width)   of the anchors, at the index of their number in their row
    correction   (batch, 1, d)                            of the last anchor; zeros before the first
    real         (batch, 1, tokens)                       which tokens so far were no padding

These sizes follow from the number of tokens, so that a program can be traced with them. A row with fewer anchors has unused entries
behind its own, which no query may see. In a step of no anchor, which the sizes do not tell, the layer changes nothing: its
results are chosen by whether there is one (`torch.where`), so that an exported file need not compute what it does not choose.

Recurrent states must not advance for rows that are not at an anchor: they are copied before the layer runs and restored after it.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from retrofit.passes.sequence_altup.arguments import Anchors, CountedAnchors, Indices, MaskArgument
from retrofit.sdk import DoesNotFitError
from retrofit.sdk.modules import CacheWithHistories, TokenHistory, forget_histories, histories_of

# ── Layers of the cache ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class AnchorKeys(CacheLayerMixin):
    """It replaces a layer of the cache, of which `counter` is a copy that counts every token, storing one number for each.

    The attention inside the strided layer reads and writes keys and values of anchors. Lengths and mask sizes, which the model
    reads, come from `counter`.
    """

    supports_early_init = False
    is_croppable = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # of the strided layer
        self.counter: CacheLayerMixin | None = None
        self.forget()

    def forget(self) -> None:
        """Store nothing."""
        self.keys = self.values = None  # (batch, heads, anchors, head width)
        self.indexed: Tensor | None = None  # (batch, anchors, width)
        self.room = 0  # how many entries attention is given, of which the last may be unused; 0: those that are stored
        self.rooms: dict[str, Tensor] = {}  # the tensors of that size, of which keys and values are then the first part
        self.is_initialized = False

    def replace(self, layer: Any) -> None:
        """Replace `layer`, which is empty, from here on."""
        self.require_empty(layer)
        self.counter = copy.copy(layer)
        self.counter.is_initialized = False

    def require_empty(self, layer: Any) -> None:
        if isinstance(layer, AnchorKeys) or int(layer.get_seq_length()):
            raise DoesNotFitError(
                f"the strided layer {self.name} received a cache with tokens in it",
                why="another layer filled it with every token",
                remedy="start from an empty cache",
                code="filled-cache",
            )

    def count_tokens(self, length: int) -> None:
        """Count `length` tokens more, as the model sees them."""
        if self.counter is not None and self.keys is not None:
            token = self.keys.new_zeros(1, 1, length, 1)
            self.counter.update(token, token)

    # What the attention inside calls.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        return self.append("keys", key_states), self.append("values", value_states)

    def append(self, name: str, new: Tensor) -> Tensor:
        """Return all entries, the new ones last, and behind them what is unused of `room`."""
        stored = getattr(self, name)
        if not self.room:
            whole = new if stored is None else torch.cat([stored, new], 2)
            setattr(self, name, whole)
            return whole
        start = 0 if stored is None else stored.shape[2]
        room = self.rooms.get(name)
        if room is None or room.shape[2] != self.room or (stored is not None and not is_front(stored, room)):
            batch, heads, _, width = new.shape
            room = self.rooms[name] = new.new_zeros(batch, heads, self.room, width)
            if stored is not None:
                room[:, :, :start] = stored
        end = start + new.shape[2]
        room[:, :, start:end] = new
        setattr(self, name, room[:, :, :end])
        return room

    # What the model calls.

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """As the replaced layer: the model leaves masks out where a cache says that it grows."""
        return self.counter is not None and self.counter.is_compileable

    @property
    def is_sliding(self) -> bool:
        return bool(getattr(self.counter, "is_sliding", False))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.counter is not None
        return self.counter.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.counter.get_seq_length() if self.counter is not None else 0

    def get_max_length(self) -> int:
        return self.counter.get_max_length() if self.counter is not None else -1

    def activate_past_recording(self) -> None:
        record = getattr(self.counter, "activate_past_recording", None)
        if record is not None:
            record()

    def crop(self, tokens_to_remove: int) -> None:
        assert self.counter is not None
        self.counter.crop(tokens_to_remove)  # type: ignore[attr-defined]

    def reset(self) -> None:
        if self.counter is not None:
            self.counter.reset()
        self.forget()


def is_front(part: Tensor, whole: Tensor) -> bool:
    """Return whether `part` is the first entries of `whole`, in the same memory."""
    return part.data_ptr() == whole.data_ptr() and part.stride() == whole.stride() and len(part) == len(whole)


class SecondaryAnchorKeys(AnchorKeys):
    """Keys and values of a strided layer's second and later attention; the anchor layer of the first reorders and crops them."""

    def replace(self, layer: Any) -> None:
        if isinstance(layer, LinearAttentionLayer) or hasattr(layer, "update_indexer"):
            raise DoesNotFitError(
                f"the strided layer {self.name} has several attentions, one of which keeps more than keys and values",
                why="a strided layer can keep recurrent states or indexer keys for one attention only",
                remedy="exclude the layer with layers=",
                code="cache-state",
            )
        super().replace(layer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Leave this to the anchor layer."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Leave this to the anchor layer."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Leave this to the anchor layer."""


class AnchorLayer(AnchorKeys):
    """The cache's layer of a strided layer's first attention: it also stores the correction of the last anchor.

    A strided layer that keeps no keys (a recurrent one, a feed-forward) has its own with the token histories of the cache.
    """

    common = frozenset({"real"})  # of what a program carries: the same for every strided layer of a model
    is_settled = False  # whether the cache itself calls this layer, and keeps nothing else for what is inside the strided layer

    def __init__(self, name: str, k: int) -> None:
        self.k = k
        self.secondary: list[SecondaryAnchorKeys] = []  # where the strided layer has several attentions, those of the others
        self.histories: dict[str, TokenHistory] = {}  # of anchors, by the names of the modules inside that need them
        super().__init__(name)

    def forget(self) -> None:
        super().forget()
        forget_histories(self.histories)
        self.tokens = 0  # columns so far, padding included
        self.mask: MaskArgument | None = None  # by which argument the layer received its last mask
        self.template: Any = None  # how the layer's output can be rebuilt without running the layer
        self.recurrent: tuple[tuple[str, int | str, int | str], ...] | None = None  # the cache's states that the layer advances

    def replacement_for(self, layer: Any) -> AnchorKeys:
        """Return what replaces `layer`, which an attention inside is about to write to: this layer, or a new secondary one."""
        own: AnchorKeys = self if self.counter is None else self.secondary_keys()
        own.replace(layer)
        if isinstance(own, SecondaryAnchorKeys):
            if own.is_sliding != self.is_sliding:
                raise DoesNotFitError(
                    f"the strided layer {self.name} has attentions with different windows",
                    why="the anchors of one strided layer leave the cache together",
                    remedy="exclude the layer with layers=",
                    code="windows",
                )
            self.secondary.append(own)
        return own

    def secondary_keys(self) -> SecondaryAnchorKeys:
        """Return an empty layer for a second or later attention."""
        return SecondaryAnchorKeys(self.name)

    @property
    def start(self) -> int | Tensor:
        """The column of the next token: a number, or a tensor () where the cache counts on the device."""
        return self.tokens

    @property
    @abc.abstractmethod
    def earlier(self) -> Tensor | None:
        """The correction of the last anchor, (batch, 1, d); None before the first."""

    @abc.abstractmethod
    def offset(self, length: int) -> int:
        """Return the column of the first key in a mask for `length` new tokens."""

    @abc.abstractmethod
    def anchors(self, length: int, real: Tensor | None, batch: int) -> Anchors:
        """Return the anchors among the next `length` tokens, of which `real` (1 or batch, length) are no padding; None: all."""

    def make_room(self, new: Anchors, key_extents: Callable[[], list[int]]) -> None:
        """Make room for the `new` anchors, under masks by so many keys."""

    @abc.abstractmethod
    def key_indices(self, new: Anchors, offset: int, extent: int, device: torch.device) -> tuple[Indices, Tensor | None]:
        """Return which of a mask's `extent` keys are stored and `new` anchors, and which of these are visible (None: all)."""

    @abc.abstractmethod
    def sees_all(self, new: Anchors) -> bool:
        """Return whether the `new` anchors need no mask: they may see every stored entry, and of one another those before them."""

    @abc.abstractmethod
    def visible(self, new: CountedAnchors) -> Tensor:
        """Return which keys, stored and new, each of the `new` anchors may see: (batch, 1, anchors, keys)."""

    def settled(self, y: Tensor, between: Callable[[], Tensor]) -> Tensor:
        """Return the stream after the layer: `y`, or its value `between` anchors where values decide if a new token is one."""
        return y

    @abc.abstractmethod
    def advance(self, new: Anchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        """Pass `length` tokens; `corrections` (batch, anchors, d) are their anchors', None where there were no anchors."""

    @abc.abstractmethod
    def carried(self) -> dict[str, Tensor]:
        """Return what is stored, as tensors by name, for a program that takes and returns them."""

    @abc.abstractmethod
    def carrying(self, states: dict[str, Tensor]) -> AnchorLayer:
        """Return a layer like this one that holds these states; nothing where there are none."""


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
        """Return the keys or values with those of the new anchors; without any, those of `before` and room for later ones."""
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
        """Return whether they need no mask; while a program is traced every layer gets one, unless it takes none."""
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
        """Return the stored anchors and the new ones, each at the index of its number: (batch, heads, anchors, width)."""
        batch, heads, _, width = new.shape
        count = self.every.count
        room = new.new_zeros(batch, heads, count + 1 - (0 if stored is None else stored.shape[2]), width)
        whole = room if stored is None else torch.cat([stored, room], 2)
        return whole.scatter(2, self.numbers[:, None, :, None].expand(new.shape), new)[:, :, :count]


# ── The cache as a strided layer sees it ──────────────────────────────────────────────────────────────────────────────────────────


class AnchorCacheView(Cache):
    """A cache in which `anchor_layer` takes over the layer that is written to; never instantiated directly, see `view_of`."""

    anchor_layer: AnchorLayer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.take_over(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self.take_over(layer_idx)
        return super().update_indexer(indexer_key_states, layer_idx)

    def take_over(self, layer_idx: int) -> None:
        """Make the cache's layer `layer_idx` one of the anchors'."""
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
        own = (self.anchor_layer, *self.anchor_layer.secondary)
        if not any(self.layers[layer_idx] is layer for layer in own):
            self.layers[layer_idx] = self.anchor_layer.replacement_for(self.layers[layer_idx])


VIEWS: dict[type[Cache], type[Cache]] = {}


def view_class(kind: type[Cache]) -> type[Cache]:
    """Return the views of caches of class `kind`; made once, but for each trace of compiled code that is the first to need it."""
    known = VIEWS.get(kind)
    if known is None:
        bases = (kind,) if issubclass(kind, CacheWithHistories) else (CacheWithHistories, kind)
        bases = bases if issubclass(kind, EncoderDecoderCache) else (AnchorCacheView, *bases)
        known = type(kind.__name__, bases, {"__module__": kind.__module__})
        if not torch.compiler.is_compiling():
            VIEWS[kind] = known
    return known


def view_of(cache: Cache, layer: AnchorLayer, staying: Tensor | None = None) -> Cache:
    """Return `cache`, with which it shares its layers, as a view in which self-attention keeps its keys and values in `layer`.

    So do modules their histories: they are of anchors, of which `staying` (batch, anchors) fill no row that has fewer.
    """
    view: Any = object.__new__(view_class(type(cache)))
    view.__dict__.update(cache.__dict__)
    if isinstance(cache, EncoderDecoderCache):
        view.self_attention_cache = view_of(cache.self_attention_cache, layer, staying)
    else:
        view.anchor_layer = layer
    view.histories, view.staying = layer.histories, staying
    return view  # type: ignore[no-any-return]


def self_attention(cache: Cache) -> Cache:
    """Return the cache of self-attention, which of an encoder-decoder's cache is one of two."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def find_anchor_layer(cache: Cache, name: str) -> AnchorLayer | None:
    """Return what the strided layer `name` keeps in the cache; None where it has kept nothing yet."""
    for layer in self_attention(cache).layers:
        if isinstance(layer, AnchorLayer) and layer.name == name:
            return layer
    found: Any = getattr(cache, "histories", {}).get(name)
    return found  # type: ignore[no-any-return]


def store_anchor_layer(cache: Cache, layer: AnchorLayer) -> None:
    """Put `layer` into the cache: into its list of layers where it replaced one, otherwise next to the token histories."""
    if layer.counter is None:
        histories_of(cache)[layer.name] = layer  # type: ignore[assignment]


# ── States that are no keys and values ────────────────────────────────────────────────────────────────────────────────────────────


StateKey = tuple[str, int | str, int | str]  # an attribute of a cache ("") or of its layer of that index, and the entry in it


def states_in(cache: Cache) -> dict[StateKey, Tensor]:
    """Return the states in the cache that are no keys and values."""
    held = self_attention(cache)
    found: dict[StateKey, Any] = {}
    for index, layer in enumerate(held.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                found.update({(name, index, key): value for key, value in getattr(layer, name).items()})
    for name, value in vars(held).items():
        if name not in ("layers", "histories"):
            found.update({(name, "", key): item for key, item in entries(value)})
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


def entries(value: Any) -> list[tuple[int | str, Any]]:
    """Return the entries of a list or dictionary; none of anything else."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []


def copy_states(cache: Cache, keys: Collection[StateKey] | None = None) -> dict[StateKey, Tensor]:
    """Return a copy of all states, or of those at `keys`: layers may update them in place."""
    return {key: value.clone() for key, value in states_in(cache).items() if keys is None or key in keys}


def changed_states(before: Mapping[StateKey, Tensor], cache: Cache) -> tuple[StateKey, ...]:
    """Return the states that are new, or differ from `before`."""
    return tuple(key for key, value in states_in(cache).items() if key not in before or not torch.equal(before[key], value))


def restore_states(cache: Cache, before: dict[StateKey, Tensor], advanced: Tensor) -> None:
    """Restore the states of `before` in the rows that `advanced` (batch) does not name."""
    held = self_attention(cache)
    for (name, index, key), old in before.items():
        table: Any = getattr(held.layers[index] if isinstance(index, int) else held, name)
        rows = advanced.view(-1, *[1] * (old.dim() - 1))
        table[key].copy_(torch.where(rows, table[key], old))  # in place: the tensors of a static cache must not move
