"""Failures as messages and exit codes, interruptions, and which of several processes reports them."""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import IO, Any

from retrofit.cli.terminal import console_for, is_first, printable, started
from retrofit.errors import FirstProcessError, RetrofitError, VerificationError, first_line

REMEDIES = {
    errno.ENOSPC: "free some space, or name another place with -o",
    errno.EDQUOT: "free some of your quota, or name another place with -o",
    errno.EFBIG: "raise the limit on the size of a file, or name another place with -o",
    errno.EACCES: "check its permissions, or name another place",
    errno.EROFS: "name another place with -o",
    errno.ENOENT: "check the path",
}
NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA out of memory")  # in errors of torch


class UsageError(RetrofitError):
    """The command line names something that does not exist, or options that exclude one another."""

    def __init__(self, what: str, *, code: str = "usage", **fields: Any) -> None:
        super().__init__(what, code=code, **fields)


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def report(error: BaseException, stream: IO[str]) -> None:
    """Write the message of `error` to `stream`, its first word red on a terminal."""
    message = f"retrofit: {explain(error)}"
    if not stream.isatty():
        print(message, file=stream)
        return
    from rich.text import Text

    text = Text(message)
    text.highlight_words(["retrofit: error:"], "bold red")
    text.highlight_words(["why:", "fix:"], "bold")
    console_for(stream).print(text, soft_wrap=True)


def explain(error: BaseException) -> str:
    """Return the message of a failure: the problem, the reason and the fix."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    failure = as_retrofit_error(error)
    shown = RetrofitError(
        printable(failure.what), why=printable(failure.why, lines=True), remedy=printable(failure.remedy), **failure.labels
    )
    return f"error: {shown}"


def as_retrofit_error(error: BaseException) -> RetrofitError:
    """Return any failure as an error that names the thing, the reason and the fix."""
    if isinstance(error, RetrofitError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return RetrofitError(
            f"{error.filename or 'a file'} cannot be read or written",
            why=os.strerror(error.errno).lower(),
            remedy=REMEDIES.get(error.errno, "--debug shows where it happened"),
            code="files",
        )
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        return RetrofitError(
            "out of memory", why=first_line(error), remedy="use a machine with more memory, or a smaller model", code="memory"
        )
    return RetrofitError(
        f"{type(error).__name__}: {error}", why="unexpected error", remedy="--debug shows where it happened", code="unexpected"
    )


def exit_code(error: BaseException) -> int:
    if isinstance(error, Terminated):
        return 128 + signal.SIGTERM
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 1 if isinstance(error, VerificationError) else 2


def hang_up() -> int:
    """Return the exit code when the reader of stdout is gone; discard its buffer, so that the exit prints no error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def interrupt_after(over: threading.Event, number: signal.Signals) -> None:
    """Send the signal to the main thread again, a moment after the hook that sets `over` has ended: it would be lost there too."""
    over.wait()
    time.sleep(0.01)
    _thread.interrupt_main(number)


class Interruption:
    """SIGINT and SIGTERM within `unwinding()`, and which of them came first: `received`, None where neither did."""

    def __init__(self) -> None:
        self.received: KeyboardInterrupt | None = None

    @contextlib.contextmanager
    def unwinding(self) -> Iterator[None]:
        """Within this context either signal unwinds the stack as Ctrl-C does, so that half-written files are removed.

        The exception may be dropped, as in a finalizer: then it is raised again a moment later. C code may replace it by another:
        `received` then holds the signal's exception.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hook = sys.unraisablehook
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if before[signal.SIGINT] is not signal.default_int_handler:
            del before[signal.SIGINT]  # ignored, as under nohup, or somebody else's

        def unraisable(dropped: Any) -> None:
            if issubclass(dropped.exc_type, MemoryError):
                return  # of code in C, which goes on or raises another: no trace on the terminal
            if not issubclass(dropped.exc_type, KeyboardInterrupt):
                hook(dropped)
                return
            number = signal.SIGTERM if issubclass(dropped.exc_type, Terminated) else signal.SIGINT
            over = threading.Event()
            threading.Thread(target=interrupt_after, args=(over, number), daemon=True).start()
            over.set()

        try:
            sys.unraisablehook = unraisable
            for number in before:
                signal.signal(number, self.unwind)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook

    def unwind(self, signum: int, frame: FrameType | None) -> None:
        error = Terminated() if signum == signal.SIGTERM else KeyboardInterrupt()
        self.received = self.received or error
        raise error


def is_reported_here(error: BaseException) -> bool:
    """Return whether this process says what failed.

    Until they are connected all processes of a machine fail for the same reason, and one says it; afterwards each for its own.
    """
    if started() == 1:
        return True
    if isinstance(error, (FirstProcessError, KeyboardInterrupt)):
        return is_first()
    torch = sys.modules.get("torch")
    connected = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return connected or os.environ["LOCAL_RANK"] == "0"


def disconnect() -> None:
    """Disconnect the processes if training connected them."""
    training = sys.modules.get("retrofit.training.processes")
    if started() > 1 and training is not None:
        training.disconnect()


def refuse_several(command: str) -> None:
    """Raise `UsageError` if several processes run a command that supports only one."""
    if started() > 1:
        raise UsageError(
            f"retrofit {command} runs in one process; {started()} were started",
            why="each would write the same result",
            remedy="run it without torchrun or accelerate launch; retrofit train runs in several",
        )


def quieten_wrappers() -> None:
    """Let torch's C++ code report only errors if there are several processes.

    Otherwise each would warn that a search for unused parameters found none. The variable must be set before torch is imported.
    """
    if started() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
