"""Changes of process-wide state: by one thread at a time, with signals deferred, with libraries silenced; freed memory.

Capturing a model replaces methods of tensors and modules, output streams and warning filters; loading replaces initializers and the
default dtype; checks seed random number generators. Two threads doing so at once would see, and restore, each other's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Value = TypeVar("Value")

PROCESS = threading.RLock()  # held by the thread that changes the process
WAITING = (signal.SIGINT, signal.SIGTERM)


def serialized(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function, made to wait until no other thread runs a serialized one, and to run outside inference mode."""

    @functools.wraps(function)
    def waiting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with PROCESS, outside_inference():
            return function(*args, **kwargs)

    return waiting


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """Return a context for creating trainable tensors; gradients stay enabled or disabled, unless inference mode was on."""
    import torch  # deferred, so that --help does not import torch

    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], bool]]:
    """Defer SIGINT and SIGTERM in this context; yield a function that returns whether one is pending.

    The first one takes effect afterwards, unless a KeyboardInterrupt ends the context already. In threads other than the main one,
    which get no signals, this has no effect.
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
            if signal.getsignal(interrupt) not in (None, signal.SIG_IGN):  # None: not set from Python, so it cannot be restored
                before[interrupt] = signal.signal(interrupt, wait)
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received and not isinstance(sys.exception(), KeyboardInterrupt):
            signal.raise_signal(received[0])


class Sink(io.RawIOBase):
    """A file for writers in C++, which an exception would break in the middle: after a failure it accepts and discards all data."""

    def __init__(self, file: BinaryIO, stopped: Callable[[], bool]) -> None:
        self.file, self.stopped = file, stopped
        self.failure: Exception | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # torch warns of a file that is not, and writes sequentially

    def write(self, data: Any) -> int:
        if self.failure is None and not self.stopped():
            try:
                self.file.write(data)
            except Exception as error:
                self.failure = error
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Do nothing: written data is not written again."""
        return 0


@contextlib.contextmanager
def unbroken(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a sink that writes to `file`; after the block a write failure is raised, and a pending signal takes effect."""
    with deferred_signals() as stopped:
        sink = Sink(file, stopped)
        try:
            yield cast(BinaryIO, sink)
        except Exception:
            if sink.failure is None:
                raise
    if sink.failure is not None:
        raise sink.failure


# ── Values that are restored ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def replace_attributes(owner: Any, /, **values: Any) -> Iterator[None]:
    """Replace attributes of an object, a class or a module in this context; those that it does not have itself go afterwards."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def preserve_attribute(name: str, owners: Iterable[Any]) -> Iterator[None]:
    """Restore an attribute of each of the owners after this context."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        yield
    finally:
        for owner, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def set_variable(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Set a context variable in this context."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextlib.contextmanager
def silence_loggers(*names: str) -> Iterator[None]:
    """Within this context these loggers, and those below them without a level of their own, log nothing."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def quiet(*, progress_bars: bool = False) -> Iterator[None]:
    """Suppress warnings and transformers' log in this context, and, unless `progress_bars`, its progress bars."""
    from transformers.utils import logging as log  # deferred, so that --help does not import transformers

    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    if not progress_bars:
        log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


@functools.cache
def c_library() -> Any:
    """Return the C library of this process; None if it is not Linux."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def release_freed_memory() -> None:
    """Return freed memory that the C library holds to the system, if it can."""
    trim = getattr(c_library(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
