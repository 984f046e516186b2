"""The checks by name, in the order of the report.

A check is a module with two functions. `measure(subject, before, context)` measures a model: the dense one, where there is neither
`before` nor `context`, and the one under verification, where `before` is what it measured on the dense model. It returns a small
frozen dataclass, or None where there is nothing to measure. `judge(now, before, context)` compares the two and runs the model only
to locate the cause of a failure. One may also `watch(subject, context)` the first forward on the inputs instead of making one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Protocol

from retrofit.checks import cache, causality, cost, function, gradients, graph, method, onnx, padding, parameters, round_trip
from retrofit.checks.context import Context
from retrofit.checks.finding import Finding
from retrofit.checks.subject import Subject, Watch
from retrofit.errors import RetrofitError


class Check(Protocol):
    """One way to find a defect in a rewritten model."""

    def measure(self, subject: Subject, before: Any = None, context: Context | None = None) -> Any: ...

    def judge(self, now: Any, before: Any, context: Context) -> Finding: ...


CHECKS: dict[str, Check] = {
    "graph": graph,
    "parameters": parameters,
    "function": function,
    "method": method,
    "causality": causality,
    "padding": padding,
    "cache": cache,
    "gradients": gradients,
    "round trip": round_trip,
    "cost": cost,
}


ON_REQUEST: dict[str, Check] = {"onnx": onnx}  # each costs more than all the others together
QUICK = ("graph", "function", "round trip")  # what a rewrite that went wrong fails first
SETS = {"all": tuple(CHECKS), "quick": QUICK}


def named_checks(checks: str | Collection[str]) -> tuple[str, ...]:
    """Return the names of a set of checks, of one check or of several; raise `RetrofitError` for one that does not exist."""
    names = SETS.get(checks, (checks,)) if isinstance(checks, str) else tuple(checks)
    for name in names:
        if name not in CHECKS and name not in ON_REQUEST:
            choices = ", ".join([*SETS, *CHECKS, *ON_REQUEST])
            raise RetrofitError(f"there is no check called {name!r}", remedy=f"choose among {choices}", option="checks")
    return names


def watches(subject: Subject, context: Context | None = None, names: Collection[str] = tuple(CHECKS)) -> dict[str, Watch]:
    """What each of the named checks wants to see of the first forward on the inputs."""
    watching = {name: getattr(CHECKS[name], "watch", None) for name in names if name in CHECKS}
    return {name: functools.partial(watch, subject, context) for name, watch in watching.items() if watch is not None}
