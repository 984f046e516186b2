"""A layer of the model's cache that stores keys and values of anchors only, and reports to the model the number of all tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from retrofit.sdk import DoesNotFitError


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
        """Nothing is stored."""
        self.keys = self.values = None  # (batch, heads, anchors, head width)
        self.indexed: Tensor | None = None  # (batch, anchors, width)
        self.room = 0  # how many entries attention is given, of which the last may be unused; 0: those that are stored
        self.rooms: dict[str, Tensor] = {}  # the tensors of that size, of which keys and values are then the first part
        self.is_initialized = False

    def replace(self, layer: Any) -> None:
        """From here on this layer replaces `layer`, which is empty."""
        if isinstance(layer, AnchorKeys) or int(layer.get_seq_length()):
            raise DoesNotFitError(
                f"the strided layer {self.name} received a cache with tokens in it",
                why="another layer put them there, which saw every token",
                remedy="start from an empty cache",
            )
        self.counter = copy.copy(layer)
        self.counter.is_initialized = False

    def count_tokens(self, length: int) -> None:
        """For the model, `length` tokens more are stored."""
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
        """All entries, the new ones last, and behind them what is unused of `room`."""
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
    """Whether `part` is the first entries of `whole`, in the same memory."""
    return part.data_ptr() == whole.data_ptr() and part.stride() == whole.stride() and len(part) == len(whole)


class SecondaryAnchorKeys(AnchorKeys):
    """Keys and values of a strided layer's second and later attention; the anchor layer of the first reorders and crops them."""

    def replace(self, layer: Any) -> None:
        if isinstance(layer, LinearAttentionLayer) or hasattr(layer, "update_indexer"):
            raise DoesNotFitError(
                f"the strided layer {self.name} has several attentions, one of which keeps more than keys and values",
                why="a strided layer can keep recurrent states or indexer keys for one attention only",
                remedy="leave the layer out with layers=…",
            )
        super().replace(layer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Done by the anchor layer."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Done by the anchor layer."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Done by the anchor layer."""
