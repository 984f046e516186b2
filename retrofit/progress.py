"""Reports of long work: progress with an estimate, and the notes of passes, with similar lines folded and sites in one table.

Fitting a layer takes thousands of small operations. Threads that share a small operation wait for one another, and if other
processes use the cores too, much longer than they compute. So several layers are processed in parallel, each by threads of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

FEWEST = 3  # lines worth folding
NUMBER = re.compile(r"(?<=[._A-Za-z])\d+|\d+(?:,\d{3})*(?:\.\d+)?")  # `layers.0.1` has two, `1,000.5` one
Worst = Literal["lowest", "highest"]
MOST_ROWS = 8  # sites that a table lists individually
WORST_ROWS = 5  # sites that a larger table lists after its summary
Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[str], None]
LISTENER: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("LISTENER", default=None)
LONG = 10.0  # seconds left that are worth an estimate
ROOM = 2**30  # bytes for parallel work on several layers


def one_line(text: str) -> str:
    """Return the text with its line breaks escaped: a name from a file cannot start a new line."""
    return text.replace("\n", "\\n")


def fold_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines in order; lines that differ only in numbers become one, with their count and each number's range.

    `h.0: kept 91%`, `h.1: kept 95%`, `h.2: kept 93%` become `3 × h.0–2: kept 91–95%`.
    """
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(NUMBER.sub("\0", line), []).append(line)
    return [text for group in groups.values() for text in ([f"{len(group)} × {merge(group)}"] if len(group) >= FEWEST else group)]


def merge(group: Sequence[str]) -> str:
    """Return one text for lines that differ only in numbers."""
    between = NUMBER.split(group[0])
    merged = between[0]
    for numbers, text in zip(zip(*map(NUMBER.findall, group), strict=True), between[1:], strict=True):
        merged += number_range(numbers, in_path=merged.endswith((".", "_")) and text[:1] in (".", "_", ":", "")) + text
    return merged


def number_range(numbers: Sequence[str], in_path: bool) -> str:
    """Return the smallest and the largest of the numbers; `*` for the indices of a path if some are missing."""
    ordered = sorted(dict.fromkeys(numbers), key=lambda number: float(number.replace(",", "")))
    if len(ordered) == 1:
        return ordered[0]
    if in_path and len(ordered) <= int(ordered[-1]) - int(ordered[0]):
        return "*"
    return f"{ordered[0]}–{ordered[-1]}"


class Note(str):
    """A finding as text. A measurement at a site has the parts of its text as fields; other notes have no `values`.

    `values` are numbers by column, the same columns for all notes of a `kind`; `form` is their format (`.1%`, `.3f`). The first
    column ranks the sites: `worst` is its worst end, lowest or highest.
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
    """A progress report that a log keeps, such as an evaluation; other reports are replaced by the next."""


def fold_notes(notes: Iterable[str]) -> list[str]:
    """Return the notes in order: a table for each kind measured at several sites; lines that differ only in numbers folded."""
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
    """Return notes of one kind in aligned columns: each site, or, for many, the median, the range and the worst ones."""
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


@contextlib.contextmanager
def reported_to(listener: Progress | None) -> Iterator[None]:
    """Within this context `listener` gets the progress of counted work."""
    token = LISTENER.set(listener)
    try:
        yield
    finally:
        LISTENER.reset(token)


def counted(items: Iterable[Item], what: str, total: int, done: int = 0) -> Iterator[Item]:
    """Yield the items, and report before each its number and an estimate: "layer 7 of 30, about 40 s left".

    They are some of `total`; `done` came before them.
    """
    listener, began = LISTENER.get(), time.monotonic()
    for index, item in enumerate(items):
        if listener is not None:
            left = time_left((time.monotonic() - began) / index * (total - done - index)) if index else ""
            listener(f"{what} {done + index + 1} of {total}{left}")
        yield item


def time_left(seconds: float) -> str:
    """Return an estimate in words; "" if little is left."""
    if seconds < LONG:
        return ""
    return f", about {f'{seconds / 60:.0f} min' if seconds >= 90 else f'{round(seconds / 5) * 5} s'} left"


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], what: str, size: int, *, done: int = 0, total: int | None = None
) -> list[Result]:
    """Return `work(item)` for each of the items, processed in parallel and counted; torch's threads are divided among them.

    If the items are some of `total`, `done` came before them.

    `work` needs `size` bytes per item, uses no random generator but its own, and changes nothing that the work on another item
    reads. Gradients are recorded only where `work` enables them.
    """
    import torch  # deferred, so that --help does not import torch

    threads = torch.get_num_threads()
    workers, total = max(1, min(threads, len(items), ROOM // max(1, size))), len(items) if total is None else total
    if workers == 1:
        return [work(item) for item in counted(items, what, total, done)]

    def alone(item: Item) -> Result:
        with torch.no_grad():
            return work(item)

    each = threads // workers
    torch.set_num_threads(each)  # for this thread, and for those started later
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(each,))
    try:
        waiting = [pool.submit(contextvars.copy_context().run, alone, item) for item in items]
        return [future.result() for future in counted(waiting, what, total, done)]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
