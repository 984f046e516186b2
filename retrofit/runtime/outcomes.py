"""How a check comes out, and the words for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from retrofit.errors import RetrofitError, first_line

Status = Literal["passed", "failed", "skipped"]
Shape = tuple[int, ...]


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


def skipped(why: str) -> Finding:
    return Finding("skipped", "", why)


def attempted(action: Callable[..., Finding], *arguments: Any) -> Finding:
    """What the action finds; one that raises has failed with what it raised."""
    try:
        return action(*arguments)
    except Exception as error:
        return failed("", str(error) if isinstance(error, RetrofitError) else first_line(error))


def merged(findings: Mapping[str, Finding]) -> Finding:
    """One finding out of several by name; it failed where one of them failed, and was skipped where all were."""
    statuses = {finding.status for finding in findings.values()}
    status: Status = "failed" if "failed" in statuses else "passed" if "passed" in statuses else "skipped"
    measured = [f"{name} {finding.measured}" for name, finding in findings.items() if finding.measured]
    told = [finding for finding in findings.values() if finding.status != "skipped"] if status == "failed" else findings.values()
    whys = [f"{name}: {finding.why}" for name, finding in findings.items() if finding.why and finding in told]
    return Finding(status, ", ".join(measured), "\n".join(whys))


def listed(items: Iterable[str], most: int = 3) -> str:
    """The first few of the items, and how many more there are."""
    names = list(items)
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")


def layout(shape: Iterable[int], dtype: object) -> str:
    """A tensor's shape and dtype in words: `2×11×97 float32`."""
    return f"{'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
