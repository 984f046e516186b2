"""The installed passes, and specs: passes as text."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from retrofit.errors import SpecError
from retrofit.pipeline.protocol import AnyPass, Pass, Recipe

GROUP = "retrofit.passes"


def parse_spec(text: str) -> AnyPass:
    """The pass that `text` names, `altup` or `altup(k=2, init=hop)`."""
    if not isinstance(text, str):
        raise SpecError(f"{text!r} is no pass", remedy="give a pass, or its spec: altup(k=2)")
    return make_pass(*split_spec(text))


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """The name in a spec, and the texts of its options; raises `SpecError` where it cannot be read."""
    match = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise SpecError(f"cannot read the pass {text!r}", remedy="write it as name(option=value, …), e.g. altup(k=2)")
    name, inside = match.group(1), match.group(2) or ""
    options: dict[str, str] = {}
    for item in filter(str.strip, inside.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            remedy = "name one pass at a time, on a line of its own" if ")" in inside else "write options as option=value"
            raise SpecError(f"{name}: cannot read {item.strip()!r}", remedy=remedy)
        if key.strip() in options:
            raise SpecError(f"{name}: option {key.strip()} is given twice", remedy="give it once")
        options[key.strip()] = value.strip()
    return name, options


def make_pass(name: str, options: Mapping[str, Any]) -> AnyPass:
    """The registered pass `name` with `options`; an unknown name or option raises `SpecError` that lists the known ones."""
    return load_pass(name)(**{key.replace("-", "_"): value for key, value in options.items()})


def pass_names() -> list[str]:
    """The names of the passes installed, without importing them."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def load_pass(name: str) -> type[AnyPass]:
    """The class of the pass installed as `name`, else of an imported one of that name."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            kind = entry.load()
            if not (isinstance(kind, type) and issubclass(kind, Pass)):
                raise SpecError(
                    f"the entry point {name!r} is not a retrofit pass",
                    why=f"it is {kind!r}",
                    remedy="name a subclass of Pass there",
                )
            return kind
    imported = next((kind for kind in subclasses(Pass) if getattr(kind, "name", None) == name), None)
    if imported is not None:
        return imported
    raise SpecError(f"there is no pass called {name!r}", remedy=f"choose one of {', '.join(pass_names())}")


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Every class derived from `kind` that has been imported."""
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def as_pass(given: AnyPass | str) -> AnyPass:
    """A pass from a pass or from its spec."""
    return given if isinstance(given, Pass) else parse_spec(given)


def parse_recipe(specs: Iterable[str]) -> Recipe:
    """The recipe of a list of specs."""
    return tuple(parse_spec(spec) for spec in specs)
