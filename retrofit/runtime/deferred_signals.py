"""Signals that wait: for work that an exception in the middle would break, and for cleaning up."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, BinaryIO, cast

WAITING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], bool]]:
    """Within this context SIGINT and SIGTERM wait, and what is yielded says whether one does; the first is heeded afterwards.

    Where the work is being interrupted already, it is dropped. In a thread other than the main one, which gets no signals, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def wait(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    before: dict[int, Any] = {}
    try:
        for one in WAITING:
            if signal.getsignal(one) not in (None, signal.SIG_IGN):  # None: not set from Python, so not ours to restore
                before[one] = signal.signal(one, wait)
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received and not isinstance(sys.exception(), KeyboardInterrupt):
            signal.raise_signal(received[0])


class Sink(io.RawIOBase):
    """A file for writers in C++, which an exception in the middle would break: after a failure it accepts all and keeps nothing."""

    def __init__(self, file: BinaryIO, stopped: Callable[[], bool]) -> None:
        self.file, self.stopped = file, stopped
        self.failure: Exception | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # torch warns of a buffer that is not, and writes from the first byte to the last

    def write(self, data: Any) -> int:
        if self.failure is None and not self.stopped():
            try:
                self.file.write(data)
            except Exception as error:
                self.failure = error
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Nothing happens: what has been written is not written again."""
        return 0


@contextlib.contextmanager
def unbroken(file: BinaryIO) -> Iterator[BinaryIO]:
    """A sink that writes to `file`; after the block a failure to write is raised, and a signal that came meanwhile is heeded."""
    with deferred_signals() as stopped:
        sink = Sink(file, stopped)
        try:
            yield cast(BinaryIO, sink)
        except Exception:
            if sink.failure is None:
                raise
    if sink.failure is not None:
        raise sink.failure
