"""Tables of text and numbers as a person reads them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import IO

from retrofit.cli.printable import printable
from retrofit.cli.terminal import console_for

Row = Sequence[str]

ROOM = 30  # columns that the last one of a table has at least, or its text in full
COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}  # of whole cells, on a terminal


def print_table(rows: Iterable[Row], headings: Row = (), stream: IO[str] | None = None) -> None:
    """The rows are on `stream` (stdout) in aligned columns, all of every cell.

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
