"""One way of running a model, and how far it came out from another way that should give the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from retrofit.runtime.outcomes import Finding, failed, passed
from retrofit.runtime.probes import distance, tolerance_of


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outputs of the one way, and their distance from those of the other."""

    outputs: torch.Tensor
    gap: float

    @staticmethod
    def of(outputs: torch.Tensor, others: torch.Tensor) -> Trial:
        return Trial(outputs.detach().cpu(), distance(outputs, others))

    @property
    def agrees(self) -> bool:
        return self.gap <= tolerance_of(self.outputs)


def judged(trial: Trial, dense: Trial | None, exact: bool, blame: Callable[[], str]) -> Finding:
    """The two ways must agree; where the dense model's do not, an exact rewrite must give what that gave, others are excused."""
    if trial.agrees:
        return passed(f"{trial.gap:.1e}")
    if dense is None or dense.agrees:
        return failed(f"{trial.gap:.1e}", blame())
    excuse = f"the dense model does not agree with itself there ({dense.gap:.1e})"
    if not exact:
        return Finding("skipped", f"{trial.gap:.1e}", excuse)
    gap = distance(trial.outputs, dense.outputs)
    if gap <= tolerance_of(dense.outputs):
        return passed(f"{gap:.1e} from the dense model", excuse)
    return failed(f"{gap:.1e} from the dense model", f"{excuse}, but this one gives something else again")
