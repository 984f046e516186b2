"""Changes to the whole process: by one thread at a time, with signals deferred, with libraries silenced.

Capturing a model replaces methods of tensors and modules, the streams that are printed to and filters of warnings; loading replaces
initializers and the default dtype; checks seed the generators of random numbers. Two threads that did so at once would see, and put
back, each other's.
"""

from __future__ import annotations

import contextlib
import functools
import io
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PROCESS = threading.RLock()  # held by the thread that changes the process
WAITING = (signal.SIGINT, signal.SIGTERM)


def serialized(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function, which waits until no other thread runs a serialized one, and runs outside inference mode."""

    @functools.wraps(function)
    def waiting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with PROCESS, outside_inference():
            return function(*args, **kwargs)

    return waiting


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """Within this context what is made can be trained; gradients are computed or not as before, unless inference mode was on."""
    import torch  # here, so that --help never waits for it

    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


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
        for interrupt in WAITING:
            if signal.getsignal(interrupt) not in (None, signal.SIG_IGN):  # None: not set from Python, so not ours to restore
                before[interrupt] = signal.signal(interrupt, wait)
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
        """Do nothing: what has been written is not written again."""
        return 0


@contextlib.contextmanager
def unbroken(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a sink that writes to `file`; after the block a failure to write is raised, and a signal that came is heeded."""
    with deferred_signals() as stopped:
        sink = Sink(file, stopped)
        try:
            yield cast(BinaryIO, sink)
        except Exception:
            if sink.failure is None:
                raise
    if sink.failure is not None:
        raise sink.failure


@contextlib.contextmanager
def quiet(*, progress_bars: bool = False) -> Iterator[None]:
    """Within this context nothing warns, and transformers logs nothing and shows progress bars only where they are wanted."""
    from transformers.utils import logging  # here, so that --help never waits for it

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
