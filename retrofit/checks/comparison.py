"""What two ways of running one model say about it: that they agree, or what the dense model did there."""

from __future__ import annotations

from collections.abc import Callable

from retrofit.checks.context import Context
from retrofit.checks.divergence import Divergence
from retrofit.checks.finding import Finding, failed, passed, skipped
from retrofit.numerics.agreement import Comparison
from retrofit.numerics.distances import distance


def judge_comparison(
    now: Comparison, before: Comparison | None, context: Context, locate: Callable[[float], Divergence]
) -> Finding:
    """The two ways must agree; where the dense model's do not, an exact rewrite must give what that gave, others are excused.

    `locate` finds the module where they diverge by more than a limit; it is called in the arithmetic that decided.
    """
    if now.agrees:
        return passed(now.measured)
    if before is None or before.agrees:
        with context.subject.arithmetic.computing(now.in_float64):
            return failed(now.measured, locate(now.limit).describe(context.place))
    excuse = f"the dense model does not agree with itself there ({before.measured})"
    if not context.exact:
        return skipped(excuse, now.measured)
    assert now.outputs is not None and before.outputs is not None
    gap, limit = distance(now.outputs, before.outputs), max(now.limit, before.limit)
    if gap <= limit:
        return passed(f"{gap:.1e} from the dense model", excuse)
    return failed(f"{gap:.1e} from the dense model (limit {limit:.0e})", f"{excuse}, but this one gives something else again")
