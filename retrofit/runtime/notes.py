"""What a pass found on the way, as text; what it measured at one site after the other, as one table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from retrofit.runtime.line_folding import FEWEST, fold_lines, one_line

Worst = Literal["lowest", "highest"]

MOST_ROWS = 8  # sites that a table lists one by one
WORST_ROWS = 5  # sites that a table of more lists after its summary


class Note(str):
    """A finding as text. One that was measured at a site keeps the parts that its text is made of; the others have no `values`.

    `values` are numbers by column, the same columns for all notes of a `kind`; `form` is how they are written (`.1%`, `.3f`). The
    first column ranks the sites: its `worst` value is the lowest or the highest.
    """

    kind: str
    site: str
    values: Mapping[str, float]
    form: str
    worst: Worst

    def __new__(
        cls, kind: str, site: str = "", values: Mapping[str, float] | None = None, form: str = ".3g", worst: Worst = "lowest"
    ) -> Note:
        numbers = dict(values or {})
        measured = ", ".join(f"{column} {value:{form}}" for column, value in numbers.items())
        note = super().__new__(cls, ": ".join(part for part in (site, kind, measured) if part))
        note.kind, note.site, note.values, note.form, note.worst = kind, site, numbers, form, worst
        return note


class Milestone(str):
    """A report of progress that a log keeps beside those after it, as of an evaluation; other reports replace one another."""


def fold_notes(notes: Iterable[str]) -> list[str]:
    """The notes in order: one table for each kind that was measured at several sites, lines that differ in numbers only as one."""
    tables: dict[tuple[str, ...], list[Note]] = {}
    texts: list[str] = []
    for note in notes:
        if isinstance(note, Note) and note.values:
            tables.setdefault((note.kind, *note.values), []).append(note)
        else:
            texts.append(one_line(note))
    few = [one_line(note) for group in tables.values() if len(group) < FEWEST for note in group]
    return [*("\n".join(table_lines(group)) for group in tables.values() if len(group) >= FEWEST), *few, *fold_lines(texts)]


def table_lines(notes: Sequence[Note]) -> list[str]:
    """Notes of one kind in aligned columns: each site, or of many the median, the range and the worst."""
    first = notes[0]
    columns = list(first.values)
    rows = [[first.kind, *columns]]
    listed = list(notes)
    if len(notes) > MOST_ROWS:
        for label, summary in ((f"median of {len(notes)}", statistics.median), ("lowest", min), ("highest", max)):
            rows.append([label, *(f"{summary(note.values[column] for note in notes):{first.form}}" for column in columns)])
        listed.sort(key=lambda note: note.values[columns[0]], reverse=first.worst == "highest")
        listed = listed[:WORST_ROWS]
        rows.append([f"the {first.worst} {columns[0]}:"])
    rows += [[one_line(note.site), *(f"{note.values[column]:{note.form}}" for column in columns)] for note in listed]
    first_width = max(len(row[0]) for row in rows)
    widths = [max(len(row[index]) for row in rows if len(row) > 1) for index in range(1, len(columns) + 1)]
    return [
        "  ".join([row[0].ljust(first_width), *(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=False))]).rstrip()
        for row in rows
    ]
