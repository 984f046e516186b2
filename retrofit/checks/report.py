"""The finding of a check (a status, the measurement, and the reason) and the report of all checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from retrofit.errors import RetrofitError, first_line

Status = Literal["passed", "failed", "skipped"]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A status, the measurement, and the cause of a failure or the reason for skipping."""

    status: Status
    measured: str = ""
    why: str = ""


def passed(measured: str, why: str = "") -> Finding:
    return Finding("passed", measured, why)


def failed(measured: str, why: str) -> Finding:
    return Finding("failed", measured, why)


def skipped(why: str, measured: str = "") -> Finding:
    return Finding("skipped", measured, why)


@dataclasses.dataclass(frozen=True)
class Raised:
    """The error that stopped a measurement, as text."""

    error: str


def attempt(action: Callable[..., Result], *arguments: Any) -> Result | Raised:
    """Return the action's result, or the error it raised: errors of a model's own code are results of measuring it."""
    try:
        return action(*arguments)
    except Exception as error:
        return Raised(str(error) if isinstance(error, RetrofitError) else first_line(error))


def merge(findings: Mapping[str, Finding]) -> Finding:
    """Return one finding for several, by name: failed if one of them failed, skipped if all were."""
    statuses = {finding.status for finding in findings.values()}
    status: Status = "failed" if "failed" in statuses else "passed" if "passed" in statuses else "skipped"
    measured = [f"{name} {finding.measured}" for name, finding in findings.items() if finding.measured]
    relevant = [finding for finding in findings.values() if finding.status != "skipped" or status != "failed"]
    whys = [f"{name}: {finding.why}" for name, finding in findings.items() if finding.why and finding in relevant]
    return Finding(status, ", ".join(measured), "\n".join(whys))


def format_layout(shape: Iterable[int], dtype: object) -> str:
    """Return a tensor's shape and dtype: `2×11×97 float32`."""
    return f"{'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"


# ── The report ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    status: Status
    measured: str
    why: str  # the site or parameter to blame, or the reason it was skipped
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of all checks of a model, and its inputs in them."""

    checks: tuple[CheckResult, ...]
    inputs: tuple[str, ...] = ()  # the example inputs as text, and those with further optional arguments
    never_given: tuple[str, ...] = ()  # optional tensors of the model's forward that no check gave it

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def __getitem__(self, name: str) -> CheckResult:
        """Return the result of the check of that name."""
        return next(check for check in self.checks if check.name == name)

    @property
    def coverage(self) -> str:
        """The inputs and the arguments they leave out, in one line; "" if no model was run."""
        given = " and on ".join(self.inputs)
        return f"{given}; never given: {', '.join(self.never_given)}" if self.never_given else given

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines.append(f"{check.name:<{width}}  {check.status:<7}  {check.seconds:5.1f}s  {check.measured}".rstrip())
            lines.extend(f"{'':<{width}}    {part}" for part in check.why.split("\n") if part)
        counts = {status: sum(check.status == status for check in self.checks) for status in ("passed", "failed", "skipped")}
        outcome = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return "\n".join([*lines, f"{outcome} on {self.coverage}" if self.inputs else outcome])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for `json`."""
        checks = [dataclasses.asdict(check) for check in self.checks]
        return {"ok": self.ok, "checks": checks, "inputs": list(self.inputs), "never_given": list(self.never_given)}
