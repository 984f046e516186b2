"""The cache of a decoder as named tensors: a cache split into states, and rebuilt from them.

`{layer}.key`, `{layer}.value`: (batch, heads, past, head width), with `decoder.` and `encoder.` before the last word if there is a
cross attention, the names in the ecosystem's ONNX decoders. Other states of a layer (the window of a convolution, the sum of a
recurrence, the keys of an index) have the name of their attribute, `{layer}.conv`, `{layer}.recurrent`, `{layer}.indexer_keys`.
`memory.{module}` is the history that a rewritten module stores in the cache (`retrofit.surgery.cache_memory`). The cache layer of a
rewritten module declares its states (`Carrier`): `{layer}.{name}`. States that grow with the tokens are empty before the first
token, others are zeros.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from retrofit.errors import CaptureError
from retrofit.surgery.cache_memory import SLACK, CacheWithHistories, TokenHistory, histories_of

KEY_AND_VALUE = {"keys": "key", "values": "value"}  # a cache layer's attributes → their names in the file
HYBRID = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)  # keys and values, and states of a fixed size
GROWING = ("key", "value", "real")  # last words of the names of states that are empty before any token
MEMORY = "memory."
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # kinds of parameters that may have no argument
States = dict[str, Tensor]


@runtime_checkable
class Carrier(Protocol):
    """A cache layer that can be split into named tensors and rebuilt from them; it stores every `k`-th token.

    Tensors named in `common` concern the tokens and are the same in all such layers of a cache: only the first layer's are
    exported.
    """

    k: int
    common: frozenset[str]

    def carried(self) -> States: ...

    def carrying(self, states: States) -> Any: ...


def states_of(cache: Any) -> States:
    """Return the tensors in the cache, layer by layer. Raises `CaptureError` if it is no list of layers."""
    if isinstance(cache, EncoderDecoderCache):
        sides = {"decoder": states_of(cache.self_attention_cache), "encoder": states_of(cache.cross_attention_cache)}
        named = [(with_side(name, side), value) for side, states in sides.items() for name, value in states.items()]
        return dict(sorted(named, key=lambda item: layer_number(item[0]))) | memory_states(cache)
    if not isinstance(cache, Cache):
        raise unsupported_cache("the model keeps no cache of keys and values", f"it returned {type(cache).__name__}", "no-cache")
    found: States = {}
    common: frozenset[str] = frozenset()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, Carrier):
            found |= {f"{index}.{word}": value for word, value in layer.carried().items() if word not in common}
            common |= layer.common
            continue
        for name, word in KEY_AND_VALUE.items():
            if is_state(value := getattr(layer, name, None)):
                found[f"{index}.{word}"] = value
        found |= {f"{index}.{slot.word}": slot.get(layer) for slot in state_slots(layer)}
    found |= {f"{index}.{slot.word}": slot.get(cache) for index, slot in cache_slots(cache)}
    return dict(sorted(found.items(), key=lambda item: layer_number(item[0]))) | memory_states(cache)


def unsupported_cache(what: str, why: str, code: str = "cache-state") -> CaptureError:
    return CaptureError(what, why=why, remedy="export it without its cache: cache='none'", code=code)


@dataclasses.dataclass(frozen=True)
class StateSlot:
    """The slot of a cache layer, or of the cache, for a tensor other than keys and values: an attribute, or an entry of one."""

    attribute: str
    entry: Any = None
    alone: bool = True  # whether it is the only state in its attribute

    @property
    def word(self) -> str:
        """Return the name of the state."""
        name = self.attribute.removesuffix("_states")
        return name if self.alone else f"{name}.{self.entry}"

    def get(self, layer: Any) -> Tensor:
        value = getattr(layer, self.attribute)
        return cast(Tensor, value if self.entry is None else value[self.entry])

    def put(self, layer: Any, state: Tensor) -> None:
        """Store the state in the layer's slot; its container is copied."""
        value: Any = state
        if self.entry is not None:
            value = copy.copy(getattr(layer, self.attribute))
            value[self.entry] = state
        setattr(layer, self.attribute, value)


