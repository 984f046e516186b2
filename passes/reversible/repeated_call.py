"""One call of a layer that can be repeated, bit for bit, with a graph for its gradient.

The first run stores the layer's arguments by reference, the state of the random numbers if it drew any, and the autocast settings.
The same input to the same operations gives the same decisions (active units, experts, buckets), and the same random numbers give
the same dropout and noise, so none of these is stored.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from retrofit.sdk import ArgumentPlace, RetrofitError, find_argument, item_at
from retrofit.sdk.data import preserve_attribute
from retrofit.sdk.modules import auxiliary_losses, is_cache

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

CHECKPOINTING = "gradient_checkpointing"  # transformers' switch, an attribute of each module that checkpoints


class Placeholder:
    """Replaces a tensor of a call: the one at index `number`."""

    def __init__(self, number: int) -> None:
        self.number = number


class Returned:
    """The output of a layer: its stream, its other tensors and their structure; last the losses that it recorded."""

    def __init__(self, output: Any, key: int | str | None, known: dict[int, Any], losses: list[Tensor]) -> None:
        """`known` maps, by identity, the call's arguments that may be in the output to their values outside the call."""
        stream = item_at(output, key)
        leaves, self.structure = flattened(output)
        self.tensors: list[Tensor] = [stream]
        self.leaves: list[Any] = []
        for leaf in leaves:
            if leaf is stream:
                self.leaves.append(Placeholder(0))
            elif id(leaf) in known:
                self.leaves.append(known[id(leaf)])
            elif isinstance(leaf, Tensor):
                self.leaves.append(Placeholder(len(self.tensors)))
                self.tensors.append(leaf)
            else:
                self.leaves.append(leaf)
        self.losses = len(losses)
        self.tensors += losses

    def rebuilt(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the output with `tensors` instead of its own."""
        leaves = [tensors[leaf.number] if isinstance(leaf, Placeholder) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def flattened(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested lists, tuples and mappings, and the structure; a cache is a leaf."""
    return tree_flatten(value, is_leaf=is_cache)


Run = tuple[Any, dict[int, Any], list[Tensor]]  # output, arguments by identity, losses


class RepeatedCall:
    """A call of `layer` whose stream is passed to each run; `given` are its other tensors that require a gradient.

    Each run gets a copy of the caches among the arguments, with the same tensors: a run must not read what another wrote.
    """

    def __init__(
        self, layer: nn.Module, stream_in: ArgumentPlace, stream_out: int | str | None, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.layer, self.stream_out = layer, stream_out
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(stream_in, arguments, keywords)
        stream, container[key] = container[key], Placeholder(-1)
        leaves, self.structure = flattened((arguments, keywords))
        self.given: list[Tensor] = []  # emptied by the first run, so that their graphs are not stored
        self.leaves: list[Any] = []
        for leaf in leaves:
            inside = tensors_of(leaf) if is_cache(leaf) else [leaf]
            trained = [tensor for tensor in inside if isinstance(tensor, Tensor) and tensor.requires_grad]
            if is_cache(leaf):
                numbers = {id(tensor): len(self.given) + number for number, tensor in enumerate(trained)}
                self.leaves.append(KeptCache(leaf, inside, numbers))
            else:
                self.leaves.append(Placeholder(len(self.given)) if trained else leaf)
            self.given += trained
        self.device = stream.device
        self.values: list[Tensor] = []
        self.versions = [leaf._version for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.autocast = AutocastState(self.device.type)
        self.random: RandomState | None = None

    def first(self, x: Tensor) -> Returned:
        """Return the layer's output for the stream x, without a graph."""
        before = RandomState(self.device)
        returned = self.without_graph(x, self.run)
        self.random = None if before.is_current() else before
        return returned

    def without_graph(self, x: Tensor, run: Callable[[Tensor, list[Tensor]], Run]) -> Returned:
        """Return the output of the first run.

        While it runs there is a graph, as in every run: an operation may use another kernel for a trained argument, as torch's
        attention does for a trained mask, and all runs must use the same.
        """
        self.values = [tensor.detach() for tensor in self.given]
        self.versions += [value._version for value in self.values]
        values = leaves_of(self.values)
        with recorded_graph(kept=False):
            output, known, losses = run(x.detach().requires_grad_(), values)
        known |= {id(value): original for value, original in zip(values, self.given, strict=True)}
        self.given = []
        returned = Returned(output, self.stream_out, known, losses)
        returned.tensors = [tensor.detach() for tensor in returned.tensors]
        return returned

    def again(self, x: Tensor, with_graph: bool = True) -> tuple[Returned, list[Tensor]]:
        """Return the output again, with a graph from x and from the tensors in the second result, one for each of `given`."""
        self.require_unchanged()
        values = leaves_of(self.values)
        with recorded_graph(with_graph), self.random.restored() if self.random else contextlib.nullcontext():
            output, known, losses = self.run(x, values)
        return Returned(output, self.stream_out, known | {id(value): value for value in values}, losses), values

    def require_unchanged(self) -> None:
        """Raise `RetrofitError` if an argument has been written to since the first run."""
        tensors = [*(leaf for leaf in self.leaves if isinstance(leaf, Tensor)), *self.values]
        if [tensor._version for tensor in tensors] != self.versions:
            raise RetrofitError(
                "reversible: an argument of a layer was modified in place between forward and backward",
                why="the layer is recomputed from it",
                remedy="modify a copy, or exclude the layer with layers=",
                code="changed-in-place",
            )

    def run(self, x: Tensor, values: list[Tensor], called: Any = None, recorded: list[list[Tensor]] | None = None) -> Run:
        """Return the layer's output, its arguments by identity (a cache by the identity of its copy), and its losses.

        `called`, if given, calls the layer; `recorded` receives the list of the losses before that.
        """
        known: dict[int, Any] = {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, Tensor)}

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                return x if leaf.number < 0 else values[leaf.number]
            if isinstance(leaf, KeptCache):
                own = leaf.copied(values)
                known[id(own)] = leaf.cache
                return own
            return leaf

        arguments, keywords = tree_unflatten([filled(leaf) for leaf in self.leaves], self.structure)
        with self.autocast.restored(), without_checkpoints(self.layer), auxiliary_losses() as losses:
            if recorded is not None:
                recorded.append(losses)
            return (called or self.layer)(*arguments, **keywords), known, losses


@contextlib.contextmanager
def without_checkpoints(layer: nn.Module) -> Iterator[None]:
    """Switch off checkpointing in the layer within this context: the sums that it computes again would not be intercepted."""
    modules = [part for part in layer.modules() if getattr(part, CHECKPOINTING, False) is True]
    with preserve_attribute(CHECKPOINTING, modules):
        for module in modules:
            setattr(module, CHECKPOINTING, False)
        yield


@contextlib.contextmanager
def recorded_graph(kept: bool) -> Iterator[None]:
    """Build a graph for the gradient within this context; unless `kept`, no tensor that operations save for it is stored."""
    hooks = contextlib.nullcontext() if kept else torch.autograd.graph.saved_tensors_hooks(forget, forgotten)
    with torch.enable_grad(), hooks:
        yield


def leaves_of(values: list[Tensor]) -> list[Tensor]:
    """Return the values as leaves of a graph that require a gradient."""
    return [value.detach().requires_grad_() for value in values]


def forget(saved: Tensor) -> None:
    """Store nothing of a tensor that an operation saves for its gradient."""


def forgotten(kept: None) -> Tensor:
    raise RetrofitError(
        "reversible: a gradient of a value inside a layer was requested",
        why="the layer is recomputed in the backward pass and keeps no activations",
        remedy="use the gradient of the layer's output, or exclude the layer with layers=",
        code="inner-gradient",
    )


class KeptCache:
    """A copy of a cache, made before the layer's first run."""

    def __init__(self, cache: Cache, tensors: list[Tensor], numbers: dict[int, int]) -> None:
        """`numbers` maps, by identity, tensors that require a gradient to their index among the call's."""
        self.cache = cache
        self.tensors = [Placeholder(numbers[id(tensor)]) if id(tensor) in numbers else tensor for tensor in tensors]
        self.kept = copied(cache, tensors, self.tensors)

    def copied(self, values: list[Tensor]) -> Any:
        """Return a copy with `values` instead of the tensors of the call."""
        new = [values[tensor.number] if isinstance(tensor, Placeholder) else tensor for tensor in self.tensors]
        return copied(self.kept, self.tensors, new)


def copied(value: Any, parts: list[Any], replaced: list[Any]) -> Any:
    """Return a deep copy in which the objects of `replaced` replace the `parts`."""
    return copy.deepcopy(value, {id(part): other for part, other in zip(parts, replaced, strict=True)})


def tensors_of(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Return the tensors in an object, its attributes, lists and mappings, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple, set)) else []
    inner += vars(value).values() if hasattr(value, "__dict__") else []
    return [tensor for part in inner for tensor in tensors_of(part, seen)]


class RandomState:
    """The state of the random number generators of the CPU and of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states = self.current()

    def current(self) -> tuple[Tensor, ...]:
        own = () if self.device.type in ("cpu", "meta") else (torch.get_device_module(self.device).get_rng_state(self.device),)
        return (torch.get_rng_state(), *own)

    def is_current(self) -> bool:
        """Return whether no random number has been drawn since."""
        return all(torch.equal(state, other) for state, other in zip(self.states, self.current(), strict=True))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same numbers again within this context; afterwards the generators continue from the state before it."""
        with RandomState(self.device).kept():
            self.put(self.states)
            yield

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore this state after this context."""
        try:
            yield
        finally:
            self.put(self.states)

    def put(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


class AutocastState:
    """The settings of autocast, without its cache of weights, which would contain weights that were cast without a graph."""

    def __init__(self, device: str) -> None:
        self.settings = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device, "cpu"))
            if torch.amp.is_autocast_available(kind)
        }

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.settings.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield
