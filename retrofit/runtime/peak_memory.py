"""How much memory the tensors of a model take, and at most at one time those that an action makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def own_bytes(model: nn.Module) -> int:
    """The bytes of the parameters and buffers, shared ones once."""
    return sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most bytes that the tensors made by the action took at one time; without what an operation needs while it runs."""
    with HeldStorages() as held:
        action()
    return held.most


class HeldStorages(TorchDispatchMode):
    """Knows the memory of every tensor that an operation made, for as long as there is one on it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {storage_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = {storage_of(one): one for one in tree_leaves(result) if isinstance(one, Tensor)}
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.sizes |= {storage: one.untyped_storage().nbytes() for storage, one in made.items() if storage not in given}
        self.most = max(self.most, sum(self.sizes.values()))
        return result


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
