"""What long work is doing: on one line of a terminal, or a plain line for each stage where stderr is a file or a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from retrofit.cli.terminal import console_for, is_first, printable
from retrofit.errors import RetrofitWarning
from retrofit.progress import Milestone

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


COUNTS = re.compile(r"\d[\d,.:]*")  # by which the reports of one stage differ
INTERVAL = 60.0  # seconds after which a stage that counts gets another plain line


class Progress:
    """Within this context a terminal shows a spinner, the time spent and the stage last reported.

    Anything else gets a plain line for each stage and each milestone; a stage whose reports differ in numbers alone gets one a
    minute.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.bar: Bar | None = None
        self.plain = False
        self.stage, self.printed = "", 0.0  # the last plain line without its numbers, and when it was written

    def __call__(self, stage: str) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=printable(stage), visible=True)
        elif self.plain:
            self.print_line(stage)

    def print_line(self, stage: str) -> None:
        """Print the stage on a line of its own, unless the line before said the same a moment ago."""
        kind, now = COUNTS.sub("", stage), time.monotonic()
        milestone = isinstance(stage, Milestone)
        if milestone or kind != self.stage or now - self.printed >= INTERVAL:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                print(f"retrofit: {printable(stage)}", file=self.stream, flush=True)
            self.printed = now
        if not milestone:
            self.stage = kind

    def __enter__(self) -> Progress:
        self.plain = not self.stream.isatty()
        if not self.plain:
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.table import Column

            console = console_for(self.stream)
            stage = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
            spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
            self.bar = Bar(spinner, TimeElapsedColumn(), stage, console=console, transient=True, redirect_stdout=False, expand=True)
            self.bar.add_task("", visible=False)
            with contextlib.suppress(OSError):  # the terminal is gone: nobody is watching
                self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()


@contextlib.contextmanager
def working(debug: bool) -> Iterator[Progress]:
    """Within this context the stage that work is in is shown, and libraries say nothing of their own unless debugging.

    Of several processes the first one shows it.
    """
    from retrofit.process import quiet

    shown = Progress()
    silence = contextlib.nullcontext() if debug else quiet()
    with shown if is_first() else contextlib.nullcontext(shown) as progress, silence, warnings_as_notes():
        yield progress


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Within this context what retrofit itself warns of is on stderr as a note, of several processes by the first one."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **other: Any) -> None:
        if not issubclass(category, RetrofitWarning):
            before(message, category, *place, **other)
        elif is_first():
            print(printable(f"retrofit: note: {message}"), file=sys.stderr)

    with warnings.catch_warnings():
        before = warnings.showwarning
        warnings.simplefilter("always", RetrofitWarning)
        warnings.showwarning = show
        yield
