"""States in a cache that are no keys and values: those of recurrent layers, and whatever a cache class keeps in lists of its own.

A strided layer that is recurrent must not advance these states for rows that are not at an anchor: they are copied before the layer
runs and restored after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from retrofit.passes.sequence_altup.cache_view import self_attention

StateKey = tuple[str, int | str, int | str]  # an attribute of a cache ("") or of its layer of that index, and the entry in it


def states_in(cache: Cache) -> dict[StateKey, Tensor]:
    """The states in the cache that are no keys and values."""
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
    """The entries of a list or dictionary; none of anything else."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []


def copy_states(cache: Cache, keys: Collection[StateKey] | None = None) -> dict[StateKey, Tensor]:
    """A copy of all states, or of those at `keys`: layers may update them in place."""
    return {key: value.clone() for key, value in states_in(cache).items() if keys is None or key in keys}


def changed_states(before: Mapping[StateKey, Tensor], cache: Cache) -> tuple[StateKey, ...]:
    """The states that are new, or differ from `before`."""
    return tuple(key for key, value in states_in(cache).items() if key not in before or not torch.equal(before[key], value))


def restore_states(cache: Cache, before: dict[StateKey, Tensor], advanced: Tensor) -> None:
    """Rows that `advanced` (batch) does not name have the states of `before` again."""
    held = self_attention(cache)
    for (name, index, key), old in before.items():
        table: Any = getattr(held.layers[index] if isinstance(index, int) else held, name)
        rows = advanced.view(-1, *[1] * (old.dim() - 1))
        table[key].copy_(torch.where(rows, table[key], old))  # in place: the tensors of a static cache must not move
