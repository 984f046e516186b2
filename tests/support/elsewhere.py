"""A device that is not the CPU, in its memory: what mixes both fails here as it does on a GPU, where no machine of a test has one.

Tensors on it have a shape, strides and a storage of their own, but no data there; each storage has a counterpart on the CPU, which
every operation runs on. As on a GPU, tensors of both devices may meet in a copy, as indices, and as numbers of no dimension. Not
emulated: what a GPU computes differently, and files that hold tensors of this device. The device is there for the whole process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "elsewhere"
KEY = "PrivateUse1"  # torch's name for a device that somebody else adds
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")  # kernels for all devices that resize outputs
MEET = ("aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize")
INDEX = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

counterparts: dict[int, Tensor] = {}  # by storage: all its elements, in one dimension
libraries: list[torch.library.Library] = []  # as long as these are there, so are their kernels


class Backend(_DummyBackendModule):
    """What torch asks a device for: random numbers are the CPU's."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        pass


def add_device() -> torch.device:
    """The device, which this process has from now on."""
    if not libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        libraries.extend((everything, aten))
        everything.fallback(on_the_cpu, KEY)
        aten.impl("as_strided", as_strided, KEY)
        aten.impl("as_strided_", as_strided_, KEY)
        aten.impl("view", view, KEY)
        for name, op in resizing_operations():
            aten.impl(name, functools.partial(on_the_cpu, op), KEY)
    return torch.device(NAME)


def resizing_operations() -> list[tuple[str, Any]]:
    """Those whose kernel for all devices makes an empty output for another operation to resize; views share a storage instead."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space == "aten" and any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in EXPLICIT):
            op = getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default")
            is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in op._schema.returns)
            if not is_view and torch.Tag.inplace_view not in op.tags:
                found.append((name, op))
    return found


# ── Operations ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def as_strided(x: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    """Of the same storage."""
    return torch.ops.aten.as_strided.default.redispatch(META, x, size, stride, x.storage_offset() if offset is None else offset)


def as_strided_(x: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    x.data = as_strided(x, size, stride, offset)
    return x


def view(x: Tensor, size: Any) -> Tensor:
    return torch.ops.aten.view.default.redispatch(META, x, size)


def on_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on the counterparts; raises `RuntimeError` where its tensors are on both devices."""
    refuse_both(op, [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)])
    given: dict[int, Tensor] = {}  # by the counterpart that the operation may return

    def there(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not is_elsewhere(value):
            return value
        raw = counterpart(value)
        given[id(raw)] = value
        return raw

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in given:
            return value if leaves else moved(value)
        if value.shape != given[id(value)].shape:
            raise NotImplementedError(f"{op} resizes an output")
        return given[id(value)]

    leaves = torch.device(asked_for(op, args, kwargs) or NAME).type == "cpu"
    here, named = tree_map(there, args), tree_map(there, kwargs)
    if op._schema.name.startswith("aten::_copy_from"):
        here[1].copy_(here[0])
        return args[1]
    return tree_map(back, op(*here, **named))


def refuse_both(op: Any, tensors: list[Tensor]) -> None:
    name = op._schema.name
    if name in INDEX:
        tensors = [one for one in tensors if one.is_floating_point()]
    here = [one for one in tensors if one.device.type == "cpu" and one.dim()]
    if here and any(map(is_elsewhere, tensors)) and name not in MEET:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got one on cpu and one {NAME}")


def asked_for(op: Any, args: Any, kwargs: Any) -> Any:
    """The device that the caller named, if any."""
    names = [one.name for one in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("device")


# ── Tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def moved(raw: Tensor) -> Tensor:
    """A new tensor of the device with these values and strides."""
    size = sum((count - 1) * step for count, step in zip(raw.shape, raw.stride(), strict=True)) + 1 if raw.numel() else 0
    everything = raw.as_strided((size,), (1,))
    new = torch._C._acc.create_empty_tensor([size], raw.dtype)
    counterparts[new.untyped_storage()._cdata] = everything
    return as_strided(new, raw.shape, raw.stride(), 0)


def counterpart(x: Tensor) -> Tensor:
    """The values of a tensor of the device, on the CPU; what is written there is written here."""
    everything = counterparts[x.untyped_storage()._cdata]
    if everything.dtype != x.dtype:
        everything = everything.view(x.dtype)
    return everything.as_strided(x.shape, x.stride(), everything.storage_offset() + x.storage_offset())
