"""A strided layer's part of the model's cache: keys and values of its anchors, the last correction, recurrent states.

`AnchorKeys` replaces a layer of the cache and reports the number of all tokens to the model. `AnchorLayer` is the interface for
strided layers. It has two kinds: `growing_anchors` has the one for decoding with the model's own code, which appends anchors;
`PlacedAnchorLayer` is for exported programs, whose inputs and outputs are the stored tensors:

    key, value   (batch, heads, ⌈tokens/k⌉, head width)   of the anchors, at the index of their number in their row
    correction   (batch, 1, d)                            of the last anchor; zeros before the first
    real         (batch, 1, tokens)                       which tokens so far were no padding

These sizes follow from the number of tokens, so a program can be traced with them. A row with fewer anchors has unused entries
after its own, which no query may see. In a step without an anchor, which the sizes do not show, the layer changes nothing: its
results are selected by whether there is one (`torch.where`), so an exported file need not compute the others.

Recurrent states must not advance for rows without an anchor: they are copied before the layer runs and restored after it.
"""

from __future__ import annotations

import abc
import copy
import dis
import inspect
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
    """Replacement of a layer of the cache; `counter` is a copy of that layer that counts every token, storing one number for each.

    The attention inside the strided layer reads and writes keys and values of anchors. The model reads lengths and mask sizes from
    `counter`.
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
        self.room = 0  # entries that attention receives, of which the last may be unused; 0: those that are stored
        self.rooms: dict[str, Tensor] = {}  # tensors of that size, whose first part keys and values then are
        self.is_initialized = False

    def replace(self, layer: Any) -> None:
        """Replace `layer`, which is empty, from here on."""
        self.require_empty(layer)
        self.counter = layer if torch.compiler.is_dynamo_compiling() else copy.copy(layer)  # torch 2.11 cannot trace copies
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

    # Called by the attention inside.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        return self.append("keys", key_states), self.append("values", value_states)

    def append(self, name: str, new: Tensor) -> Tensor:
        """Return all entries, the new ones last, followed by the unused part of `room`."""
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

    # Called by the model.

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """The value of the replaced layer: for a growing cache the model leaves masks out."""
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
    """Keys and values of a strided layer's second or later attention, reordered and cropped by the anchor layer of the first."""

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
        """Do nothing: the anchor layer reorders the keys."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do nothing: the anchor layer selects the rows."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Do nothing: the anchor layer repeats the rows."""


