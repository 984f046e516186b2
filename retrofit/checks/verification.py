"""`verify`: a report on a model, one check at a time; a check that cannot be made to work has failed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from retrofit.checks import cache, causality, cost, function, gradients, graph, onnx, padding, parameters, round_trip
from retrofit.checks.reference import Reference
from retrofit.checks.subject import Subject
from retrofit.checks.tracing import trace
from retrofit.errors import RetrofitError
from retrofit.pipeline.protocol import Rewrite
from retrofit.pipeline.replaying import recipe, rewrites
from retrofit.program.capture import Program
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.outcomes import Finding, Status, attempted
from retrofit.runtime.state_preservation import preserve_state
from retrofit.surgery.edit import Fate

CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "graph": graph.check,
    "parameters": parameters.check,
    "function": function.check,
    "causality": causality.check,
    "padding": padding.check,
    "cache": cache.check,
    "gradients": gradients.check,
    "round trip": round_trip.check,
    "cost": cost.check,
}
ON_REQUEST: dict[str, Callable[[Subject], Finding]] = {"onnx": onnx.check}  # each costs more than all the others together


@dataclasses.dataclass(frozen=True)
class Check:
    """One check as it came out."""

    name: str
    status: Status
    measured: str
    why: str  # the site or parameter to blame, or the reason it was skipped
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """How a model came through its checks."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def __getitem__(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines.append(f"{check.name:<{width}}  {check.status:<7}  {check.seconds:5.1f}s  {check.measured}".rstrip())
            lines.extend(f"{'':<{width}}    {part}" for part in check.why.split("\n") if part)
        counts = {status: sum(check.status == status for check in self.checks) for status in ("passed", "failed", "skipped")}
        return "\n".join([*lines, ", ".join(f"{count} {status}" for status, count in counts.items() if count)])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for `json`."""
        return {"ok": self.ok, "checks": [dataclasses.asdict(check) for check in self.checks]}


def verify(
    model: nn.Module,
    reference: nn.Module | Reference | None = None,
    example_inputs: Any = None,
    *,
    checks: Collection[str] = tuple(CHECKS),
) -> Report:
    """How `model` comes through its checks; `reference` is the dense model it was made from, or what is remembered of it.

    Without a reference the model is held to its own promises only. It is left as it was. Raises `RetrofitError` where there is
    nothing to run: a model on the meta device, one whose inputs cannot be derived, a check that does not exist. The check `onnx` is
    made only where `checks` names it.
    """
    at_the_door(model, checks)
    given = reference.inputs if example_inputs is None and isinstance(reference, Reference) else example_inputs
    inputs = named_inputs(model, given)
    dense = reference if isinstance(reference, nn.Module) else None
    if isinstance(reference, nn.Module):
        at_the_door(reference)
        reference = Reference.of(reference, inputs)
    made = rewrites(model)
    exact = all(one.exact for one in (made if made is not None else recipe(model) or ()))
    fates = trace(reference.parameters, model) if reference is not None else {}
    return report_on(Subject(model, inputs, reference, made, fates, exact, dense=dense), checks)


def verify_onnx(path: str | Path, model: nn.Module, example_inputs: Any = None) -> Report:
    """How an ONNX file comes through the check `onnx`: whether it computes what `model`, or its part that the file is, does."""
    at_the_door(model)
    subject = Subject(model, named_inputs(model, example_inputs), None, None, {}, True)
    return Report((make("onnx", functools.partial(onnx.check_file, Path(path)), subject),))


def check_rewrite(
    model: nn.Module,
    reference: Reference,
    rewrites: tuple[Rewrite, ...],
    fates: Mapping[str, Fate],
    example_inputs: Any = None,
    *,
    program: Program | None = None,
    checks: Collection[str] = tuple(CHECKS),
) -> Report:
    """How a model just rewritten comes through its checks, its dense parameters being where `fates` says.

    A `program` captured since the rewriting spares a capture.
    """
    at_the_door(model, checks)
    inputs = named_inputs(model, reference.inputs if example_inputs is None else example_inputs)
    exact = all(one.exact for one in rewrites)
    return report_on(Subject(model, inputs, reference, rewrites, dict(fates), exact, program), checks)


def at_the_door(model: nn.Module, checks: Collection[str] = ()) -> None:
    """The model has weights to run with, and the checks exist."""
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise RetrofitError(
            f"{type(model).__name__} cannot be verified",
            why=f"{empty} has no values: it is on the meta device",
            remedy="load its weights first",
        )
    unknown = [name for name in checks if name not in CHECKS and name not in ON_REQUEST]
    if unknown:
        raise RetrofitError(f"there is no check called {unknown[0]!r}", remedy=f"choose among {', '.join([*CHECKS, *ON_REQUEST])}")


def report_on(subject: Subject, checks: Collection[str]) -> Report:
    """Each of the checks has been made, whatever became of the others."""
    return Report(tuple(make(name, check, subject) for name, check in (CHECKS | ON_REQUEST).items() if name in checks))


def make(name: str, check: Callable[[Subject], Finding], subject: Subject) -> Check:
    """One check on an undisturbed model; one that raises has failed with what it raised."""
    start = time.perf_counter()
    with preserve_state(subject.model):
        finding = attempted(check, subject)
    return Check(name, finding.status, finding.measured, finding.why, time.perf_counter() - start)
