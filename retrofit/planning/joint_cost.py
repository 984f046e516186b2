"""What several replacements add to a time together, predicted from all that was timed.

    t(S) = Σ_s n_s(S) c_s

n_s is how many of the replacements S have structure s: those of one structure take the same time. c is the least-squares solution
for everything timed, the replacements of one structure in all layers, and choices. No time is exact, and each says more about all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]
Timed = Mapping[frozenset[int], float]  # what choices were measured to add


def joint_cost(kinds: Sequence[str], alone: Sequence[float], timed: Timed) -> Array:
    """c of each replacement, (n): as each was measured with its like, `alone`, where no choice was timed."""
    found = numpy.asarray(alone, dtype=float)
    if not timed:
        return found
    names = sorted(set(kinds))
    column = numpy.asarray([names.index(kind) for kind in kinds])
    counts = numpy.bincount(column, minlength=len(names)).astype(float)
    with_its_like = numpy.bincount(column, weights=found, minlength=len(names))
    rows = [numpy.bincount(column[sorted(chosen)], minlength=len(names)).astype(float) for chosen in timed]
    matrix = numpy.concatenate([numpy.diag(counts), numpy.stack(rows)])
    values = numpy.concatenate([with_its_like, list(timed.values())])
    each: Array = numpy.linalg.lstsq(matrix, values, rcond=None)[0]
    return each[column]
