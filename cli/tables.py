"""Columns of text and numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(rows: Iterable[Sequence[str]]) -> str:
    """The rows with every cell but the last padded to its column's width."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in table), strict=True)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in table
    )


def change(before: int, after: int) -> str:
    """A count before and after, and by how much it grew."""
    percent = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{before:,} → {after:,}{percent}"
