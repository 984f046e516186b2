"""What a check finds: a status, what was measured, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from retrofit.errors import RetrofitError, first_line

Status = Literal["passed", "failed", "skipped"]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A status, what was measured, and what is to blame or why there was nothing to check."""

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
    """The error that stopped a measurement, in words."""

    error: str


def attempt(action: Callable[..., Result], *arguments: Any) -> Result | Raised:
    """What the action returns, or what it raised: whatever a model's own code raises is a result of measuring it."""
    try:
        return action(*arguments)
    except Exception as error:
        return Raised(str(error) if isinstance(error, RetrofitError) else first_line(error))


def merge(findings: Mapping[str, Finding]) -> Finding:
    """One finding out of several by name; it failed where one of them failed, and was skipped where all were."""
    statuses = {finding.status for finding in findings.values()}
    status: Status = "failed" if "failed" in statuses else "passed" if "passed" in statuses else "skipped"
    measured = [f"{name} {finding.measured}" for name, finding in findings.items() if finding.measured]
    relevant = [finding for finding in findings.values() if finding.status != "skipped" or status != "failed"]
    whys = [f"{name}: {finding.why}" for name, finding in findings.items() if finding.why and finding in relevant]
    return Finding(status, ", ".join(measured), "\n".join(whys))


def format_layout(shape: Iterable[int], dtype: object) -> str:
    """A tensor's shape and dtype: `2×11×97 float32`."""
    return f"{'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