class AnchorLayer(AnchorKeys):
    """The layer of the cache for a strided layer's first attention; it also stores the correction of the last anchor.

    A strided layer without keys (a recurrent one, a feed-forward) has its anchor layer among the cache's token histories.
    """

    common = frozenset({"real"})  # carried by a program: the same for every strided layer of a model
    is_settled = False  # whether the cache itself calls this layer, with nothing else stored for modules inside the strided layer

    def __init__(self, name: str, k: int) -> None:
        self.k = k
        self.secondary: list[SecondaryAnchorKeys] = []  # of the strided layer's further attentions
        self.histories: dict[str, TokenHistory] = {}  # of anchors, by the names of the modules inside that need them
        super().__init__(name)

    def forget(self) -> None:
        super().forget()
        forget_histories(self.histories)
        self.tokens = 0  # columns so far, padding included
        self.mask: MaskArgument | None = None  # the argument with the layer's last mask
        self.template: Any = None  # rebuilds the layer's output without running the layer
        self.recurrent: tuple[tuple[str, int | str, int | str], ...] | None = None  # the cache's states that the layer advances

    def replacement_for(self, layer: Any) -> AnchorKeys:
        """Return the replacement of `layer`, which an attention inside is about to write to: this layer, or a new secondary one."""
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
        """The column of the next token: a number, or a tensor () if the cache counts on the device."""
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
        """Return the anchors among the next `length` tokens; `real` (1 or batch, length): no padding; None: all are real."""

    def make_room(self, new: Anchors, key_extents: Callable[[], list[int]]) -> None:
        """Make room for the `new` anchors, under masks by so many keys."""

    @abc.abstractmethod
    def key_indices(self, new: Anchors, offset: int, extent: int, device: torch.device) -> tuple[Indices, Tensor | None]:
        """Return which of a mask's `extent` keys are stored and `new` anchors, and which of these are visible (None: all)."""

    @abc.abstractmethod
    def sees_all(self, new: Anchors) -> bool:
        """Return whether the `new` anchors need no mask: they see all stored entries, and among themselves those before them."""

    @abc.abstractmethod
    def visible(self, new: CountedAnchors) -> Tensor:
        """Return the keys, stored and new, that each of the `new` anchors may see: (batch, 1, anchors, keys)."""

    def settled(self, y: Tensor, between: Callable[[], Tensor]) -> Tensor:
        """Return the stream after the layer: `y`, or its value `between` anchors where values decide if a new token is one."""
        return y

    @abc.abstractmethod
    def advance(self, new: Anchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        """Pass `length` tokens; `corrections` (batch, anchors, d) are their anchors', None where there were no anchors."""

    # Changes by generation.

    def each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to everything that has rows."""
        raise NotImplementedError

    def choose(self, rows: Tensor) -> None:
        """Keep only these rows; a row that is chosen twice is there twice."""
        self.each_row(lambda value: value.index_select(0, rows.to(value.device)))
        for history in self.histories.values():
            history.choose(rows)

    def repeat(self, times: int) -> None:
        """Repeat each row as often as given."""
        self.each_row(lambda value: value.repeat_interleave(times, 0))
        for history in self.histories.values():
            history.repeat(times)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.choose(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.repeat(repeats)

    # States in and out of a program that decodes.

    @abc.abstractmethod
    def carried(self) -> dict[str, Tensor]:
        """Return the stored tensors by name, for a program with them as inputs and outputs."""

    @abc.abstractmethod
    def carrying(self, states: dict[str, Tensor]) -> AnchorLayer:
        """Return a layer like this one with these states; None if there are none."""


class PlacedAnchorLayer(AnchorLayer):
    """The keys and values of a strided layer during one call of a program, each anchor at the index of its number in its row."""

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
        """Return the keys or values with the new anchors; without any, those of `before` and room for later ones."""
        if self.any is None:  # before the first step
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
        """Return the stored and the new anchors, each at the index of its number: (batch, heads, anchors, width)."""
        batch, heads, _, width = new.shape
        count = self.every.count
        room = new.new_zeros(batch, heads, count + 1 - (0 if stored is None else stored.shape[2]), width)
        whole = room if stored is None else torch.cat([stored, room], 2)
        return whole.scatter(2, self.numbers[:, None, :, None].expand(new.shape), new)[:, :, :count]


# ── The cache as a strided layer sees it ──────────────────────────────────────────────────────────────────────────────────────────


class AnchorCacheView(Cache):
    """A cache in which `anchor_layer` replaces the layer that is written to; instances come from `view_of` only."""

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
TRACES_ATTRIBUTES = torch.__version__ >= "2.13"  # whether compiled code may loop over the attributes of an object
OURS = ("histories", "staying")  # attributes of caches that passes add


def view_class(kind: type[Cache]) -> type[Cache]:
    """Return the class of views of caches of class `kind`, made once, and again for each compiled trace that needs it first."""
    known = VIEWS.get(kind)
    if known is None:
        bases = (kind,) if issubclass(kind, CacheWithHistories) else (CacheWithHistories, kind)
        bases = bases if issubclass(kind, EncoderDecoderCache) else (AnchorCacheView, *bases)
        known = type(kind.__name__, bases, {"__module__": kind.__module__})
        if not torch.compiler.is_compiling():
            VIEWS[kind] = known
    return known


def view_of(cache: Cache, layer: AnchorLayer, staying: Tensor | None = None) -> Cache:
    """Return a view of `cache`, sharing its layers, in which self-attention keeps its keys and values in `layer`.

    Modules keep their histories in it too: of anchors, of which `staying` (batch, anchors) are no fillers of shorter rows.
    """
    view: Any = object.__new__(view_class(type(cache)))
    for name, value in attributes_of(cache).items():
        setattr(view, name, value)
    if isinstance(cache, EncoderDecoderCache):
        view.self_attention_cache = view_of(cache.self_attention_cache, layer, staying)
    else:
        view.anchor_layer = layer
    view.histories, view.staying = layer.histories, staying
    return view  # type: ignore[no-any-return]


def attributes_of(cache: Cache) -> dict[str, Any]:
    """Return the attributes of a cache by name; in code compiled by a torch that cannot trace `vars`, those that its class sets."""
    if not torch.compiler.is_dynamo_compiling() or TRACES_ATTRIBUTES:
        return dict(vars(cache))
    return {name: getattr(cache, name) for name in (*initialized_names(type(cache)), *OURS) if hasattr(cache, name)}


@torch.compiler.assume_constant_result  # type: ignore[misc]
def initialized_names(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that the initializers of a class and of its bases assign."""
    codes = [inspect.unwrap(vars(base)["__init__"]) for base in kind.__mro__ if "__init__" in vars(base) and base is not object]
    return tuple(dict.fromkeys(step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"))


def self_attention(cache: Cache) -> Cache:
    """Return the cache of self-attention, one of two in an encoder-decoder's cache."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def find_anchor_layer(cache: Cache, name: str) -> AnchorLayer | None:
    """Return the anchor layer of the strided layer `name` in the cache; None if it has none yet."""
    for layer in self_attention(cache).layers:
        if isinstance(layer, AnchorLayer) and layer.name == name:
            return layer
    found: Any = getattr(cache, "histories", {}).get(name)
    return found  # type: ignore[no-any-return]


def store_anchor_layer(cache: Cache, layer: AnchorLayer) -> None:
    """Put `layer` into the cache: into its list of layers where it replaced one, otherwise next to the token histories."""
    if layer.counter is None:
        histories_of(cache)[layer.name] = layer  # type: ignore[assignment]


# ── States other than keys and values ─────────────────────────────────────────────────────────────────────────────────────────────


StateKey = tuple[str, int | str, int | str]  # an attribute of a cache ("") or of its layer of that index, and the entry in it


def states_in(cache: Cache) -> dict[StateKey, Tensor]:
    """Return the states in the cache other than keys and values."""
    held = self_attention(cache)
    found: dict[StateKey, Any] = {}
    for index, layer in enumerate(held.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                found.update({(name, index, key): value for key, value in getattr(layer, name).items()})
    for name, value in attributes_of(held).items():
        if name not in ("layers", "histories"):
            found.update({(name, "", key): item for key, item in entries(value)})
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


def entries(value: Any) -> list[tuple[int | str, Any]]:
    """Return the entries of a list or dictionary; none for anything else."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []


def copy_states(cache: Cache, keys: Collection[StateKey] | None = None) -> dict[StateKey, Tensor]:
    """Return a copy of all states, or of those at `keys`: layers may update them in place."""
    return {key: value.clone() for key, value in states_in(cache).items() if keys is None or key in keys}


def changed_states(before: Mapping[StateKey, Tensor], cache: Cache) -> tuple[StateKey, ...]:
    """Return the states that are new or differ from `before`."""
    return tuple(key for key, value in states_in(cache).items() if key not in before or not torch.equal(before[key], value))


def restore_states(cache: Cache, before: dict[StateKey, Tensor], advanced: Tensor) -> None:
    """Restore the states of `before` in the rows that `advanced` (batch) does not name."""
    held = self_attention(cache)
    for (name, index, key), old in before.items():
        table: Any = getattr(held.layers[index] if isinstance(index, int) else held, name)
        rows = advanced.view(-1, *[1] * (old.dim() - 1))
        table[key].copy_(torch.where(rows, table[key], old))  # in place: a static cache's tensors must not move
