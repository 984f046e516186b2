"""The options of a pass: dataclass fields with documentation, choices and ranges; conversion of their values to and from text."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from retrofit.errors import SpecError

if TYPE_CHECKING:
    from retrofit.anatomy import Anatomy
    from retrofit.anatomy.parts import Stack


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    depths: bool = False,
    weights: Literal["divides", "within"] | None = None,
) -> Any:
    """Return a field of a pass: its default, one line of documentation, and the accepted values.

    `depths`: its text names depths: `0-5+8`, `all`, or the default. `weights` is its relation to the sizes of weights: it divides
    one, or is at most one. If that holds for no weight, the model is refused before it is captured.
    """
    given = {"choices": choices, "minimum": minimum, "maximum": maximum, "depths": depths, "weights": weights}
    return dataclasses.field(default=default, metadata={"doc": doc, **given})


def format_value(value: Any) -> str:
    """Return the text of an option's value in a spec."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "+".join(str(item) for item in value)
    return "none" if value is None else str(value)


def require_options(owner: type[Any], given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises `SpecError` if an option, given by position or name, is unknown or given twice."""
    known = [field.name for field in dataclasses.fields(owner)]
    remedy = f"options: {', '.join(known)} (see: retrofit passes {owner.name})" if known else "drop it: the pass has no options"
    if len(given) > len(known):
        raise SpecError(f"{owner.name}: {given[len(known)]!r} is one value too many", remedy=remedy, code="unknown-option")
    unknown = next((name for name in named if name not in known), None)
    if unknown is not None:
        raise SpecError(f"{owner.name}: unknown option {unknown!r}", remedy=remedy, option=unknown, code="unknown-option")
    twice = next((name for name in known[: len(given)] if name in named), None)
    if twice is not None:
        raise SpecError(f"{owner.name}: option {twice} is given twice", remedy="give it once", option=twice, code="twice")


def check_option(owner: type[Any], field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of a field, converted if it is text. Raises `SpecError` if it is not accepted."""
    hint = typing.get_type_hints(owner)[field.name]
    accepted, optional = accepted_types(hint), type(None) in typing.get_args(hint)
    if isinstance(value, str) and value.lower() in ("none", "") and optional:
        value = None
    if value is None and optional:
        return None
    for kind in accepted:
        converted = convert(kind, value)
        if converted is not None:
            value = converted
            break
    else:
        raise SpecError(
            f"{owner.name}: option {field.name}={value!r} is not {describe(accepted)}",
            remedy=f"use {in_range(accepted, field)}: {field.metadata.get('doc', '')}",
            option=field.name,
            code="type",
        )
    choices = field.metadata.get("choices") or ()
    if choices and value not in choices:
        raise SpecError(
            f"{owner.name}: option {field.name}={value} is not one of {', '.join(choices)}",
            remedy=f"choose one of {', '.join(choices)}",
            option=field.name,
            code="choice",
        )
    minimum = field.metadata.get("minimum")
    if minimum is not None and isinstance(value, (int, float)) and value < minimum:
        raise SpecError(
            f"{owner.name}: option {field.name}={value} is below {minimum}",
            remedy=f"use at least {minimum}",
            option=field.name,
            code="range",
        )
    maximum = field.metadata.get("maximum")
    if maximum is not None and isinstance(value, (int, float)) and value > maximum:
        raise SpecError(
            f"{owner.name}: option {field.name}={value:g} is above {maximum}",
            remedy=f"use at most {maximum}",
            option=field.name,
            code="range",
        )
    return value


def accepted_types(hint: Any) -> list[Any]:
    """Return the types in an option's type hint, without None."""
    if typing.get_origin(hint) is tuple:
        return [tuple]
    return [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)]


def describe(kinds: list[Any]) -> str:
    """Return the accepted types in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", tuple: "a list a+b+c"}
    return " or ".join(words.get(kind, str(kind)) for kind in kinds)


def in_range(kinds: list[Any], field: dataclasses.Field[Any]) -> str:
    """Return the accepted types in words, with their range."""
    minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
    if maximum is not None:
        return f"{describe(kinds)} from {minimum or 0:g} to {maximum:g}"
    return describe(kinds) + (f" ≥ {minimum:g}" if minimum is not None else "")


def convert(kind: Any, value: Any) -> Any:
    """Return `value` as `kind`; None if it cannot be converted."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "false": False, "yes": True, "no": False}.get(str(value).lower())
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        try:
            return int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value) else None
        except ValueError:  # more digits than Python accepts
            return None
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            return None
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None
    if kind is tuple:
        return tuple(value) if isinstance(value, (tuple, list)) else tuple(str(value).split("+"))
    return value if isinstance(value, str) else None


def options_of(kind: type[Any]) -> Iterator[tuple[str, str, Any, str]]:
    """Yield each option of a pass: name, accepted values, default, documentation."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        accepted = accepted_types(hints[field.name])
        values = "|".join(field.metadata.get("choices") or ()) or in_range(accepted, field)
        yield field.name, values, field.default, field.metadata["doc"]


DEPTHS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def selected_depths(text: str, count: int, owner: str, deepest: int = 0) -> set[int]:
    """Return the depths that `text` names among `count` layers, as in `0-5+8` or `all`. Raises `SpecError`, naming `owner`.

    A depth between `count` and `deepest` (the layers of the deepest stack) exists in another stack only and is ignored here.
    """
    there = max(count, deepest)
    if text == "all":
        return set(range(count))
    chosen: set[int] = set()
    for first, last in depth_ranges(text, owner):
        if max(first, last) >= there:  # before the depths are listed: a range may exceed the memory
            raise SpecError(
                f"{owner}: layers={text} names depth {max(first, last)}",
                why=f"the {'deepest ' if there > count else ''}stack has depths 0 to {there - 1}",
                remedy="use depths in that range",
                option="layers",
                code="range",
            )
        if last < first:
            raise SpecError(
                f"{owner}: layers={text} has the empty range {first}-{last}",
                remedy=f"write {last}-{first}",
                option="layers",
                code="range",
            )
        chosen.update(range(first, min(last + 1, count)))
    return chosen


def selected_layers(anatomy: Anatomy, layers: str, owner: str, stacks: str = "all") -> Iterator[tuple[Stack, int]]:
    """Yield the stacks of a kind, or all, each with the depths that `layers` names, in order."""
    for stack in anatomy.stacks:
        if stacks in ("all", stack.kind):
            for depth in sorted(selected_depths(layers, len(stack.layers), owner, anatomy.deepest(stacks))):
                yield stack, depth


def depth_ranges(text: str, owner: str, option: str = "layers") -> list[tuple[int, int]]:
    """Return the first and last number of each part of `text`, as in `0-5+8`. Raises `SpecError` if it is malformed."""
    found: list[tuple[int, int]] = []
    for part in text.split("+"):
        named = DEPTHS.fullmatch(part)
        if named is None:
            what, example = ("depths", "0-5+8") if option == "layers" else ("numbers", "2-3")
            raise SpecError(
                f"{owner}: cannot read {option}={text}",
                remedy=f"use {what} and ranges joined by +, e.g. {example}",
                option=option,
                code="unreadable",
            )
        found.append((int(named[1]), int(named[2] or named[1])))
    return found
