"""Reads benchmarks/results/coverage.json: the next run continues from it where the results of earlier runs are gone."""

from __future__ import annotations

import re
from pathlib import Path

from sweeping import Row, cells_of, read_page

MIXERS, CHANNELS = ("self-attention", "cross-attention"), ("ffn", "moe")


def results_of(page: Path, cells: tuple[str, ...]) -> dict[str, Row]:
    """Results by architecture and pass, as the page shows them; `cells` are the columns of AltUp's table."""
    text = read_page(page)
    faults = dict(re.findall(r"^- `([^`]+)`: (.*)$", text, re.MULTILINE))
    results: dict[str, Row] = {}
    passes: list[str] = []  # of the table that is being read; none in AltUp's
    for line in text.splitlines():
        first, *values = cells_of(line) or [""]
        if first == "architecture":
            passes = values if results else []
        elif first.startswith("`") and len(values) == len(passes or cells):
            name = first.strip("`")
            row = results.setdefault(name, {})
            if passes:
                row.update({one: {"cell": value} for one, value in zip(passes, values, strict=True) if value != "—"})
            else:
                shown = dict(zip(cells, values, strict=True))
                row["altup"] = {"id": name, **shown, "transformer": is_transformer(shown["anatomy"]), "dense": faults.get(name, "")}
    return results


def is_transformer(anatomy: str) -> bool:
    """Whether a stack has attentions and feed-forwards, as the page shows stacks."""
    return any(names_one_of(MIXERS, stack) and names_one_of(CHANNELS, stack) for stack in anatomy.split("; "))


def names_one_of(roles: tuple[str, ...], stack: str) -> bool:
    return any(re.search(rf"\b{role}\b", stack) for role in roles)
