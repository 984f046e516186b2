"""Messages and exit codes of failures, interruptions, and the choice of the process that reports them."""

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
NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA out of memory")  # in torch's errors


class UsageError(RetrofitError):
    """The command line names something that does not exist, or options that cannot be combined."""

    def __init__(self, what: str, *, code: str = "usage", **fields: Any) -> None:
        super().__init__(what, code=code, **fields)


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def report(error: BaseException, stream: IO[str]) -> None:
    """Write the message of `error` to `stream`, with colours on a terminal."""
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
    """Return any failure as an error with a problem, a reason and a fix."""
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


def interrupted(interruption: KeyboardInterrupt, hint: str) -> int:
    """Print how to continue an interrupted command. Return the exit code."""
    print(printable(f"retrofit: interrupted: {hint}"), file=sys.stderr)
    return exit_code(interruption)


def hang_up() -> int:
    """Discard the buffer of stdout, whose reader is gone, so that Python's exit prints no error. Return the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def interrupt_after(over: threading.Event, number: signal.Signals) -> None:
    """Send the signal to the main thread again, shortly after the hook that sets `over` has ended, in which it would be lost."""
    over.wait()
    time.sleep(0.01)
    _thread.interrupt_main(number)


class Interruption:
    """Handlers of SIGINT and SIGTERM within `unwinding()`; `received` is the exception of the first signal, or None."""

    def __init__(self) -> None:
        self.received: KeyboardInterrupt | None = None

    @contextlib.contextmanager
    def unwinding(self) -> Iterator[None]:
        """Within this context either signal unwinds the stack as Ctrl-C does, so that half-written files are removed.

        If the exception is dropped, e.g. in a finalizer, it is raised again shortly afterwards. If C code replaces it, `received`
        still has it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hook = sys.unraisablehook
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if before[signal.SIGINT] is not signal.default_int_handler:
            del before[signal.SIGINT]  # ignored, as under nohup, or handled by the caller

        def unraisable(dropped: Any) -> None:
            if issubclass(dropped.exc_type, MemoryError):
                return  # C code continues or raises another error: no traceback on the terminal
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
    """Return whether this process reports the failure.

    Until the processes are connected, all on a machine fail for the same reason and the first reports it; afterwards each reports
    its own.
    """
    if started() == 1:
        return True
    if isinstance(error, (FirstProcessError, KeyboardInterrupt)):
        return is_first()
    torch = sys.modules.get("torch")
    connected = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return connected or os.environ["LOCAL_RANK"] == "0"


def disconnect() -> None:
    """Disconnect the processes that training connected."""
    training = sys.modules.get("retrofit.training.processes")
    if started() > 1 and training is not None:
        training.disconnect()


def refuse_several(command: str) -> None:
    """Raise `UsageError` if several processes were started. `command` supports one."""
    if started() > 1:
        raise UsageError(
            f"retrofit {command} runs in one process; {started()} were started",
            why="each would write the same result",
            remedy="run it without torchrun or accelerate launch; retrofit train runs in several",
        )


def quieten_wrappers() -> None:
    """Set the log level of torch's C++ code to errors if there are several processes, before torch is imported.

    Otherwise each process warns that a search for unused parameters found none.
    """
    if started() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
