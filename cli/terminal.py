"""Text and tables on a terminal, in a file or in a pipe.

A terminal gets its own width and colours; a file or a pipe gets plain text, as long as it is. Characters in names from files that
would move a cursor, colour it or end a line are written out.
"""

from __future__ import annotations

import io
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of characters that are not shown but do something, and of broken ones


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text with its control characters as Python writes them, `\\x1b`; with `lines` its line breaks stay."""
    return "".join(
        one if (lines and one == "\n") or unicodedata.category(one) not in HIDDEN else one.encode("unicode_escape").decode()
        for one in text
    )


ENDLESS = 1_000_000  # columns of what is no terminal: nothing is cut or wrapped


def console_for(stream: IO[str]) -> Console:
    """Return a console that writes to `stream`, in colour on a terminal that shows colour and where NO_COLOR is not set."""
    from rich.console import Console  # here, so that --help never waits for it

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

ROOM = 30  # columns that the last one of a table has at least, or its text in full
COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}  # of whole cells, on a terminal


def print_table(rows: Iterable[Row], headings: Row = (), stream: IO[str] | None = None) -> None:
    """Print the rows on `stream` (stdout) in aligned columns, every cell in full.

    A terminal wraps the last column to its width, and the others too where they leave it too little room.
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
