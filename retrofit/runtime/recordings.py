"""Where tensors that are recorded for later lie: in memory, or wherever the context says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch import Tensor

Store = Callable[[Tensor], Tensor]
STORE: ContextVar[Store | None] = ContextVar("STORE", default=None)


def set_aside(tensor: Tensor) -> Tensor:
    """The same values, where recordings are kept: the tensor itself, unless the model under way is larger than memory."""
    store = STORE.get()
    return tensor if store is None else store(tensor)


@contextlib.contextmanager
def recordings_kept_by(store: Store) -> Iterator[None]:
    """Within this context `store` gets every tensor that is set aside, and returns it from where it put it."""
    token = STORE.set(store)
    try:
        yield
    finally:
        STORE.reset(token)
