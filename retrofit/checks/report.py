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
    """The results of all checks of a model, and what it was given in them."""

    checks: tuple[CheckResult, ...]
    inputs: tuple[str, ...] = ()  # the example inputs, in words, and those with optional arguments that these leave out
    never_given: tuple[str, ...] = ()  # optional tensors of the model's forward that no check gave it

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def __getitem__(self, name: str) -> CheckResult:
        """The result of the check of that name."""
        return next(check for check in self.checks if check.name == name)

    @property
    def coverage(self) -> str:
        """The inputs and what they leave out, in a line; "" where no model was run."""
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
        """The report as plain data, for `json`."""
        checks = [dataclasses.asdict(check) for check in self.checks]
        return {"ok": self.ok, "checks": checks, "inputs": list(self.inputs), "never_given": list(self.never_given)}