def state_slots(layer: Any) -> list[StateSlot]:
    """Return the slots of the layer's tensors other than keys and values."""
    found = []
    for name, value in vars(layer).items():
        if name in KEY_AND_VALUE:
            continue
        if is_state(value):
            found.append(StateSlot(name))
        elif isinstance(value, (Mapping, list)):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            entries = [key for key, item in items if is_state(item)]
            found += [StateSlot(name, key, len(entries) == 1) for key in entries]
    return found


def cache_slots(cache: Cache) -> list[tuple[int, StateSlot]]:
    """Return the slots in which the cache itself stores a tensor for each layer, with the number of the layer."""
    lists = [(name, value) for name, value in vars(cache).items() if isinstance(value, list)]
    return [(index, StateSlot(name, index)) for name, value in lists for index, entry in enumerate(value) if is_state(entry)]


def extra_states(cache: Any) -> list[str]:
    """Return the names of the states in the cache other than keys and values, histories, and declared states of carriers."""
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        return []
    layers = ((index, layer) for index, layer in enumerate(cache.layers) if not isinstance(layer, Carrier))
    of_layers = [(index, slot) for index, layer in layers for slot in state_slots(layer)]
    return [f"{index}.{slot.word}" for index, slot in (*of_layers, *cache_slots(cache))]


def token_strides(cache: Any) -> dict[str, int]:
    """Return by name the number of tokens per entry of keys and values, if more than one."""
    if isinstance(cache, EncoderDecoderCache):
        return {with_side(name, "decoder"): stride for name, stride in token_strides(cache.self_attention_cache).items()}
    carriers = ((index, layer) for index, layer in enumerate(cache.layers) if isinstance(layer, Carrier))
    return {f"{index}.{word}": layer.k for index, layer in carriers for word in KEY_AND_VALUE.values() if layer.k > 1}


def memory_states(cache: Cache) -> States:
    """Return the histories that modules store in the cache, except those that they can recompute from its keys."""
    states = {}
    for name, memory in cache.histories.items() if isinstance(cache, CacheWithHistories) else ():
        if getattr(memory, "follows_from_keys", False):
            continue
        if not isinstance(memory, TokenHistory):
            what = f"{name} keeps something other than tensors in the cache"
            raise unsupported_cache(what, "its layer has no keys and values")
        states[f"{MEMORY}{name}"] = memory.last()
    return states


