"""Tensors that are recorded for later: where they lie, and of how many modules at a time they may be in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from torch import Tensor, nn

from retrofit.runtime.peak_memory import own_bytes

Store = Callable[[Tensor], Tensor]
STORE: ContextVar[Store | None] = ContextVar("STORE", default=None)
ROOM = 256 * 2**20  # bytes of recordings in memory at a time, and more beside a large model:
SHARE = 4  # a quarter of its own


def set_aside(tensor: Tensor) -> Tensor:
    """The same values, where recordings are kept: the tensor itself, unless the model under way is larger than memory."""
    store = STORE.get()
    return tensor if store is None else store(tensor)


def groups_in_room(sizes: Mapping[str, int], model: nn.Module) -> list[list[str]]:
    """The modules of `model` that are recorded in one run, then those of the next, in order and of about as many bytes each.

    `sizes` are the bytes of their recordings, by path. Where recordings are not kept in memory all are of one run.
    """
    whole, room = max(1, sum(sizes.values())), max(ROOM, own_bytes(model) // SHARE)
    runs = -(-whole // room) if STORE.get() is None else 1
    groups: list[list[str]] = [[] for _ in range(runs)]
    before = 0
    for path, size in sizes.items():
        groups[min(runs - 1, (2 * before + size) * runs // (2 * whole))].append(path)
        before += size
    return [group for group in groups if group]


@contextlib.contextmanager
def recordings_kept_by(store: Store) -> Iterator[None]:
    """Within this context `store` gets every tensor that is set aside, and returns it from where it put it."""
    token = STORE.set(store)
    try:
        yield
    finally:
        STORE.reset(token)
