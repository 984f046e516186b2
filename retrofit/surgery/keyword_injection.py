"""Keyword arguments for submodules that the module's own code does not pass: injected by running it on a shallow copy.

    class Block(nn.Module):
        def forward(self, x):
            return x + self.mlp(x)                  # nothing here passes token_ids on

    call_with_keywords(block, ["mlp"], {"token_ids": ids}, (x,), {})       # mlp(x, token_ids=ids)

The forward's code cannot be changed, but `self` can: it runs on a shallow copy of the module, made for this one call, in which the
submodules at the given paths are wrapped to add the keywords. The copy shares every parameter, buffer, hook and submodule with the
module. Nothing is written to the module itself, so checkpointing, threads and tracing see an ordinary call. Only attributes that
the code sets on `self` are written back to the module after the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from retrofit.surgery.wrappers import Wrapper


class CallWithKeywords(Wrapper):
    """Calls `layer` with the keyword arguments `keywords` in addition to its own."""

    def __init__(self, layer: nn.Module, keywords: Mapping[str, Any]) -> None:
        super().__init__(layer)
        self.keywords = dict(keywords)
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return child_modules(self)["layer"](*args, **{**kwargs, **self.keywords})


class InjectingCopy:
    """A shallow copy of a module for one call, `copy`, whose submodules at `paths` are called with `keywords` in addition.

    A path may name what a `Wrapper` on it wraps as if the wrapper were not there, as attribute access does.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], keywords: Mapping[str, Any]) -> None:
        self.keywords = keywords
        self.copies: list[tuple[nn.Module, nn.Module]] = []  # a module, its copy
        self.copy = self.shallow_copy(module, list(paths))

    def shallow_copy(self, module: nn.Module, paths: list[str]) -> nn.Module:
        """Return a copy of `module`, and of every module on `paths` inside it; the module itself where there are no paths."""
        if not paths:
            return module
        rests: dict[str, list[str]] = {}  # the paths inside each child
        for path in paths:
            name, rest = split_path(module, path)
            rests.setdefault(name, []).append(rest)
        children = child_modules(module)
        changed = {
            name: CallWithKeywords(children[name], self.keywords) if "" in inner else self.shallow_copy(children[name], inner)
            for name, inner in rests.items()
        }
        copy: nn.Module = object.__new__(type(module))
        copy.__dict__.update({**module.__dict__, "_modules": {**children, **changed}})
        forward: Any = module.__dict__.get("forward")
        if isinstance(forward, ForwardReplacement):  # it runs the copy's children
            copy.__dict__["forward"] = forward.on(copy)
        elif getattr(forward, "__self__", None) is module:
            copy.__dict__["forward"] = MethodType(forward.__func__, copy)
        self.copies.append((module, copy))
        return copy

    def write_back(self) -> None:
        """Attributes that were set on the copies are set on the modules."""
        for module, copy in self.copies:
            held = module.__dict__
            for name, value in copy.__dict__.items():
                if name not in ("_modules", "forward") and (name not in held or held[name] is not value):
                    held[name] = value


def child_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules registered in `module`, from the registry: while tracing, attribute access returns proxies."""
    return module.__dict__["_modules"]  # type: ignore[no-any-return]


def split_path(module: nn.Module, path: str) -> tuple[str, str]:
    """Return the name of the child of `module` that `path` leads into, and the rest of the path inside it."""
    name, _, rest = path.partition(".")
    children = child_modules(module)
    return (name, rest) if name in children and has_path(children[name], rest) else ("layer", path)


def has_path(module: nn.Module, path: str) -> bool:
    """Return whether `path` names a submodule of `module`, or of one that it wraps; the empty path names the module itself."""
    name, _, rest = path.partition(".")
    child = child_modules(module).get(name)
    if not path or (child is not None and has_path(child, rest)):
        return True
    return isinstance(module, Wrapper) and has_path(child_modules(module)["layer"], path)


def call_with_keywords(
    module: nn.Module, paths: Iterable[str], keywords: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return what `module` returns when its submodules at `paths` are called with `keywords` in addition."""
    injecting = InjectingCopy(module, paths, keywords)
    output = injecting.copy(*args, **kwargs)
    injecting.write_back()
    return output


class ForwardReplacement:
    """Replaces the `forward` of one module instance: a method bound to it, with the signature and code location of its class's.

    Tools that wrap the function of a method and bind it again, as accelerate does for mixed precision, find both, `__func__` and
    `__self__`. A subclass computes what the forward returns in `run`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, args, kwargs)

    def run(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what the forward returns on `module`, which is the forward's own or a copy of it."""
        raise NotImplementedError

    def on(self, module: nn.Module) -> Any:
        """Return the forward for `module`, a copy of the one it replaces; torch.compile cannot trace `__func__`, bound to it."""
        return lambda *args, **kwargs: self.run(module, args, kwargs)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> FunctionType:
        return unbound(self)

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(type(self.module).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])

    @property
    def __code__(self) -> CodeType:  # torch.export reports where it is
        return inspect.unwrap(type(self.module).forward).__code__


def unbound(replacement: ForwardReplacement) -> FunctionType:
    """Return the function of a replaced forward, which is called with the module first: one that torch.compile can trace."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement.run(module, args, kwargs)

    function: Any = forward
    function.__name__ = "forward_of_retrofit"  # by "forward" a pickled method would come back as that of the class
    function.__signature__ = inspect.signature(type(replacement.module).forward)
    function.replacement = replacement
    return function  # type: ignore[no-any-return]


def own_forward(module: nn.Module) -> Any:
    """Return the `forward` that `module` has instead of its class's, or None; ours is found where a tool bound it anew."""
    held = vars(module).get("forward")
    function = getattr(held, "__func__", None)
    replacement = None if hasattr(function, "__wrapped__") else getattr(function, "replacement", None)
    return held if replacement is None else replacement


class InjectingForward(ForwardReplacement):
    """A forward that calls the submodules at `paths` with what `keywords_from(args, kwargs)` makes of its own arguments.

    `inner` injects what it makes of them into submodules at other paths.
    """

    def __init__(self, module: nn.Module, paths: Sequence[str], keywords_from: Any, inner: InjectingForward | None = None) -> None:
        super().__init__(module)
        self.paths, self.keywords_from, self.inner = tuple(paths), keywords_from, inner

    def run(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        injecting = InjectingCopy(module, self.paths, self.keywords_from(args, kwargs))
        if self.inner is None:
            output = type(self.module).forward(injecting.copy, *args, **kwargs)
        else:
            output = self.inner.run(injecting.copy, args, kwargs)
        injecting.write_back()
        return output
