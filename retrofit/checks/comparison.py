"""Two ways of running one model that must agree, and how far apart their outputs are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from retrofit.checks.finding import Finding, failed, passed, skipped
from retrofit.runtime.probes import distance, tolerance_of


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The outputs of the one way, and their distance from those of the other."""

    outputs: torch.Tensor
    gap: float

    @staticmethod
    def of(outputs: torch.Tensor, others: torch.Tensor) -> Comparison:
        return Comparison(outputs.detach().cpu(), distance(outputs, others))

    @property
    def agrees(self) -> bool:
        return self.gap <= tolerance_of(self.outputs)


def judge_comparison(now: Comparison, before: Comparison | None, exact: bool, blame: Callable[[], str]) -> Finding:
    """The two ways must agree; where the dense model's do not, an exact rewrite must give what that gave, others are excused."""
    if now.agrees:
        return passed(f"{now.gap:.1e}")
    if before is None or before.agrees:
        return failed(f"{now.gap:.1e}", blame())
    excuse = f"the dense model does not agree with itself there ({before.gap:.1e})"
    if not exact:
        return skipped(excuse, f"{now.gap:.1e}")
    gap = distance(now.outputs, before.outputs)
    if gap <= tolerance_of(before.outputs):
        return passed(f"{gap:.1e} from the dense model", excuse)
    return failed(f"{gap:.1e} from the dense model", f"{excuse}, but this one gives something else again")