def is_state(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value belongs to sequences, and is not a constant that the layer has from its config."""
    return isinstance(value, Tensor) and value.dim() > 1


def with_side(name: str, side: str) -> str:
    """Return `0.key` as `0.decoder.key`; a history has no sides."""
    layer, _, word = name.partition(".")
    return name if name.startswith(MEMORY) else f"{layer}.{side}.{word}"


def is_on_side(name: str, side: str) -> bool:
    """Return whether a state is a key or value of that side."""
    return not name.startswith(MEMORY) and f".{side}." in name


def state_before_tokens(name: str, state: Tensor, growing: Mapping[str, int] = MappingProxyType({})) -> Tensor:
    """Return the state before any token: empty along an axis that grows (keys, values, `growing`), else zeros."""
    axis = growing.get(name, 2) if grows(name, growing) else None
    return torch.zeros_like(state) if axis is None else state.narrow(axis, 0, 0)


def grows(name: str, growing: Mapping[str, int]) -> bool:
    """Return whether a state has an entry for each token, or for every few tokens."""
    return name in growing or (not name.startswith(MEMORY) and name.rpartition(".")[2] in GROWING)


def growth_axes(after: Mapping[int, States]) -> dict[str, int]:
    """Return the axis of every state that gains an entry with each token, given the states after several numbers of tokens.

    Raises `CaptureError` for a state other than keys, values and histories that neither grows with each token nor has a fixed size.
    """
    (first, states), *others = after.items()
    found = {}
    for name, state in states.items():
        growth = {  # axes, with the entries that each gains per token
            (axis, (other[name].shape[axis] - extent) / (count - first))
            for count, other in others
            for axis, extent in enumerate(state.shape)
            if other[name].shape[axis] != extent
        }
        if len(growth) == 1 and (axis_and_gain := next(iter(growth)))[1] == 1:
            found[name] = axis_and_gain[0]
        elif growth and name.rpartition(".")[2] not in GROWING:
            raise unsupported_cache(
                "the model's cache holds more than states of a fixed size and states that grow with each token",
                f"the size of {name} depends on the number of tokens in another way",
            )
    return found


def layer_number(name: str) -> float:
    """Return a sort key for the states: layer number, with histories last."""
    return float("inf") if name.startswith(MEMORY) else int(name.partition(".")[0])


def build_cache(template: Cache, states: Mapping[str, Tensor]) -> Cache:
    """Return a cache like the template with these states; sliding layers store all tokens, and masks apply the window."""
    slots = cache_slots(template)
    if slots and not states:
        return cast(Cache, new_like(template))
    made = copy.copy(template)
    for index, slot in slots:
        slot.put(made, states[f"{index}.{slot.word}"].clone())
    if isinstance(made, EncoderDecoderCache):
        for side, part in (("decoder", "self_attention_cache"), ("encoder", "cross_attention_cache")):
            of_side = {name.replace(f".{side}.", "."): value for name, value in states.items() if is_on_side(name, side)}
            setattr(made, part, build_cache(getattr(template, part), of_side))
        cross = made.cross_attention_cache
        made.is_updated = {index: f"{index}.encoder.key" in states for index in range(len(cross.layers))}
    else:
        made.layers = build_layers(template.layers, states)
    if isinstance(made, CacheWithHistories):
        made.histories = {}
    for name, last in states.items():
        if name.startswith(MEMORY):
            histories_of(made)[name.removeprefix(MEMORY)] = token_history(last)
    return made


def build_layers(templates: Sequence[Any], states: Mapping[str, Tensor]) -> list[Any]:
    """Return the cache's layers like these templates, with their states."""
    made: list[Any] = []
    common: States = {}
    for index, template in enumerate(templates):
        own = {name.partition(".")[2]: value for name, value in states.items() if layer_number(name) == index}
        if isinstance(template, Carrier):
            common |= {word: own[word] for word in template.common if word in own}
            made.append(template.carrying(own | common))
        else:
            made.append(build_layer(template, own))
    return made


def build_layer(template: Any, own: States) -> Any:
    """Return a growing cache layer with these states; a template that never has any is returned as it is."""
    if state_slots(template):
        return layer_with_states(template, own) if own else new_like(template)
    if getattr(template, "keys", None) is None:
        return copy.copy(template)
    made = DynamicLayer()
    if "key" in own:
        made.keys, made.values = own["key"], own["value"]
        made.dtype, made.device, made.is_initialized = made.keys.dtype, made.keys.device, True
    return made


def new_like(template: Any) -> Any:
    """Return a cache layer, or a cache, like the template before any token.

    A layer with a window and other states is replaced by one that stores all keys and values.
    """
    kind: Any = type(template)
    if HYBRID is not None and isinstance(template, DynamicSlidingWindowLayer) and isinstance(template, HYBRID.__bases__[0]):
        kind = HYBRID
    parameters = inspect.signature(kind).parameters
    known = {name: getattr(template, name) for name in parameters if hasattr(template, name)}
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in VARIABLE]
    if missing := [name for name in required if name not in known]:
        what = f"a {kind.__name__} of the model's cache cannot be rebuilt"
        raise unsupported_cache(what, f"it does not keep its {missing[0]}")
    return kind(**known)


def layer_with_states(template: Any, states: States) -> Any:
    """Return a cache layer like the template, past its first token, with these states, into which it may write."""
    made = new_like(template)
    for name, value in vars(template).items():
        if name in vars(made) and not isinstance(value, Tensor):
            setattr(made, name, copy.copy(value))
    for slot in state_slots(template):
        slot.put(made, states[slot.word].clone())
    if "key" in states:
        made.keys, made.values = states["key"], states["value"]
    return made


def token_history(last: Tensor) -> TokenHistory:
    """Return the history with the last values `last`, and none before them, since an exported decoder removes no tokens."""
    memory = TokenHistory(last.shape[1], last)
    memory.values = torch.cat([last.new_zeros(last.shape[0], SLACK, *last.shape[2:]), last], 1)
    return memory
