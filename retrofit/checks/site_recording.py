"""The calls of the modules that passes installed, recorded in forwards of the model: arguments, results, and those of children."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from retrofit.inputs.model_state import same_bits
from retrofit.passbase.method_reference import ModuleReference, RecordedCall

MOST = 2  # calls of a module that are kept of one forward: one that several depths share has many


@dataclasses.dataclass(frozen=True)
class CacheMark:
    """Where an argument was a cache: what it is when the call is made again."""

    two_sided: bool

    def empty(self) -> Cache:
        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if self.two_sided else DynamicCache()


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to every tensor, cache and mark in its lists, tuples and mappings."""
    if isinstance(value, (Tensor, Cache, CacheMark)):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(one, change) for key, one in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (tuple, list)):
        changed = [map_tensors(one, change) for one in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value


def same_calls(one: Sequence[RecordedCall], other: Sequence[RecordedCall]) -> bool:
    """Whether the tensors that these calls received and returned are the same bits."""
    ours, theirs = tensors_of(one), tensors_of(other)
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def tensors_of(calls: Sequence[RecordedCall]) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
        return value

    map_tensors([(call.args, call.kwargs, call.returned) for call in calls], collect)
    return found


def has_cache(call: RecordedCall) -> bool:
    """Whether the call received a cache."""
    found: list[CacheMark] = []

    def collect(value: Any) -> Any:
        if isinstance(value, CacheMark):
            found.append(value)
        return value

    map_tensors((call.args, call.kwargs), collect)
    return bool(found)


def copy_of(value: Any) -> Any:
    """A copy that no later operation changes; a cache is only marked."""
    return map_tensors(
        value, lambda one: one.detach().clone() if isinstance(one, Tensor) else CacheMark(isinstance(one, EncoderDecoderCache))
    )


@dataclasses.dataclass
class OpenCall:
    """A call that has begun."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    children: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Any]]]


class CallRecorder:
    """Records the calls of some modules, by path, while its hooks are in place."""

    def __init__(self, model: nn.Module, references: Mapping[str, ModuleReference], most: int = MOST) -> None:
        self.model, self.references, self.most = model, references, most
        self.calls: dict[str, list[RecordedCall]] = {path: [] for path in references}
        self.open: dict[str, list[OpenCall]] = {path: [] for path in references}
        self.begun = 0
        self.inputs: Mapping[str, Any] = {}  # of the model, in the forward under way

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, list[RecordedCall]]]:
        """Within this context the calls are recorded, the first `most` of each module."""
        handles = [handle for path, reference in self.references.items() for handle in self.watch(path, reference)]
        try:
            yield self.calls
        finally:
            for handle in handles:
                handle.remove()

    def watch(self, path: str, reference: ModuleReference) -> Iterator[Any]:
        module = self.model.get_submodule(path)
        opened = self.open[path]

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            opened.append(OpenCall(self.begun, copy_of(tuple(args)), copy_of(dict(kwargs)), {}))
            self.begun += 1

        def end(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = opened.pop()
            if len(self.calls[path]) < self.most:
                children = {name: tuple(calls) for name, calls in call.children.items()}
                self.calls[path].append(RecordedCall(call.number, call.args, call.kwargs, copy_of(output), self.inputs, children))

        yield module.register_forward_pre_hook(begin, with_kwargs=True)
        yield module.register_forward_hook(end, with_kwargs=True, prepend=True)
        for name in reference.given:
            child = module._modules.get(name)
            if child is not None:
                yield child.register_forward_hook(self.child_hook(name, opened), with_kwargs=True)

    @staticmethod
    def child_hook(name: str, opened: list[OpenCall]) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if opened:
                opened[-1].children.setdefault(name, []).append((copy_of(tuple(args)), copy_of(dict(kwargs)), copy_of(output)))

        return hook
