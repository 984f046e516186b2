"""Edits on a live module tree that can all be taken back, and the account of where every dense parameter went."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MISSING = object()


@dataclasses.dataclass(frozen=True)
class Widened:
    """A dense parameter that became part of a larger one: `new[index]` held `scale · old` when it was made."""

    name: str
    index: tuple[slice, ...]
    why: str
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Fate:
    """Where one dense parameter is now."""

    kind: str  # kept, moved, widened, dropped
    name: str  # its name in the rewritten model, "" where dropped
    why: str = ""
    index: tuple[slice, ...] = ()
    scale: float = 1.0


class Edit:
    """A journal of edits on `model`: each takes effect at once, `undo` takes all back, `account` says where the parameters went."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.dense = dict(model.named_parameters(remove_duplicate=False))
        self.widened: dict[int, Widened] = {}  # id of the dense parameter → what it became part of
        self.replaced: dict[int, nn.Parameter] = {}  # id of the dense parameter → its wider successor
        self.journal: list[Callable[[], None]] = []

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` is `value`; modules, parameters and buffers go where torch registers them."""
        for registry in ("_modules", "_parameters", "_buffers"):
            table = owner.__dict__.get(registry) if isinstance(owner, nn.Module) else None
            if table is not None and name in table:
                self.set_item(table, name, value)
                return
        before = owner.__dict__.get(name, MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, MISSING)
        setattr(owner, name, value)
        self.journal.append(lambda: delattr(owner, name) if before is MISSING else setattr(owner, name, before))

    def set_item(self, table: Any, key: Any, value: Any) -> None:
        """`table[key]` is `value`."""
        before = table.get(key, MISSING) if hasattr(table, "get") else table[key]
        table[key] = value

        def back() -> None:
            if before is MISSING:
                del table[key]
            else:
                table[key] = before

        self.journal.append(back)

    def replace_module(self, path: str, module: nn.Module) -> None:
        """The submodule at `path`, under every name it is registered by, is `module`."""
        old = self.model.get_submodule(path)
        module.train(old.training)
        for owner in list(self.model.modules()):
            if owner is module:
                continue
            for name, child in list(owner._modules.items()):
                if child is old:
                    self.set_item(owner._modules, name, module)

    def add_module(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """`owner` has the child `module` called `name`."""
        module.train(owner.training)
        self.set_item(owner._modules, name, module)

    def make_persistent(self, owner: nn.Module, name: str) -> None:
        """The buffer `name` of `owner` is saved: loading cannot make it again from what the dense model's code knows."""
        if name in owner._non_persistent_buffers_set:
            owner._non_persistent_buffers_set.discard(name)
            self.journal.append(lambda: owner._non_persistent_buffers_set.add(name))

    def add_handle(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """A hook that was registered goes when the edits are undone."""
        self.journal.append(handle.remove)

    def widen_parameter(self, old: nn.Parameter, new: nn.Parameter, index: tuple[slice, ...], why: str, scale: float = 1.0) -> None:
        """Wherever `old` was registered `new` is, and `new[index]` is accounted for as `scale · old`."""
        for owner in list(self.model.modules()):
            for name, parameter in list(owner._parameters.items()):
                if parameter is old:
                    self.set_item(owner._parameters, name, new)
        self.widened[id(old)] = Widened("", index, why, scale)
        self.replaced[id(old)] = new

    def account(self) -> dict[str, Fate]:
        """For every dense parameter by its old name: kept, moved, widened or dropped, and where it is now."""
        now: dict[int, str] = {}
        names: dict[int, set[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            now.setdefault(id(parameter), name)
            names.setdefault(id(parameter), set()).add(name)
        fates: dict[str, Fate] = {}
        for name, parameter in self.dense.items():
            if id(parameter) in now:
                same = name in names[id(parameter)]
                fates[name] = Fate("kept", name) if same else Fate("moved", now[id(parameter)], "its module was wrapped")
            elif id(parameter) in self.widened and id(self.replaced[id(parameter)]) in now:
                part, successor = self.widened[id(parameter)], self.replaced[id(parameter)]
                new_name = name if name in names[id(successor)] else now[id(successor)]
                fates[name] = Fate("widened", new_name, part.why, part.index, part.scale)
            else:
                fates[name] = Fate("dropped", "", "no module of the rewritten model holds it")
        return fates

    def undo(self) -> None:
        """The model is exactly what it was before the first edit."""
        while self.journal:
            self.journal.pop()()
        self.widened.clear()
        self.replaced.clear()
