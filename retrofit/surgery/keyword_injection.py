"""Some modules inside a module are handed one keyword more, for one call: by a view of the module that lives as long as the call.

Code that a model's author wrote between two modules need not hand on what it does not know. It cannot be changed, but it can be
run on another `self`: a shallow copy of the module, in which the inner modules are stand-ins that add the keyword and call the real
ones. The copy shares every parameter, buffer, hook and submodule with the module, and nothing is written to the module itself, so
checkpointing, threads and tracing see an ordinary call. What the code sets on `self` is set on the module afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import nn

from retrofit.surgery.wrappers import Wrapper


class Bound(Wrapper):
    """A call of `layer` that carries the keyword arguments `bound` as well."""

    def __init__(self, layer: nn.Module, bound: Mapping[str, Any]) -> None:
        super().__init__(layer)
        self.bound = dict(bound)
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return child_modules(self)["layer"](*args, **{**kwargs, **self.bound})


class View:
    """`module`, seen for one call with stand-ins that hand the submodules at `paths` the keyword arguments `keywords` too.

    A path leads through a `Wrapper` as an attribute does: to the module that it stands for.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], keywords: Mapping[str, Any]) -> None:
        self.keywords = keywords
        self.copies: list[tuple[nn.Module, nn.Module]] = []  # of which module, the copy
        self.module = self.seen(module, list(paths))

    def seen(self, module: nn.Module, paths: list[str]) -> nn.Module:
        if not paths:
            return module
        inner: dict[str, list[str]] = {}
        for path in paths:
            name, rest = step(module, path)
            inner.setdefault(name, []).append(rest)
        own = child_modules(module)
        changed = {
            name: Bound(own[name], self.keywords) if "" in rests else self.seen(own[name], rests) for name, rests in inner.items()
        }
        copy: nn.Module = object.__new__(type(module))
        copy.__dict__.update({**module.__dict__, "_modules": {**own, **changed}})
        self.copies.append((module, copy))
        return copy

    def settle(self) -> None:
        """What was set on the copies is set on the modules."""
        for module, copy in self.copies:
            own = module.__dict__
            for name, value in copy.__dict__.items():
                if name != "_modules" and (name not in own or own[name] is not value):
                    own[name] = value


def child_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules registered in `module`: taken from the table itself, because tracers hand out stand-ins of their own."""
    return module.__dict__["_modules"]  # type: ignore[no-any-return]


def step(module: nn.Module, path: str) -> tuple[str, str]:
    """The child by which `path` leads on from `module`, and the rest of the path."""
    name, _, rest = path.partition(".")
    inside = child_modules(module)
    return (name, rest) if name in inside and leads(inside[name], rest) else ("layer", path)


def leads(module: nn.Module, path: str) -> bool:
    """Whether the path names a submodule of `module`, or of one that it stands for; the empty one names itself."""
    name, _, rest = path.partition(".")
    child = child_modules(module).get(name)
    through = isinstance(module, Wrapper) and leads(child_modules(module)["layer"], path)
    return not path or (child is not None and leads(child, rest)) or through


def call_with_keywords(
    module: nn.Module, paths: Iterable[str], keywords: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """What `module` returns, while each of the submodules at `paths` is handed `keywords` too."""
    view = View(module, paths, keywords)
    output = view.module(*args, **kwargs)
    view.settle()
    return output


class ForwardInPlace:
    """Stands in place of a module's `forward`, whose signature and code it answers for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(type(self.module).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])

    @property
    def __code__(self) -> CodeType:  # torch.export says where it is
        return inspect.unwrap(type(self.module).forward).__code__


class InjectingForward(ForwardInPlace):
    """Runs the module on a view that hands the submodules at `paths` what `carry(args, kwargs)` makes of the call: keywords."""

    def __init__(self, module: nn.Module, paths: Sequence[str], carry: Any) -> None:
        super().__init__(module)
        self.paths, self.carry = tuple(paths), carry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        view = View(self.module, self.paths, self.carry(args, kwargs))
        output = type(self.module).forward(view.module, *args, **kwargs)
        view.settle()
        return output
