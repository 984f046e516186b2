"""Layers of the model's cache behind its own: what the second attention keeps of the decoder, and the first of the encoder.

A cache of n layers gets n more, of the same kinds, so whatever generation does to a cache (choosing rows for beams, taking tokens
back, a fixed length, exported states) it does to these too.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache


@contextlib.contextmanager
def second_layers(cache: Cache, layers: int) -> Iterator[Cache]:
    """Within this context: a view of `cache` whose layers are those behind its own `layers`, which exist from now on."""
    view: Any = object.__new__(type(cache))
    view.__dict__.update(cache.__dict__)
    if not isinstance(cache, EncoderDecoderCache):
        add_layers(cache, layers)
        view.layers, view.layer_class_to_replicate = cache.layers[layers:], None
        yield view
        cache.layers[layers:] = view.layers  # a cache may replace its layers as they are written to
        return
    with (
        second_layers(cache.self_attention_cache, layers) as view.self_attention_cache,
        second_layers(cache.cross_attention_cache, layers) as view.cross_attention_cache,
    ):
        view.is_updated = {index: bool(cache.is_updated.get(layers + index)) for index in range(layers)}
        yield view
        for index, is_updated in view.is_updated.items():
            cache.is_updated[layers + index] = is_updated


def add_layers(cache: Cache, layers: int) -> None:
    """The cache has twice so many layers, the second half like the first."""
    while len(cache.layers) < layers:
        assert cache.layer_class_to_replicate is not None, "a cache with a layer for each of the model's, or one that grows"
        cache.layers.append(cache.layer_class_to_replicate())
    while len(cache.layers) < 2 * layers:
        cache.layers.append(new_like(cache.layers[len(cache.layers) - layers]))


def new_like(layer: Any) -> Any:
    """A layer of a cache like another one, before any token."""
    names = inspect.signature(type(layer)).parameters
    return type(layer)(**{name: getattr(layer, name) for name in names if hasattr(layer, name)})
