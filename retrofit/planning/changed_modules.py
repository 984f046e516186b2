"""Which modules of a rewritten copy of a model are other than the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.runtime.state_preservation import plain_attributes
from retrofit.surgery.dequantization import TRACES

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
OWN = "retrofit_"  # attributes in which the library keeps its books
ORIGINS = {*TRACES, "name_or_path"}  # attributes that say where the weights came from
PLAIN = (bool, int, float, str, tuple)


def changed_modules(dense: nn.Module, rewritten: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules of `rewritten`, a copy of `dense` that was edited, that are not what they were, by path.

    The path is "" where the model itself is another: its own parameters, hooks, children or forward.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def compare(path: str, one: nn.Module, other: nn.Module) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        if not is_same_shell(one, other):
            found[path] = other
            return
        for name, child in one._modules.items():
            if child is not None:
                compare(f"{path}.{name}".lstrip("."), child, other.get_submodule(name))

    compare("", dense, rewritten)
    return found


def is_same_shell(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are the same but for what is in their children."""
    same_code = (
        one.code == other.code
        if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule)
        else type(one) is type(other)
    )
    children = {name: child is None for name, child in one._modules.items()}
    return (
        same_code
        and children == {name: child is None for name, child in other._modules.items()}
        and all(len(getattr(one, name)) == len(getattr(other, name)) for name in HOOKS)
        and same_tensors(one._parameters, other._parameters)
        and same_tensors(one._buffers, other._buffers)
        and settings(one) == settings(other)
    )


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all((a is None and b is None) or is_same_tensor(a, b) for a, b in ((one[name], other[name]) for name in one))


def is_same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors hold the same."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one is other or torch.equal(one, other)


def settings(module: nn.Module) -> dict[str, Any]:
    """What a module holds that is plain data, and whether its forward is its class's; not where its weights came from."""
    kept = {
        name: value
        for name, value in plain_attributes(module).items()
        if isinstance(value, PLAIN) and not name.startswith(OWN) and name not in ORIGINS
    }
    return {**kept, "forward": "forward" in vars(module), "training": False}


def share_unchanged(module: nn.Module, originals: dict[int, Tensor]) -> None:
    """The parameters and buffers in `module` that are still what they were copied from are those tensors themselves.

    `originals` has the tensor that each was copied from by the identity of the copy. So what was tied stays tied, and a hybrid of
    the model and this module has no second copy of anything.
    """
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                original = originals.get(id(value))
                if original is not None and is_same_tensor(value, original):
                    table[name] = original  # type: ignore[assignment]
