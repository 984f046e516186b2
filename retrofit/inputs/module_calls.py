"""A model's calls of its modules: watched while they are made, recorded, and repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from retrofit.inputs.model_state import evaluation_mode

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

Key = TypeVar("Key")
Before = Callable[[Key, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Key, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextlib.contextmanager
def watched(
    modules: Mapping[Key, nn.Module], *, before: Before[Key] | None = None, after: After[Key] | None = None, first: bool = False
) -> Iterator[None]:
    """Within this context `before` gets each call of these modules, and `after` also the module's output.

    Their arguments are the key of the module, such as its path, then those of a forward hook with keywords; torch uses their return
    values as those of such hooks. With `first` they run before existing hooks: the output is the module's own.
    """
    with contextlib.ExitStack() as stack:
        for key, module in modules.items():
            if before is not None:
                handle = module.register_forward_pre_hook(functools.partial(before, key), with_kwargs=True)
                stack.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(functools.partial(after, key), with_kwargs=True, prepend=first)
                stack.callback(handle.remove)
        yield


# ── Nested values ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class CacheMark:
    """Replaces an argument that was a cache of keys and values."""

    two_sided: bool

    def empty(self) -> Cache:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache  # deferred: slow to import

        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if self.two_sided else DynamicCache()


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to every tensor, cache and mark in its lists, tuples and mappings."""
    return pytree.tree_map_only(
        lambda leaf: isinstance(leaf, (Tensor, CacheMark)) or is_cache(leaf), change, value, is_leaf=is_cache
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among nested values."""
    return [leaf for leaf in pytree.tree_leaves(value, is_leaf=is_cache) if isinstance(leaf, Tensor)]


def float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors among nested values."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def first_tensor(output: Any) -> Tensor | None:
    """Return a module's output if it is a floating-point tensor, else the first one in it; None if there is none."""
    value = output[0] if isinstance(output, (tuple, list)) and output else output
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def is_cache(value: Any) -> TypeGuard[Cache]:
    """Return whether a value is a model's cache of keys and values, without importing transformers."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)


# ── Real tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def real_tokens(inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the masks among a model's inputs that mark positions without padding: (batch, length), boolean."""
    masks = [value for name, value in inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]
    return [mask.bool() for mask in masks if mask.dim() == 2]


def real_rows(stream: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Return the tokens of a stream, (batch, length, …, d) or (length, batch, …, d), without padding: (tokens, d)."""
    if stream.dim() > 2:
        for mask in masks:
            if mask.shape == stream.shape[:2]:
                return stream[mask].reshape(-1, stream.shape[-1])
            if mask.shape == stream.shape[1::-1]:
                return stream[mask.t()].reshape(-1, stream.shape[-1])
    return stream.reshape(-1, stream.shape[-1])


# ── Recorded calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of a module in a forward of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the model
    number: int = 0  # in the order in which the calls of all recorded modules began
    children: Mapping[str, Sequence[RecordedCall]] = dataclasses.field(default_factory=dict)  # the calls of some of its children
    staying: Tensor | None = None  # (batch, tokens): those that belong to their sequences after the call; None: all

    def real(self, stream: Tensor) -> Tensor:
        """Return the tokens of a stream without padding: (tokens, d)."""
        return real_rows(stream, real_tokens(self.inputs))

    @property
    def had_cache(self) -> bool:
        """Return whether the call received a cache."""
        return any(isinstance(leaf, CacheMark) for leaf in pytree.tree_leaves((self.args, self.kwargs)))

    def repeat(self, module: nn.Module) -> Any:
        """Return the output of `module` for the same arguments, without a cache."""
        args, kwargs = map_tensors((self.args, self.kwargs), lambda leaf: leaf if isinstance(leaf, Tensor) else None)
        return module(*args, **kwargs)

    @torch.no_grad()
    def is_repeatable(self, module: nn.Module) -> bool:
        """Return whether `module`, which was called, repeats its output for the same arguments without a cache."""
        try:
            with evaluation_mode(module):
                again = float_tensors(self.repeat(module))
        except Exception:  # of any type: the module's own code may need its cache
            return False
        before = float_tensors(self.output)
        return len(again) == len(before) > 0 and all(
            found.shape == known.shape and torch.allclose(found.float(), known.float(), rtol=1e-2, atol=1e-4, equal_nan=True)
            for found, known in zip(again, before, strict=True)
        )


class CallRecorder:
    """Records the calls of the modules at some paths, the first `most` of each, with the calls of some `children`, given by name.

    `store` stores the copies of tensors. A tensor that several calls receive is copied once.
    """

    def __init__(
        self,
        model: nn.Module,
        children: Mapping[str, Sequence[str]],
        *,
        most: int | None = None,
        store: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        first: bool = False,
    ) -> None:
        self.model, self.children, self.most, self.store, self.first = model, children, most, store, first
        self.calls: dict[str, list[RecordedCall]] = {path: [] for path in children}
        self.inputs: Mapping[str, Any] = {}  # of the model, in the current forward
        self.begun = 0
        self.open: dict[str, list[RecordedCall]] = {path: [] for path in children}
        self.copies: Any = WeakIdKeyDictionary()  # of tensors, with the versions that were copied

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, list[RecordedCall]]]:
        """Within this context the calls are recorded, by path."""
        modules = {path: self.model.get_submodule(path) for path in self.children}
        with contextlib.ExitStack() as stack:
            stack.enter_context(watched(modules, before=self.begin, after=self.end, first=self.first))
            for path, module in modules.items():
                inside = {name: child for name in self.children[path] if (child := module._modules.get(name)) is not None}
                stack.enter_context(watched(inside, after=functools.partial(self.end_child, path)))
            yield self.calls

    def begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        args, kwargs = self.kept((tuple(args), dict(kwargs)))
        self.open[path].append(RecordedCall(args, kwargs, None, self.inputs, self.begun, {}))
        self.begun += 1

    def end(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.open[path].pop()
        if self.most is None or len(self.calls[path]) < self.most:
            self.calls[path].append(dataclasses.replace(call, output=self.kept(output)))

    def end_child(self, path: str, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.open[path]:
            args, kwargs, output = self.kept((tuple(args), dict(kwargs), output))
            children: Any = self.open[path][-1].children
            children.setdefault(name, []).append(RecordedCall(args, kwargs, output, self.inputs))

    def kept(self, value: Any) -> Any:
        """Return the values with copies of their tensors, and a mark in place of a cache."""
        return map_tensors(value, self.copy)

    def copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return CacheMark(two_sided=hasattr(leaf, "cross_attention_cache"))
        if leaf.is_inference():
            return self.store(leaf.detach().clone())
        version, copy = self.copies.get(leaf, (None, None))
        if copy is None or version != leaf._version:
            copy = self.store(leaf.detach().clone())
            self.copies[leaf] = leaf._version, copy
        return copy
