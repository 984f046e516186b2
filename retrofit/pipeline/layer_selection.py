"""Layers of a stack by depth, as the option `layers` names them: `0-5+8`."""

from __future__ import annotations

from retrofit.errors import SpecError


def selected_depths(text: str, count: int, owner: str) -> set[int]:
    """The depths that `0-5+8` names among `count` layers; `all` names all. Raises `SpecError` in the name of the pass `owner`."""
    if text == "all":
        return set(range(count))
    chosen: set[int] = set()
    for part in text.split("+"):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise SpecError(f"{owner}: cannot read layers={text}", remedy="name depths and ranges joined by +, e.g. 0-5+8")
        chosen.update(range(int(first), int(last or first) + 1))
    if max(chosen, default=-1) >= count:
        raise SpecError(
            f"{owner}: layers={text} names depth {max(chosen)}",
            why=f"the stack has depths 0 to {count - 1}",
            remedy="name depths that it has",
        )
    return chosen
