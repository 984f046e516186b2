"""Targets of a plan: `decode 1.5x`, `loss +0.05`, or several at once, `decode 1.3x, memory 0.9x`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from typing import Literal

from retrofit.errors import PlanningError

Kind = Literal["speed", "share", "added"]


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity with a limit: a speed or a share, relative to the dense model's, or an amount added to it."""

    name: str
    kind: Kind
    what: str
    example: str


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("decode", "speed", "the speed of decoding, one token at a time", "decode 1.5x"),
        Quantity("prefill", "speed", "the speed of a forward of whole windows", "prefill 1.2x"),
        Quantity("train", "share", "the time of a training step", "train 0.8x"),
        Quantity("memory", "share", "the bytes of the weights", "memory 0.7x"),
        Quantity("loss", "added", "the loss, in nats a token", "loss +0.05"),
        Quantity("error", "added", "the relative error of outputs that are not logits", "error +0.1"),
    )
}
COSTS = ("decode", "prefill", "train", "memory")  # the others are qualities
READABLE = (
    "write "
    + ", ".join(f'"{quantity.example}"' for quantity in QUANTITIES.values())
    + '; several as one: "decode 1.3x, memory 0.9x"'
)
PART = re.compile(r"([A-Za-z]+)\s*([+-]?)(\d+(?:\.\d*)?|\.\d+|inf|nan)\s*(x?)", re.ASCII | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Limit:
    """One quantity and the least speed, or the most of anything else, allowed."""

    quantity: str
    value: float

    @property
    def most(self) -> float:
        """Return the largest allowed share of the dense model's cost, or the largest allowed increase."""
        return 1.0 / self.value if QUANTITIES[self.quantity].kind == "speed" else self.value

    def __str__(self) -> str:
        added = QUANTITIES[self.quantity].kind == "added"
        return f"{self.quantity} +{self.value:g}" if added else f"{self.quantity} {self.value:g}x"


@dataclasses.dataclass(frozen=True)
class Target:
    """Limits that one plan has to keep."""

    limits: tuple[Limit, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))

    @property
    def costs(self) -> dict[str, float]:
        """Return the upper bound of each limited cost, as a share of the dense model's."""
        return {limit.quantity: limit.most for limit in self.limits if limit.quantity in COSTS}

    @property
    def quality(self) -> Limit | None:
        """Return the limit on the loss or error, if there is one."""
        return next((limit for limit in self.limits if limit.quantity not in COSTS), None)


def parse_target(text: str) -> Target:
    """Return the target in a text. Raises `PlanningError` if it cannot be parsed or asks for nothing."""
    limits = [parse_limit(part.strip(), text) for part in text.split(",")]
    names = [limit.quantity for limit in limits]
    for name in names:
        if names.count(name) > 1:
            raise PlanningError(
                f"the target {text!r} limits {name} twice", remedy="limit it once, or use two --target", code="twice"
            )
    if len({"loss", "error"} & set(names)) > 1:
        raise PlanningError(
            f"the target {text!r} limits both loss and error",
            remedy="limit one: error is for outputs that are not logits",
            code="combination",
        )
    return Target(tuple(limits))


def parse_limit(part: str, text: str) -> Limit:
    """Return one limit of a target."""
    match = PART.fullmatch(part)
    if match is None:
        raise PlanningError(f"cannot read the target {text!r}", remedy=READABLE, code="unreadable")
    name, sign, number, times = match[1].lower(), match[2], match[3], match[4]
    if name not in QUANTITIES:
        near = difflib.get_close_matches(name, QUANTITIES, n=1)
        remedy = f"did you mean {near[0]}? otherwise {READABLE}" if near else READABLE
        raise PlanningError(f"the target {text!r}: unknown quantity {match[1]!r}", remedy=remedy, code="unreadable")
    quantity, value = QUANTITIES[name], float(sign + number)
    if bool(times) != (quantity.kind != "added"):
        unit = "an added amount" if quantity.kind == "added" else "in times the dense model's"
        raise PlanningError(
            f"cannot read the target {text!r}",
            why=f"{name} is {unit}",
            remedy=f'write it as "{quantity.example}"',
            code="unreadable",
        )
    if not (math.isfinite(value) and value > 0):
        raise PlanningError(
            f"the target {text!r} cannot be reached",
            why=f"{quantity.what} is above zero",
            remedy=f'write it as "{quantity.example}"',
            code="out-of-reach",
        )
    if (quantity.kind == "speed" and value <= 1) or (quantity.kind == "share" and value >= 1):
        which = "above 1x" if quantity.kind == "speed" else "below 1x"
        raise PlanningError(
            f"the target {text!r} changes nothing",
            why="the dense model has 1x",
            remedy=f'give {which}, as in "{quantity.example}"',
            code="no-effect",
        )
    return Limit(name, value)


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets of several texts, each once. Raises `PlanningError` if there is none."""
    if not texts:
        raise PlanningError("no target given", remedy=READABLE, code="missing")
    return tuple(dict.fromkeys(parse_target(text) for text in texts))
