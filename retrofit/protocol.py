"""What a pass is: a frozen dataclass of hyperparameters that reads and writes as text, and rewrites a model.

A spec is a pass as text, `altup(k=2, embedding=recycled)`. A recipe is the sequence of specs a model has been through.
Passes register under the entry-point group `retrofit.passes`; this module imports none of them.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.metadata
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from retrofit.errors import SpecError

if TYPE_CHECKING:
    from retrofit.anatomy import Anatomy
    from retrofit.edit import Edit

GROUP = "retrofit.passes"


def option(default: Any, doc: str, *, choices: tuple[str, ...] = (), minimum: float | None = None) -> Any:
    """A field of a pass: its default, one line of documentation, and the values it admits."""
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices, "minimum": minimum})


@dataclasses.dataclass(frozen=True)
class Site:
    """One place a pass rewrote: the module that owns it and what happened there."""

    name: str
    what: str


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """One place a pass looked at and left alone, and why."""

    name: str
    why: str


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What one pass did to a model."""

    spec: str  # by which it is done again on the model without weights
    exact: bool
    sites: tuple[Site, ...]
    skipped: tuple[NearMiss, ...] = ()
    new_parameters: int = 0  # by the method's formula, not by counting
    superseded: int = 0  # elements that earlier passes added and this one took out again
    formula: str = ""  # that formula with its numbers filled in
    second_step: tuple[str, ...] = ()  # parameters whose gradient is zero until others have moved
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """A method with its hyperparameters; subclasses are frozen dataclasses that declare their fields with `option`."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one sentence
    paper: ClassVar[str]
    calibrates: ClassVar[bool] = False  # whether it makes use of calibration data

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, check_option(type(self), field, value))

    @property
    @abc.abstractmethod
    def exact(self) -> bool:
        """Whether the rewritten model computes the dense model's function at step 0."""

    @abc.abstractmethod
    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        """The model that `anatomy` describes is rewritten through `edit`; raises `DoesNotFitError` and says why."""

    def spec(self) -> str:
        """The pass as text, every field written out: a saved recipe means the same when a default changes."""
        fields = (f"{field.name}={format_value(getattr(self, field.name))}" for field in dataclasses.fields(self))
        return f"{self.name}({', '.join(fields)})"


Recipe = tuple[Pass, ...]


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "+".join(str(item) for item in value)
    return "none" if value is None else str(value)


def check_option(owner: type[Pass], field: dataclasses.Field[Any], value: Any) -> Any:
    """The value of a field, converted from text where it is text; raises `SpecError` where it cannot be."""
    hints = typing.get_type_hints(owner)[field.name]
    admitted = [hint for hint in (typing.get_args(hints) or (hints,)) if hint is not type(None)]
    if typing.get_origin(hints) is tuple:
        admitted = [tuple]
    optional = type(None) in typing.get_args(hints)
    if isinstance(value, str) and value.lower() in ("none", "") and optional:
        value = None
    if value is None and optional:
        return None
    for kind in admitted:
        converted = convert(kind, value)
        if converted is not None:
            value = converted
            break
    else:
        raise SpecError(
            f"{owner.name}: option {field.name}={value!r} is not {describe(admitted)}", remedy=field.metadata.get("doc", "")
        )
    choices = field.metadata.get("choices") or ()
    if choices and value not in choices:
        raise SpecError(
            f"{owner.name}: option {field.name}={value} is not one of {', '.join(choices)}",
            remedy=f"choose one of {', '.join(choices)}",
        )
    minimum = field.metadata.get("minimum")
    if minimum is not None and isinstance(value, (int, float)) and value < minimum:
        raise SpecError(f"{owner.name}: option {field.name}={value} is below {minimum}", remedy=f"give at least {minimum}")
    return value


def describe(kinds: list[Any]) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", tuple: "a list a+b+c"}
    return " or ".join(words.get(kind, str(kind)) for kind in kinds)


def convert(kind: Any, value: Any) -> Any:
    """`value` as `kind`, or None where it is no such thing."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "false": False, "yes": True, "no": False}.get(str(value).lower())
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value) else None
    if kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        try:
            return float(value) if isinstance(value, str) else None
        except ValueError:
            return None
    if kind is tuple:
        return tuple(value) if isinstance(value, (tuple, list)) else tuple(str(value).split("+"))
    return value if isinstance(value, str) else None


def parse_spec(text: str) -> Pass:
    """The pass that `text` names, `altup` or `altup(k=2, init=hop)`."""
    match = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise SpecError(f"cannot read the pass {text!r}", remedy="write it as name(option=value, …), e.g. altup(k=2)")
    name, inside = match.group(1), match.group(2) or ""
    options: dict[str, str] = {}
    for item in filter(str.strip, inside.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise SpecError(f"{name}: cannot read {item.strip()!r}", remedy="write options as option=value")
        options[key.strip()] = value.strip()
    return make_pass(name, options)


def make_pass(name: str, options: Mapping[str, Any]) -> Pass:
    """The registered pass `name` with `options`; an unknown name or option raises `SpecError` with what there is."""
    kind = load_pass(name)
    known = [field.name for field in dataclasses.fields(kind)]
    for key in options:
        if key.replace("-", "_") not in known:
            raise SpecError(
                f"{name}: unknown option {key!r}", remedy=f"its options are {', '.join(known)} (see: retrofit passes {name})"
            )
    return kind(**{key.replace("-", "_"): value for key, value in options.items()})


def pass_names() -> list[str]:
    """The names of the passes installed, without importing them."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def load_pass(name: str) -> type[Pass]:
    """The class of the pass registered as `name`."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            kind = entry.load()
            if not (isinstance(kind, type) and issubclass(kind, Pass)):
                raise SpecError(f"the entry point {name!r} is not a retrofit pass", why=f"it is {kind!r}")
            return kind
    raise SpecError(f"there is no pass called {name!r}", remedy=f"choose one of {', '.join(pass_names())}")


def as_pass(given: Pass | str) -> Pass:
    """A pass from a pass or from its spec."""
    return given if isinstance(given, Pass) else parse_spec(given)


def parse_recipe(specs: Iterable[str]) -> Recipe:
    """The recipe that a list of specs stands for."""
    return tuple(parse_spec(spec) for spec in specs)


def options_of(kind: type[Pass]) -> Iterator[tuple[str, str, Any, str]]:
    """Each option of a pass: name, values admitted, default, documentation."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        admitted = [item for item in (typing.get_args(hint) or (hint,)) if item is not type(None)]
        admitted = [tuple] if typing.get_origin(hint) is tuple else admitted
        values = "|".join(field.metadata.get("choices") or ()) or describe(admitted)
        minimum = field.metadata.get("minimum")
        yield field.name, values + (f" ≥ {minimum:g}" if minimum is not None else ""), field.default, field.metadata["doc"]
