"""Text, tables and progress on a terminal, in a file or in a pipe.

Tables have the width of a terminal, with colours; in a file or a pipe they are plain text of any width. Control characters in names
from files, which would move the cursor, change a colour or end a line, are escaped.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from retrofit.errors import RetrofitWarning
from retrofit.progress import Milestone

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of control characters, surrogates and separators


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text with its control characters escaped, as `\\x1b`; with `lines` except line breaks."""
    return "".join(
        character
        if (lines and character == "\n") or unicodedata.category(character) not in HIDDEN
        else character.encode("unicode_escape").decode()
        for character in text
    )


ENDLESS = 1_000_000  # width of a file or pipe: nothing is cut or wrapped


def console_for(stream: IO[str]) -> Console:
    """Return a console that writes to `stream`; in colour on a terminal that shows colour, unless NO_COLOR is set."""
    from rich.console import Console  # not imported for --help

    on_terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if on_terminal else ENDLESS,
        force_terminal=on_terminal,
        color_system="auto" if on_terminal else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


Row = Sequence[str]

ROOM = 30  # minimum width of the last column, if its text is that long
COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}  # of whole cells, on a terminal


def print_table(rows: Iterable[Row], headings: Row = (), stream: IO[str] | None = None) -> None:
    """Print the rows on `stream` (default: stdout) in aligned columns, with no cell cut.

    On a terminal the last column is wrapped to the width, and so are the others if the last has too little room.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    stream = sys.stdout if stream is None else stream
    lines = [[printable(cell) for cell in row] for row in rows]
    last = max(map(len, [headings, *lines]), default=0) - 1
    plain = None if stream.isatty() else io.StringIO()
    console = console_for(stream if plain is None else plain)
    widths = [max(cell_len(line[index]) for line in [headings, *lines] if index < len(line)) for index in range(last + 1)]
    fits = sum(widths[:-1]) + 2 * last + min([ROOM, *widths[-1:]]) <= console.width
    table = Table(box=None, show_header=bool(headings), pad_edge=False, padding=(0, 2, 0, 0))
    for index in range(last + 1):
        heading = Text(headings[index] if index < len(headings) else "", style="dim")
        table.add_column(heading, style="bold" if index == 0 else "", no_wrap=fits and index < last, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in line))
    console.print(table)
    if plain is not None:
        stream.write("".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines()))


VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by launchers of several processes


def started() -> int:
    """Return the number of processes that run this command."""
    given = [os.environ.get(name, "") for name in VARIABLES]
    return int(given[-1]) if all(text.isdigit() for text in given) else 1


def is_first() -> bool:
    """Return whether this process writes, prints and shows progress."""
    return started() == 1 or os.environ["RANK"] == "0"


# ── Progress ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


COUNTS = re.compile(r"\d[\d,.:]*")  # numbers in a stage
INTERVAL = 60.0  # seconds between plain lines that differ only in numbers


class Progress:
    """Within this context a terminal shows a spinner, the elapsed time and the current stage.

    A file or pipe gets a plain line for each stage and each milestone; of reports that differ only in numbers, one a minute.
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
        """Print the stage on a new line, unless the previous line has the same stage and is less than `INTERVAL` old."""
        kind, now = COUNTS.sub("", stage), time.monotonic()
        milestone = isinstance(stage, Milestone)
        if milestone or kind != self.stage or now - self.printed >= INTERVAL:
            with contextlib.suppress(OSError, ValueError):  # the stream is closed
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
            with contextlib.suppress(OSError):  # the terminal is closed
                self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()


@contextlib.contextmanager
def working(debug: bool) -> Iterator[Progress]:
    """Within this context the first process shows the current stage, and libraries print nothing unless debugging."""
    from retrofit.process import quiet

    shown = Progress()
    silence = contextlib.nullcontext() if debug else quiet()
    with shown if is_first() else contextlib.nullcontext(shown) as progress, silence, warnings_as_notes():
        yield progress


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Within this context retrofit's warnings are printed to stderr as notes, by the first of several processes."""

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
