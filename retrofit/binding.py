"""Some modules inside a module are handed one keyword more, for one call: by a view of the module that lives as long as the call.

Code that a model's author wrote between two modules need not hand on what it does not know. It cannot be changed, but it can be
run on another `self`: a shallow copy of the module, in which the inner modules are stand-ins that add the keyword and call the real
ones. The copy shares every parameter, buffer, hook and submodule with the module, and nothing is written to the module itself, so
checkpointing, threads and tracing see an ordinary call. What the code sets on `self` is gone with the view.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from retrofit.wrapping import Wrapper


class Bound(Wrapper):
    """A call of `layer` that carries the keyword arguments `bound` as well."""

    def __init__(self, layer: nn.Module, bound: Mapping[str, Any]) -> None:
        super().__init__(layer)
        self.bound = dict(bound)
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **{**kwargs, **self.bound})


def view(module: nn.Module, inner: Mapping[str, nn.Module]) -> nn.Module:
    """`module` as it is, except that the submodules at the paths `inner` are those given; `module` itself where there are none.

    A path leads through a `Wrapper` as an attribute does: to the module that it stands for.
    """
    if not inner:
        return module
    children: dict[str, dict[str, nn.Module]] = {}
    changed: dict[str, nn.Module | None] = dict(module._modules)
    for path, given in inner.items():
        name, _, rest = (path if leads(module, path) else f"layer.{path}").partition(".")
        if rest:
            children.setdefault(name, {})[rest] = given
        else:
            changed[name] = given
    for name, deeper in children.items():
        changed[name] = view(module.get_submodule(name), deeper)
    made: nn.Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = changed
    return made


def leads(module: nn.Module, path: str) -> bool:
    """Whether the path begins with a child of `module` itself, not of a module that it stands for."""
    name, _, rest = path.partition(".")
    child = module._modules.get(name)
    if not isinstance(module, Wrapper) or child is None:
        return not isinstance(module, Wrapper)
    try:
        child.get_submodule(rest)
    except AttributeError:  # `layer` is the wrapper's name for its module, and may be that module's name for another
        return False
    return True


def bind(module: nn.Module, paths: Sequence[str], **keywords: Any) -> nn.Module:
    """`module` for one call, in which each of the submodules at `paths` is handed `keywords` too."""
    return view(module, {path: Bound(module.get_submodule(path), keywords) for path in paths})


class BindingForward:
    """In place of a module's `forward`: runs it on a view that hands the submodules at `paths` what `carry` makes of the call.

    `carry(args, kwargs)` returns the keywords. The signature is the module's own.
    """

    def __init__(self, module: nn.Module, paths: Sequence[str], carry: Any) -> None:
        self.module, self.paths, self.carry = module, tuple(paths), carry

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(type(self.module).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = bind(self.module, self.paths, **self.carry(args, kwargs))
        return type(self.module).forward(bound, *args, **kwargs)
