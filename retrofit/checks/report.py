"""The report of a verification: each check with its result."""

from __future__ import annotations

import dataclasses
from typing import Any

from retrofit.checks.finding import Status


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
    """The results of all checks of a model."""

    checks: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def __getitem__(self, name: str) -> CheckResult:
        """The result of the check of that name."""
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
