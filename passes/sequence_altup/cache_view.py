"""The model's cache as one strided layer sees it: the layer of the cache that its attention writes to becomes the anchors'."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from retrofit.passes.sequence_altup.anchor_layer import AnchorLayer
from retrofit.sdk import histories_of


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
        """The cache's layer `layer_idx` is one of the anchors'."""
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
        own = (self.anchor_layer, *self.anchor_layer.secondary)
        if not any(self.layers[layer_idx] is one for one in own):
            self.layers[layer_idx] = self.anchor_layer.replacement_for(self.layers[layer_idx])


@functools.cache
def view_class(kind: type[Cache]) -> type[Cache]:
    """The views of caches of class `kind`."""
    return type(kind.__name__, (AnchorCacheView, kind), {"__module__": kind.__module__})


def view_of(cache: Cache, layer: AnchorLayer, staying: Tensor | None = None) -> Cache:
    """`cache`, with which it shares its layers, as a view in which self-attention keeps its keys and values in `layer`.

    So do modules their histories: they are of anchors, of which `staying` (batch, anchors) fill no row that has fewer.
    """
    view: Any = object.__new__(type(cache) if isinstance(cache, EncoderDecoderCache) else view_class(type(cache)))  # type: ignore[arg-type]
    view.__dict__.update(cache.__dict__)
    if isinstance(cache, EncoderDecoderCache):
        view.self_attention_cache = view_of(cache.self_attention_cache, layer, staying)
    else:
        view.anchor_layer = layer
    histories_of(view)
    view.histories, view.staying = layer.histories, staying
    return view  # type: ignore[no-any-return]


def self_attention(cache: Cache) -> Cache:
    """The cache of self-attention, which of an encoder-decoder's cache is one of two."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def find_anchor_layer(cache: Cache, name: str) -> AnchorLayer | None:
    """What the strided layer `name` keeps in the cache; None where it has kept nothing yet."""
    for layer in self_attention(cache).layers:
        if isinstance(layer, AnchorLayer) and layer.name == name:
            return layer
    found: Any = getattr(cache, "histories", {}).get(name)
    return found  # type: ignore[no-any-return]


def store_anchor_layer(cache: Cache, layer: AnchorLayer) -> None:
    """The cache holds `layer`: in its list of layers where it replaced one, otherwise next to the token histories."""
    if layer.counter is None:
        histories_of(cache)[layer.name] = layer  # type: ignore[assignment]
