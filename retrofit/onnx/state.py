"""What a decoder remembers between two steps, as tensors by name: a cache taken apart into them and put together from them.

`{layer}.key`, `{layer}.value`: (batch, heads, past, head width), with `decoder.` and `encoder.` before the last word where there is
a cross attention, as the ecosystem's ONNX decoders name them. `memory.{module}`: what a rewritten module remembers beside them
(`retrofit.caching`), zeros where nothing came before. A cache layer of a rewritten module's own says itself what it carries
(`Carrier`): `{layer}.{name}`, of which keys, values and what is `real` grow with the tokens, and others are zeros before the first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from retrofit.caching import SLACK, Memory, Remembering, memories_of
from retrofit.errors import CaptureError

KEY_AND_VALUE = {"keys": "key", "values": "value"}  # a cache layer's attributes, and what they are called outside
GROWING = ("key", "value", "real")  # last words of the names of states that are empty before any token
MEMORY = "memory."
States = dict[str, Tensor]


@runtime_checkable
class Carrier(Protocol):
    """A cache layer that can be taken apart into tensors by name and put together from them; it keeps every `k`-th token."""

    k: int

    def carried(self) -> States: ...

    def carrying(self, states: States) -> Any: ...


def states_of(cache: Any) -> States:
    """The tensors that the cache holds, layer by layer; raises `CaptureError` where it holds others than keys and values."""
    if isinstance(cache, EncoderDecoderCache):
        sides = {"decoder": states_of(cache.self_attention_cache), "encoder": states_of(cache.cross_attention_cache)}
        named = [(sided(name, side), value) for side, states in sides.items() for name, value in states.items()]
        return dict(sorted(named, key=lambda item: layer_number(item[0]))) | memories(cache)
    if not isinstance(cache, Cache):
        raise CaptureError("the model keeps no cache of keys and values", why=f"it returned {type(cache).__name__}")
    found: States = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, Carrier):
            found |= {f"{index}.{word}": value for word, value in layer.carried().items()}
            continue
        held = {name: value for name, value in vars(layer).items() if any(map(is_state, leaves(value)))}
        if others := [name for name in held if name not in KEY_AND_VALUE]:
            raise CaptureError(
                "the model's cache is no list of keys and values",
                why=f"layer {index} also keeps {', '.join(others)}, and takes another path through its code when it holds them",
            )
        found |= {f"{index}.{word}": held[name] for name, word in KEY_AND_VALUE.items() if name in held}
    return found | memories(cache)


def strides_of(cache: Any) -> dict[str, int]:
    """How many tokens an entry of a state stands for, by the state's name: of the keys and values of which it is several."""
    if isinstance(cache, EncoderDecoderCache):
        return {sided(name, "decoder"): every for name, every in strides_of(cache.self_attention_cache).items()}
    carriers = ((index, layer) for index, layer in enumerate(cache.layers) if isinstance(layer, Carrier))
    return {f"{index}.{word}": layer.k for index, layer in carriers for word in KEY_AND_VALUE.values() if layer.k > 1}


def memories(cache: Cache) -> States:
    held = cache.memories if isinstance(cache, Remembering) else {}
    if others := [name for name, memory in held.items() if not isinstance(memory, Memory)]:
        raise CaptureError(f"what {others[0]} keeps in the cache is no list of tensors", why="its layer has no keys and values")
    return {f"{MEMORY}{name}": memory.last() for name, memory in held.items()}


def leaves(value: Any) -> Iterator[Any]:
    """The value, or where it is a container what it contains."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        yield from leaves(item) if isinstance(item, (Mapping, list, tuple)) else (item,)


def is_state(value: Any) -> bool:
    """Whether a value is about sequences, and no number that the layer knows from its config."""
    return isinstance(value, Tensor) and value.dim() > 1


def sided(name: str, side: str) -> str:
    """`0.key` as `0.decoder.key`; a memory has no sides."""
    layer, _, word = name.partition(".")
    return name if name.startswith(MEMORY) else f"{layer}.{side}.{word}"


def is_of(name: str, side: str) -> bool:
    """Whether a state is a key or value of that side."""
    return not name.startswith(MEMORY) and f".{side}." in name


def emptied(name: str, state: Tensor) -> Tensor:
    """The state before any token: keys and values of none, a memory of zeros."""
    grows = not name.startswith(MEMORY) and name.rpartition(".")[2] in GROWING
    return state[:, :, :0] if grows else torch.zeros_like(state)


def layer_number(name: str) -> float:
    """Where a state stands among the others: memories come last."""
    return float("inf") if name.startswith(MEMORY) else int(name.partition(".")[0])


def cache_of(template: Cache, states: Mapping[str, Tensor]) -> Cache:
    """A cache like the template that holds these states; sliding layers hold everything, and the masks still apply the window."""
    made = copy.copy(template)
    if isinstance(made, EncoderDecoderCache):
        for side, part in (("decoder", "self_attention_cache"), ("encoder", "cross_attention_cache")):
            own = {name.replace(f".{side}.", "."): value for name, value in states.items() if is_of(name, side)}
            setattr(made, part, cache_of(getattr(template, part), own))
        cross = made.cross_attention_cache
        made.is_updated = {index: f"{index}.encoder.key" in states for index in range(len(cross.layers))}
    else:
        made.layers = [layer_of(layer, index, states) for index, layer in enumerate(template.layers)]
    if isinstance(made, Remembering):
        made.memories = {}
    for name, last in states.items():
        if name.startswith(MEMORY):
            memories_of(made)[name.removeprefix(MEMORY)] = remembered(last)
    return made


def layer_of(template: Any, index: int, states: Mapping[str, Tensor]) -> Any:
    """A cache layer that grows with each token and holds its states already; one that never holds any stays as it is."""
    if isinstance(template, Carrier):
        return template.carrying({name.partition(".")[2]: value for name, value in states.items() if layer_number(name) == index})
    if getattr(template, "keys", None) is None:
        return copy.copy(template)
    made = DynamicLayer()
    if f"{index}.key" in states:
        made.keys, made.values = states[f"{index}.key"], states[f"{index}.value"]
        made.dtype, made.device, made.is_initialized = made.keys.dtype, made.keys.device, True
    return made


def remembered(last: Tensor) -> Memory:
    """The memory whose last values are `last`; there are none before them, as an exported decoder takes nothing back."""
    memory = Memory(last.shape[1], last)
    memory.values = torch.cat([last.new_zeros(last.shape[0], SLACK, *last.shape[2:]), last], 1)
    return memory
