"""What passes did to a model or would do to it, as rows of a table that stays short however many layers there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from retrofit.anatomy.wording import format_change, plural
from retrofit.runtime.line_folding import fold_lines
from retrofit.runtime.notes import fold_notes

if TYPE_CHECKING:
    from retrofit.anatomy.sites import NearMiss, Site
    from retrofit.pipeline.protocol import Rewrite
    from retrofit.planning import PlannedPass, RecipePlan

Cells = tuple[str, str]

MOST = 8  # lines of one kind
TERMS = re.compile(r"(?<=\d) \+ (?=[\w.]+[:,] )")  # of a formula with a term for each module: `a.0: d = 6 + a.1: d = 6`


def rewrite_rows(rewrite: Rewrite) -> list[Cells]:
    """What one pass did."""
    return [
        ("recipe", rewrite.spec),
        ("rewritten", f"{plural(len(rewrite.sites), 'site')}, {promise(rewrite.exact)}"),
        *listed("", rewritten_lines(rewrite.sites)),
        *listed("left alone", untouched_lines(rewrite.skipped)),
        *note_rows(rewrite.notes),
    ]


def plan_rows(plan: RecipePlan) -> list[Cells]:
    """What passes would do, and parameters and FLOPs before and after."""
    after = "unknown until it is applied" if plan.flops_after is None else format_change(plan.flops_before, plan.flops_after)
    return [
        *(row for one in plan.passes for row in planned_pass_rows(one)),
        ("parameters", format_change(plan.parameters_before, plan.parameters_after)),
        ("FLOPs per token", after),
    ]


def planned_pass_rows(planned: PlannedPass) -> list[Cells]:
    """What one pass would do."""
    plan = planned.plan
    would = f"{plural(len(plan.sites), 'site')}, {promise(planned.exact)}" if planned.fits else "nothing: apply would refuse it"
    rows = [
        ("recipe", planned.spec),
        ("would rewrite", would),
        *listed("", rewritten_lines(plan.sites)),
        *listed("leaves alone", untouched_lines(plan.near_misses)),
    ]
    if planned.fits:
        formula = " + ".join(fold_lines(TERMS.split(plan.formula)))
        rows.append(("adds", f"{plural(plan.new_parameters, 'parameter')}{f': {formula}' if formula else ''}"))
    return [*rows, *note_rows(plan.notes)]


def promise(exact: bool) -> str:
    return "the same function at step 0" if exact else "approximate at step 0"


def rewritten_lines(sites: Sequence[Site]) -> list[str]:
    return [f"{site.name or 'the model'}: {site.what}" for site in sites]


def untouched_lines(near_misses: Sequence[NearMiss]) -> list[str]:
    """Each place, the reason and the remedy where there is one."""
    return [
        f"{miss.name or 'the model'}: {miss.why}" + (f"\n  way out: {miss.remedy}" if miss.remedy else "") for miss in near_misses
    ]


def note_rows(notes: Iterable[str]) -> list[Cells]:
    """What was found on the way: a table for each kind of measurement, other notes folded as lines."""
    return shortened("notes", fold_notes(notes))


def listed(title: str, lines: Iterable[str]) -> list[Cells]:
    """The lines as rows under one title, those of one kind folded."""
    return shortened(title, fold_lines(lines))


def shortened(title: str, folded: list[str]) -> list[Cells]:
    """The texts as rows under one title, at most `MOST`, with how many were left out."""
    left_out = [f"and {len(folded) - MOST:,} more"] if len(folded) > MOST else []
    return [("" if number else title, text) for number, text in enumerate([*folded[:MOST], *left_out])]
