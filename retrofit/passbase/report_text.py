"""Rows of a report on the actual or planned changes of passes; short for any number of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from retrofit.anatomy import plural
from retrofit.progress import fold_lines, fold_notes, one_line

if TYPE_CHECKING:
    from retrofit.anatomy.parts import NearMiss, Site
    from retrofit.passbase.protocol import Plan, Rewrite


Cells = tuple[str, str]

MOST = 8  # lines of each kind
TERMS = re.compile(r"(?<=\d) \+ (?=[\w.]+[:,] )")  # of a formula with a term per module: `a.0: d = 6 + a.1: d = 6`


def rewrite_rows(rewrite: Rewrite) -> list[Cells]:
    """Return the rows on the changes that one pass made."""
    return [
        ("recipe", rewrite.spec),
        ("rewritten", f"{plural(len(rewrite.sites), 'site')}, {promise(rewrite.exact)}"),
        *listed("", rewritten_lines(rewrite.sites)),
        *listed("left alone", untouched_lines(rewrite.skipped)),
        *note_rows(rewrite.notes),
    ]


def plan_rows(spec: str, exact: bool, plan: Plan) -> list[Cells]:
    """Return the rows on the changes that one pass would make."""
    fits = bool(plan.sites)
    would = f"{plural(len(plan.sites), 'site')}, {promise(exact)}" if fits else "no site: apply would refuse it"
    rows = [
        ("recipe", spec),
        ("would rewrite", would),
        *listed("", rewritten_lines(plan.sites)),
        *listed("leaves alone", untouched_lines(plan.near_misses)),
    ]
    if fits:
        formula = " + ".join(fold_lines(TERMS.split(plan.formula)))
        rows.append(("adds", f"{plural(plan.new_parameters, 'parameter')}{f': {formula}' if formula else ''}"))
    return [*rows, *note_rows(plan.notes)]


def separated(reports: Iterable[list[Cells]]) -> list[Cells]:
    """Return the rows of several passes, separated by empty rows."""
    each = list(reports)
    gap = [("", "")] if len(each) > 1 else []
    return [row for rows in each for row in (*rows, *gap)]


def promise(exact: bool) -> str:
    return "the same function at step 0" if exact else "approximate at step 0"


def rewritten_lines(sites: Sequence[Site]) -> list[str]:
    return [one_line(f"{site.name or 'the model'}: {site.what}") for site in sites]


def untouched_lines(near_misses: Sequence[NearMiss]) -> list[str]:
    """Return a line for each near miss: place, reason and fix, if there is one."""
    return [
        one_line(f"{miss.name or 'the model'}: {miss.why}") + (f"\n  fix: {one_line(miss.remedy)}" if miss.remedy else "")
        for miss in near_misses
    ]


def note_rows(notes: Iterable[str]) -> list[Cells]:
    """Return the rows on the notes: one table for each kind of measurement; similar other notes are folded."""
    return shortened("notes", fold_notes(notes))


def listed(title: str, lines: Iterable[str]) -> list[Cells]:
    """Return the lines as rows under one title, similar ones folded."""
    return shortened(title, fold_lines(lines))


def shortened(title: str, folded: list[str]) -> list[Cells]:
    """Return the texts as rows under one title, one row a line: at most `MOST` texts, and the number of omitted ones."""
    left_out = [f"and {len(folded) - MOST:,} more"] if len(folded) > MOST else []
    lines = [line for text in [*folded[:MOST], *left_out] for line in text.split("\n")]
    return [("" if number else title, line) for number, line in enumerate(lines)]


def aligned(rows: Sequence[Cells]) -> str:
    """Return the rows as text in two columns; the further lines of a cell stay in its column."""
    width = max(len(title) for title, _ in rows)
    lines = [(title if not number else "", line) for title, cell in rows for number, line in enumerate(cell.split("\n"))]
    return "\n".join(f"{title:<{width}}  {line}".rstrip() for title, line in lines)
