"""Layers of a stack by depth, as the option `layers` names them: `0-5+8`."""

from __future__ import annotations

import re

from retrofit.errors import SpecError

DEPTHS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def selected_depths(text: str, count: int, owner: str, deepest: int = 0) -> set[int]:
    """The depths that `0-5+8` names among `count` layers; `all` names all. Raises `SpecError` in the name of the pass `owner`.

    A depth that only another stack has, of up to `deepest` layers, names nothing here.
    """
    there = max(count, deepest)
    if text == "all":
        return set(range(count))
    chosen: set[int] = set()
    for first, last in depth_ranges(text, owner):
        if max(first, last) >= there:  # before any depth is listed: a range may be longer than memory
            raise SpecError(
                f"{owner}: layers={text} names depth {max(first, last)}",
                why=f"the {'deepest ' if there > count else ''}stack has depths 0 to {there - 1}",
                remedy="name depths that it has",
            )
        if last < first:
            raise SpecError(f"{owner}: layers={text} names no depth with {first}-{last}", remedy=f"write it {last}-{first}")
        chosen.update(range(first, min(last + 1, count)))
    return chosen


def depth_ranges(text: str, owner: str) -> list[tuple[int, int]]:
    """The first and the last depth of each part of `0-5+8`; raises `SpecError` where it cannot be read."""
    found: list[tuple[int, int]] = []
    for part in text.split("+"):
        named = DEPTHS.fullmatch(part)
        if named is None:
            raise SpecError(f"{owner}: cannot read layers={text}", remedy="name depths and ranges joined by +, e.g. 0-5+8")
        found.append((int(named[1]), int(named[2] or named[1])))
    return found
