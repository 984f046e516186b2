"""A strided layer's part of a static cache: tensors that do not move, so that a step can be compiled, or captured in a CUDA graph.

    keys, values   (batch, heads, ⌈size/k⌉ + 1, head width)   each anchor at the index of its number in its row
    correction     (batch, 1, d)                              of the last anchor
    passed         ()                                         tokens so far, padding included
    counted        (batch, 1)                                 those of them that are no padding, where rows differ
    columns        (batch, ⌈size/k⌉ + 1)                      of the anchors, where rows differ

The last entry is for slots without an anchor; no query sees it. While no row has padding (`even`), the program knows whether the
next token is an anchor, and there are two compiled steps, one that runs the layer and one that does not. If rows differ, the layer
runs at every compiled step, and its results for rows without an anchor are dropped.

Compiled code cannot read a mask. It takes rows as equal if nothing could show padding (`UnpaddedCalls`), or if they were equal so
far and the new token comes alone: with transformers, such a token was generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from retrofit.passes.sequence_altup.anchor_cache import AnchorKeys, AnchorLayer, SecondaryAnchorKeys, self_attention
from retrofit.passes.sequence_altup.arguments import Anchors, CountedAnchors, EvenAnchors, Indices, MaskArgument
from retrofit.sdk import CaptureError
from retrofit.sdk.modules import mark_as_fixed

TENSORS = ("keys", "values", "correction", "passed", "counted", "columns")


def has_fixed_size(cache: Cache) -> bool:
    """Return whether the cache is static, and all its layers keep every token, and only keys and values."""
    held = self_attention(cache)
    return isinstance(held, StaticCache) and all(type(layer) is StaticLayer or is_fixed(layer) for layer in held.layers)


def is_fixed(layer: Any) -> bool:
    return isinstance(layer, (FixedAnchorLayer, SecondaryFixedKeys))


def hides_values(mask: Tensor | None) -> bool:
    """Return whether the program cannot read the values of a mask: it is compiled, or captured in a CUDA graph."""
    return torch.compiler.is_compiling() or (mask is not None and mask.is_cuda and torch.cuda.is_current_stream_capturing())


class Place:
    """A token's place in its anchor's window. Compiled steps depend on `is_anchor` alone, which has two values, not k."""

    def __init__(self, number: int) -> None:
        self.number, self.is_anchor = number, number == 0
        self.following: Place = self

    @staticmethod
    def first(k: int) -> Place:
        """Return the anchor's place; the place after the last is the anchor's again."""
        places = [Place(number) for number in range(k)]
        for place, following in zip(places, places[1:] + places[:1], strict=True):
            place.following = following
        return places[0]

    def after(self, count: int) -> Place:
        """Return the place of the token `count` tokens later."""
        place = self
        for _ in range(count):
            place = place.following
        return place


class FixedAnchorLayer(AnchorLayer):
    """The anchor layer of a static cache of `size` tokens."""

    is_compileable = True
    is_croppable = is_sliding = False

    def __init__(self, name: str, k: int, mask_argument: MaskArgument | None, size: int) -> None:
        self.mask_argument, self.size, self.most = mask_argument, size, -(-size // k)
        super().__init__(name, k)

    def forget(self) -> None:
        """Store nothing: the tensors stay where they are, and become zeros."""
        held = {name: self.__dict__.get(name) for name in TENSORS}
        super().forget()
        self.recurrent = ()
        self.even: bool | None = None  # whether no row has padding; None before the first token
        self.place = Place.first(self.k)  # of the next token, while no row has padding
        self.correction: Tensor | None = None
        self.passed: Tensor | None = None
        self.counted: Tensor | None = None
        self.columns: Tensor | None = None
        self.slots: Tensor | None = None  # of the new anchors, during a call
        self.is_alone = False  # whether attention gets only the keys of this call, during a call
        for name, tensor in held.items():
            if tensor is not None:
                setattr(self, name, tensor.zero_())
        self.is_initialized = self.keys is not None

    # Parts of a step.

    @property
    def earlier(self) -> Tensor | None:
        return self.correction

    @property
    def start(self) -> int | Tensor:
        return 0 if self.even is None or self.passed is None else self.passed

    def offset(self, length: int) -> int:
        return 0

    def anchors(self, length: int, real: Tensor | None, batch: int) -> Anchors:
        traced = hides_values(real)
        is_first, was_even = self.even is None, self.even is not False
        if not was_even or real is None:
            self.even = was_even
        elif traced:
            self.even = length == 1 and not is_first
        else:
            self.even = bool(real.all())
        self.is_alone = is_first
        if self.even:
            before = self.place.number if length > 1 else 0 if self.place.is_anchor else 1
            even = EvenAnchors(before, length, self.k)
            self.slots = torch.arange(even.count, device=self.device_of(real))
            if not is_first and self.passed is not None:
                self.slots = self.slots + (self.passed + self.k - 1) // self.k
            return even
        if was_even:
            self.begin_ragged(batch, real)
        assert self.counted is not None and self.columns is not None
        real = torch.ones_like(self.counted, dtype=torch.bool).expand(-1, length) if real is None else real.expand(batch, -1)
        found = CountedAnchors(real, self.k, self.counted, filled_first=True)
        if not traced:
            most = int(found.anchors.sum(1).max())
            most = max(1, most) if is_first else most
            found = CountedAnchors(real, self.k, self.counted, most, filled_first=True)
        number = torch.cumsum(found.valid, 1) - 1 + (self.counted + self.k - 1) // self.k
        self.slots = torch.where(found.valid, number, self.most)
        self.columns.scatter_(1, self.slots, self.start + found.index)
        self.counted.add_(real.sum(1, keepdim=True))
        return found

    def device_of(self, real: Tensor | None) -> torch.device | None:
        known = self.passed if self.passed is not None else real
        return None if known is None else known.device

    def begin_ragged(self, batch: int, real: Tensor | None) -> None:
        """Allow rows with different anchors from now on."""
        device = self.device_of(real)
        self.keep("columns", (torch.arange(self.most + 1, device=device) * self.k).expand(batch, -1))
        self.keep("counted", torch.zeros(batch, 1, dtype=torch.long, device=device) + self.start)

    def make_room(self, new: Anchors, key_extents: Callable[[], list[int]]) -> None:
        """Give attention all entries, and the keys of the first call alone where no mask would hide the unused ones."""
        self.is_alone = self.is_alone and self.even is True and not key_extents()

    def key_indices(self, new: Anchors, offset: int, extent: int, device: torch.device) -> tuple[Indices, Tensor | None]:
        if self.even:  # later entries are later than the new tokens, and the model's own mask hides them
            return slice(0, new.count * self.k if self.is_alone else extent, self.k), None
        assert self.columns is not None
        return self.columns.clamp(0, extent - 1), self.used & (self.columns < extent)

    @property
    def used(self) -> Tensor:
        """Return the mask of entries with an anchor, the new ones included, if rows differ: (batch, entries)."""
        assert self.counted is not None
        number = torch.arange(self.most + 1, device=self.counted.device)
        return number < (self.counted + self.k - 1) // self.k

    def sees_all(self, new: Anchors) -> bool:
        return self.even is True or (torch.compiler.is_compiling() and self.mask is None)

    def visible(self, new: CountedAnchors) -> Tensor:
        assert self.slots is not None
        number = torch.arange(self.most + 1, device=self.slots.device)
        return self.used[:, None, None, :] & (number <= self.slots[:, None, :, None])

    def advance(self, new: Anchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        if corrections is not None:
            last = corrections[:, -1:]
            if new.valid is not None and self.correction is not None:
                last = torch.where(new.valid[:, -1:, None], last, self.correction)
            self.keep("correction", last)
            if self.passed is None:
                self.passed = mark_as_fixed(torch.zeros((), dtype=torch.long, device=last.device))
        assert self.passed is not None
        self.passed.add_(length)
        self.place = self.place.following if length == 1 else self.place.after(length % self.k)
        self.slots = None

    def keep(self, name: str, value: Tensor) -> None:
        """Store `value`, in place where nothing needs what was stored."""
        stored = getattr(self, name)
        if stored is None or stored.shape != value.shape or (torch.is_grad_enabled() and value.requires_grad):
            setattr(self, name, mark_as_fixed(value.clone()))
        else:
            stored.copy_(value)

    # Methods of a layer of a cache.

    def replace(self, layer: Any) -> None:
        if not torch.compiler.is_compiling():
            self.require_empty(layer)
        self.counter = layer

    def secondary_keys(self) -> SecondaryFixedKeys:
        return SecondaryFixedKeys(self)

    def append(self, name: str, new: Tensor) -> Tensor:
        return self.insert(self, name, new)

    def insert(self, layer: AnchorKeys, name: str, new: Tensor) -> Tensor:
        """Store the new anchors' keys or values in `layer`, each at the index of its number; return what attention reads."""
        stored = getattr(layer, name)
        if stored is None:
            batch, heads, _, width = new.shape
            stored = mark_as_fixed(new.new_zeros(batch, heads, self.most + 1, width))
            setattr(layer, name, stored)
        assert self.slots is not None
        if self.even:
            stored.index_copy_(2, self.slots.to(new.device), new)
            return new if self.is_alone else stored[:, :, : self.most]
        return stored.scatter_(2, self.slots[:, None, :, None].expand(new.shape), new)  # type: ignore[no-any-return]

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return self.counter is not None and not self.histories

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.size, 0

    def get_seq_length(self) -> int:
        return self.start  # type: ignore[return-value]  # a tensor, as of transformers' own static layers

    def get_max_length(self) -> int:
        return self.size

    def reset(self) -> None:
        self.forget()

    # States in and out of a program that decodes.

    def carried(self) -> dict[str, Tensor]:
        raise CaptureError(
            f"the strided layer {self.name} keeps its anchors in a static cache",
            why="an exported program carries only as many anchors as the tokens need",
            code="static-cache",
            remedy="use a DynamicCache",
        )

    def carrying(self, states: dict[str, Tensor]) -> AnchorLayer:
        self.carried()
        raise NotImplementedError

    # Changes by generation.

    def each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in (self, *self.secondary):
            for name in TENSORS:
                value = getattr(layer, name, None)
                if value is not None and value.dim():
                    changed = change(value)
                    if changed.shape == value.shape:
                        value.copy_(changed)
                    else:
                        setattr(layer, name, mark_as_fixed(changed))


class SecondaryFixedKeys(SecondaryAnchorKeys):
    """Keys and values of a strided layer's second and later attention in a static cache, at the slots of the first."""

    is_croppable = is_sliding = False

    def __init__(self, first: FixedAnchorLayer) -> None:
        self.first = first
        super().__init__(first.name)

    def forget(self) -> None:
        held = self.__dict__.get("keys"), self.__dict__.get("values")
        super().forget()
        self.keys, self.values = (None if tensor is None else tensor.zero_() for tensor in held)
        self.is_initialized = self.keys is not None

    def replace(self, layer: Any) -> None:
        self.counter = layer

    def append(self, name: str, new: Tensor) -> Tensor:
        return self.first.insert(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.first.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.first.get_seq_length()

    def get_max_length(self) -> int:
        return self.first.size

    def count_tokens(self, length: int) -> None:
        """Do nothing: the anchor layer counts the tokens."""

    def reset(self) -> None:
        self.forget()
