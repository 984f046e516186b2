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


def counted(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """Yield the items, `total` of them, and before each report its number and an estimate: "layer 7 of 30, about 40 s left"."""
    say, began, waiting = LISTENER.get(), time.monotonic(), iter(items)
    for index in range(total):
        if say is not None:
            left = time_left((time.monotonic() - began) / index * (total - index)) if index else ""
            say(f"{what} {index + 1} of {total}{left}")
        try:
            item = next(waiting)
        except StopIteration:
            return
        yield item


def time_left(seconds: float) -> str:
    """Return an estimate in words; nothing where little is left."""
    if seconds < LONG:
        return ""
    return f", about {f'{seconds / 60:.0f} min' if seconds >= 90 else f'{round(seconds / 5) * 5} s'} left"


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], what: str, size: int) -> list[Result]:
    """Return what `work` gives for each of the items, counted; torch's threads are divided among those worked on at once.

    `work` takes `size` bytes for an item, draws from no generator but its own, and changes nothing that another item's reads. No
    gradients are recorded but where it says so.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(threads, len(items), ROOM // max(1, size)))
    if workers == 1:
        return [work(item) for item in counted(items, what, len(items))]

    def alone(item: Item) -> Result:
        with torch.no_grad():
            return work(item)

    each = threads // workers
    torch.set_num_threads(each)  # for this thread, and for those that begin later
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(each,))
    try:
        waiting = [pool.submit(contextvars.copy_context().run, alone, item) for item in items]
        return [one.result() for one in counted(waiting, what, len(items))]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
