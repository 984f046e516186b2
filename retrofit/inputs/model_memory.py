"""Devices and sizes of a model's weights: measured, offloaded, left out (a skeleton), stored for later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrofit.process import set_variable

Store = Callable[[Tensor], Tensor]
STORE: ContextVar[Store | None] = ContextVar("STORE", default=None)
ROOM = 256 * 2**20  # bytes of recordings in memory at a time; next to a large model,
SHARE = 4  # up to a quarter of its size
CACHE_LINE = 64  # bytes


def own_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers, shared ones counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def peak_bytes(action: Callable[[], Any]) -> int:
    """Return the peak bytes of the tensors that the action created, without the workspace of operations."""
    with HeldStorages() as held:
        action()
    return held.most


class HeldStorages(TorchDispatchMode):
    """Tracks the memory of every tensor that an operation created, while a tensor uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {storage_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        made = {storage_of(tensor): tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.sizes |= {storage: tensor.untyped_storage().nbytes() for storage, tensor in made.items() if storage not in given}
        self.most = max(self.most, sum(self.sizes.values()))
        return result


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def offloaded_module(model: nn.Module) -> str | None:
    """Return the path of the first module whose weights are offloaded between its calls; None if there is none."""
    return next((path for path, module in model.named_modules() if is_offloaded(module)), None)


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate keeps the module's weights elsewhere between its calls."""
    if not hasattr(module, "_hf_hook"):
        return False
    from accelerate.utils import has_offloaded_params  # deferred: most models have no such hook, and accelerate is slow to import

    return has_offloaded_params(module)


def hooks_to_leave_out(model: nn.Module) -> dict[int, Any]:
    """Return a memo for deep copies, by identity, that replaces accelerate's hooks and all that they hold by empty hooks."""
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    if not hooks:
        return {}
    from accelerate.hooks import ModelHook

    return {id(hook): ModelHook() for hook in hooks}


def value_of(model: nn.Module, name: str) -> Tensor:
    """Return the value of a parameter, wherever it is stored."""
    module = model.get_submodule(name.rpartition(".")[0])
    if not is_offloaded(module):
        return model.get_parameter(name).detach()
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return model.get_parameter(name).detach().clone()


def without_weights(model: nn.Module, *, keep_buffers: bool = False) -> nn.Module:
    """Return a copy of the model on the meta device: its tensors have shapes but no values; tied ones are tied.

    With `keep_buffers` it has the model's own buffers, with their values.
    """
    hooks = hooks_to_leave_out(model)
    memo: dict[int, Any] = dict(hooks)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer for buffer in model.buffers() if keep_buffers}
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    for tensor in (*model.buffers(), *attributes):
        memo.setdefault(id(tensor), torch.empty_like(tensor, device="meta", requires_grad=False))
    skeleton = copy.deepcopy(model, memo)
    if hooks:
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(skeleton, recurse=True)
    return skeleton


def with_same_tensors(model: nn.Module) -> nn.Module | None:
    """Return a copy of the module tree with the model's own tensors; replacing modules and parameters in the model leaves it
    unchanged.

    Return None if hooks, of a user or of accelerate, would act in the copy too.
    """
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if hooked or hooks_to_leave_out(model):
        return None
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *attributes)}
    return copy.deepcopy(model, memo)


def zeros_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of this shape and dtype on the CPU, aligned to cache lines, which take memory only once they are written.

    Used for tables that start at zero, and for the weights of a model that is rewritten before its own are loaded: uninitialized
    memory may hold NaN, to which no start can be fitted.
    """
    count = tensor.numel() * tensor.element_size()
    memory = numpy.zeros(count + CACHE_LINE, numpy.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[first : first + count]).view(tensor.dtype).view(tensor.shape)


class HollowGroupedProducts(TorchDispatchMode):
    """Within this context grouped products of matrices without values accept any dtype, as those of real matrices do.

    torch 2.13 infers their shape for bfloat16 only.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[1].dim() == 3 and args[0].dim() == 2:
            rows, weight = args[:2]  # (rows, in), (E, in, out)
            return rows.new_empty(len(rows), weight.shape[-1])
        return function(*args, **(kwargs or {}))


def set_aside(tensor: Tensor) -> Tensor:
    """Return the same values where recordings are stored: the tensor itself, unless the model is larger than memory."""
    store = STORE.get()
    return tensor if store is None else store(tensor)


def groups_in_room(sizes: Mapping[str, int], model: nn.Module) -> list[list[str]]:
    """Return the modules of `model` in groups for one run each, in order, with recordings of about equal bytes per group.

    `sizes` are the bytes of their recordings, by path. If recordings are not kept in memory, all modules are one group.
    """
    whole, room = max(1, sum(sizes.values())), max(ROOM, own_bytes(model) // SHARE)
    runs = -(-whole // room) if STORE.get() is None else 1
    groups: list[list[str]] = [[] for _ in range(runs)]
    before = 0
    for path, size in sizes.items():
        groups[min(runs - 1, (2 * before + size) * runs // (2 * whole))].append(path)
        before += size
    return [group for group in groups if group]


def recordings_kept_by(store: Store) -> contextlib.AbstractContextManager[object]:
    """Within this context `store` gets every tensor that is set aside, and returns it from its own storage."""
    return set_variable(STORE, store)
