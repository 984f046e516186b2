"""Long work on many things, layers or batches: counted as it goes on, with an estimate of what is left, and several at a time.

The fit of a layer is thousands of small operations. Threads that share a small operation wait for one another, and where other
processes use the cores too, many times as long as they compute. So layers are worked on side by side, each by threads of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Say = Callable[[str], None]

LISTENER: contextvars.ContextVar[Say | None] = contextvars.ContextVar("LISTENER", default=None)
LONG = 10.0  # seconds left that are worth an estimate
ROOM = 2**30  # bytes that work on several layers at once may take


@contextlib.contextmanager
def reported_to(say: Say | None) -> Iterator[None]:
    """Within this context `say` receives what counted work is at."""
    token = LISTENER.set(say)
    try:
        yield
    finally:
        LISTENER.reset(token)


def counted(items: Iterable[Item], what: str, total: int, done: int = 0) -> Iterator[Item]:
    """Yield the items, and before each report its number and an estimate: "layer 7 of 30, about 40 s left".

    They are some of `total`; `done` came before them.
    """
    say, began = LISTENER.get(), time.monotonic()
    for index, item in enumerate(items):
        if say is not None:
            left = time_left((time.monotonic() - began) / index * (total - done - index)) if index else ""
            say(f"{what} {done + index + 1} of {total}{left}")
        yield item


def time_left(seconds: float) -> str:
    """Return an estimate in words; nothing where little is left."""
    if seconds < LONG:
        return ""
    return f", about {f'{seconds / 60:.0f} min' if seconds >= 90 else f'{round(seconds / 5) * 5} s'} left"


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], what: str, size: int, *, done: int = 0, total: int | None = None
) -> list[Result]:
    """Return what `work` gives for each of the items, counted; torch's threads are divided among those worked on at once.

    Where the items are some of `total`, `done` came before them.

    `work` takes `size` bytes for an item, draws from no generator but its own, and changes nothing that another item's reads. No
    gradients are recorded but where it says so.
    """
    threads = torch.get_num_threads()
    workers, total = max(1, min(threads, len(items), ROOM // max(1, size))), len(items) if total is None else total
    if workers == 1:
        return [work(item) for item in counted(items, what, total, done)]

    def alone(item: Item) -> Result:
        with torch.no_grad():
            return work(item)

    each = threads // workers
    torch.set_num_threads(each)  # for this thread, and for those that begin later
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(each,))
    try:
        waiting = [pool.submit(contextvars.copy_context().run, alone, item) for item in items]
        return [one.result() for one in counted(waiting, what, total, done)]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
