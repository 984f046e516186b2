"""Put parameters, buffers and modules under dotted names into a tree of modules."""

from __future__ import annotations

from torch import Tensor, nn


def register_tensor(root: nn.Module, name: str, value: Tensor, saved: bool = True) -> None:
    """`value` is the parameter or buffer called `name` of `root`; plain modules are added for the path to it."""
    path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, path.split(".")):
        if not isinstance(getattr(owner, piece, None), nn.Module):
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    elif leaf not in owner._buffers:
        owner.register_buffer(leaf, value, persistent=saved)


def attach_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """`module` is the submodule `name` of `root`, and holds also what the module there held before."""
    owner_path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, owner_path.split(".")):
        if piece not in owner._modules:
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    present = owner._modules.get(leaf)
    owner.add_module(leaf, module)
    if present is not None and present is not module:  # what the region around reads of that module
        merge_module(present, module)


def merge_module(held: nn.Module, module: nn.Module) -> None:
    """`module` holds also what `held` holds."""
    for registry in ("_parameters", "_buffers"):
        getattr(module, registry).update(getattr(held, registry))
    module._non_persistent_buffers_set |= held._non_persistent_buffers_set
    for name, child in held.named_children():
        if name in module._modules:
            merge_module(child, module.get_submodule(name))
        else:
            module.add_module(name, child)
