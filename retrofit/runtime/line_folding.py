"""Lines that say one thing about many places, folded into one line that counts them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

FEWEST = 3  # lines worth folding
NUMBER = re.compile(r"(?<=[._A-Za-z])\d+|\d+(?:,\d{3})*(?:\.\d+)?")  # `layers.0.1` holds two, `1,000.5` one


def one_line(text: str) -> str:
    """The text with its line breaks written out: a name from a file begins no line of ours."""
    return text.replace("\n", "\\n")


def fold_lines(lines: Iterable[str]) -> list[str]:
    """The lines in order, those that differ in their numbers only as one, with their count and the range of each number.

    `h.0: kept 91%`, `h.1: kept 95%`, `h.2: kept 93%` become `3 × h.0–2: kept 91–95%`.
    """
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(NUMBER.sub("\0", line), []).append(line)
    return [text for group in groups.values() for text in ([f"{len(group)} × {merge(group)}"] if len(group) >= FEWEST else group)]


def merge(group: Sequence[str]) -> str:
    """One text for lines that differ in their numbers only."""
    between = NUMBER.split(group[0])
    merged = between[0]
    for numbers, text in zip(zip(*map(NUMBER.findall, group), strict=True), between[1:], strict=True):
        merged += number_range(numbers, in_path=merged.endswith((".", "_")) and text[:1] in (".", "_", ":", "")) + text
    return merged


def number_range(numbers: Sequence[str], in_path: bool) -> str:
    """The smallest and the largest of the numbers; `*` for the indices of a module path between which some are missing."""
    ordered = sorted(dict.fromkeys(numbers), key=lambda number: float(number.replace(",", "")))
    if len(ordered) == 1:
        return ordered[0]
    if in_path and len(ordered) <= int(ordered[-1]) - int(ordered[0]):
        return "*"
    return f"{ordered[0]}–{ordered[-1]}"
