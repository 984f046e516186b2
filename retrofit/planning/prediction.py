"""Prediction of the joint effect of several replacements on outputs and times, from measurements of each.

    q(S) = Σ_i k_i + 2 Σ_{i<j} g_ij r_ij √(k_i k_j)        K(S) = a · q(S)^b        t(S) = Σ_s n_s(S) c_s

k_i is the distance caused by replacement i alone, r_ij the cosine between the effects of i and j on the predictions (u in
`quality`): errors in the same direction add up to more than their sum, others cancel. With g = 1 this is the second-order
approximation; in a trained model the interaction is weaker than the cosines suggest, and for some candidates stronger than for
others. So g is one number for each pair of candidates, fitted to all measured hybrids, those of one candidate in all its sites
first; a and b are fitted to the same, and are 1 if the outputs are close to the dense ones. The added loss is a share of K: that of
the measured hybrids with the nearest K.

n_s is the number of replacements in S with structure s: those of one structure take the same time. c is the least-squares solution
for all timings, of the replacements of one structure in all layers and of choices. No time is exact, and each adds information on
all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]

PULLS = (0.05, 0.5)  # strength of the pull of log a and b − 1 to 0
NEAR = 0.35  # in log K: how fast the weight of a measured hybrid decreases with its distance
MOST = 4.0  # upper bound on g
PULL = 0.1  # strength of the pull of g to the value of the two candidates by themselves
FLOOR = 1e-9


@dataclasses.dataclass(frozen=True)
class MeasuredTogether:
    """A measured hybrid: its replacements, their distance from the dense model, the added loss."""

    chosen: tuple[int, ...]
    distance: float
    added_loss: float | None


@dataclasses.dataclass(frozen=True)
class JointError:
    """q as a matrix, with k on the diagonal and r_ij √(k_i k_j) off it; and the parameters of K."""

    matrix: Array
    a: float = 1.0
    b: float = 1.0
    measured: tuple[MeasuredTogether, ...] = ()

    @classmethod
    def of(cls, alone: Sequence[float], cosines: Array) -> JointError:
        """Return the error for k, (n), and r, (n, n)."""
        root = numpy.sqrt(numpy.maximum(numpy.asarray(alone, dtype=float), FLOOR))
        matrix = numpy.outer(root, root) * cosines
        numpy.fill_diagonal(matrix, root**2)
        return cls(matrix)

    def together(self, chosen: Collection[int]) -> float:
        """Return q of the chosen replacements."""
        index = numpy.asarray(sorted(chosen), dtype=int)
        return max(0.0, float(self.matrix[numpy.ix_(index, index)].sum()))

    def distance(self, chosen: Collection[int]) -> float:
        """Return K of the chosen replacements."""
        return self.of_together(self.together(chosen))

    def of_together(self, q: float) -> float:
        return self.a * q**self.b if q > 0 else 0.0

    def added_loss(self, distance: float) -> float:
        """Return the loss that corresponds to a distance."""
        finite = [hybrid for hybrid in self.measured if FLOOR < hybrid.distance < math.inf]
        known = [(hybrid.distance, hybrid.added_loss) for hybrid in finite if hybrid.added_loss is not None]
        if not known:
            return distance
        weights = [closeness(other, distance) for other, _ in known]
        shares = [weight * added / other for weight, (other, added) in zip(weights, known, strict=True)]
        return distance * sum(shares) / sum(weights)

    def expected(self, chosen: Collection[int], measured: Sequence[MeasuredTogether]) -> float:
        """Return an estimate of K, as a reference for `fitted`: at most the K measured where nearly as much adds up.

        Small errors add up, large ones do not: predictions that are already lost cannot get worse.
        """
        q = max(self.together(chosen), FLOOR)
        nearest = min(measured, key=lambda hybrid: abs(math.log(max(self.together(hybrid.chosen), FLOOR) / q)), default=None)
        added_up = self.fitted(measured, 1.0).distance(chosen)
        return added_up if nearest is None else min(added_up, nearest.distance)

    def counted(self, candidates: Sequence[int], measured: Sequence[MeasuredTogether]) -> JointError:
        """Return the error with the g for which q is closest to the measurements; `candidates` has each replacement's candidate."""
        from scipy.optimize import lsq_linear

        names = sorted(set(candidates))
        member = numpy.asarray(candidates)[:, None] == numpy.asarray(names)  # (n, candidates)
        crossed = self.matrix - numpy.diag(self.matrix.diagonal())
        first, second = numpy.triu_indices(len(names))
        rows, wanted, own = [], [], numpy.ones(len(names))
        for hybrid in (hybrid for hybrid in measured if math.isfinite(hybrid.distance)):
            chosen = numpy.zeros((len(self.matrix), 1))
            chosen[list(hybrid.chosen)] = 1.0
            blocks = (member * chosen).T @ crossed @ (member * chosen)  # sums of cross terms, by pairs of candidates
            more = hybrid.distance - float(self.matrix.diagonal() @ chosen[:, 0])
            present = numpy.flatnonzero((member * chosen).any(0))
            if len(present) == 1 and abs(blocks.sum()) > FLOOR:
                own[present[0]] = min(1.0, max(0.0, more / blocks.sum()))
            rows.append((blocks + blocks.T - numpy.diag(blocks.diagonal()))[first, second] / max(hybrid.distance, FLOOR))
            wanted.append(more / max(hybrid.distance, FLOOR))
        prior = numpy.sqrt(own[first] * own[second])
        g = prior
        if rows:
            pulled = numpy.concatenate([numpy.stack(rows), PULL * numpy.eye(len(first))])
            g = lsq_linear(pulled, numpy.concatenate([wanted, PULL * prior]), bounds=(0.0, MOST)).x
        table = numpy.zeros((len(names), len(names)))
        table[first, second] = table[second, first] = g
        which = member.argmax(1)
        matrix = crossed * table[numpy.ix_(which, which)] + numpy.diag(self.matrix.diagonal())
        return dataclasses.replace(self, matrix=matrix)

    def fitted(self, measured: Sequence[MeasuredTogether], near: float) -> JointError:
        """Return the error with a and b fitted to the measured hybrids, weighted by the closeness of their distance to `near`."""
        points = [(self.together(hybrid.chosen), hybrid.distance) for hybrid in measured]
        known = [
            (math.log(q), math.log(found), closeness(found, near)) for q, found in points if q > FLOOR and FLOOR < found < math.inf
        ]
        if not known:
            return dataclasses.replace(self, measured=tuple(measured))
        x, y, w = (numpy.asarray(values) for values in zip(*known, strict=True))
        centre = float((w * x).sum() / w.sum())
        # log K = log a + b (log q − centre) + centre; both deviations are pulled to 0
        rows = numpy.stack([numpy.ones_like(x), x - centre], 1)
        weighted = rows * w[:, None]
        shift, slope = numpy.linalg.solve(rows.T @ weighted + numpy.diag(PULLS), weighted.T @ (y - x))
        b = float(numpy.clip(1 + slope, 0.3, 3.0))
        a = math.exp(float(shift) + (1 - b) * centre)
        return dataclasses.replace(self, a=a, b=b, measured=tuple(measured))


def closeness(distance: float, other: float) -> float:
    """Return the weight of a measurement at one distance for another: 1 if they are equal, never 0."""
    apart = math.log(max(distance, FLOOR)) - math.log(max(other, FLOOR))
    return math.exp(-0.5 * (apart / NEAR) ** 2) + 1e-3


def cosines_of(sketches: Sequence[Array]) -> Array:
    """Return the cosines between vectors, (n, n); those of a zero vector with others are 0."""
    stacked = numpy.stack([numpy.asarray(sketch, dtype=numpy.float32) for sketch in sketches])
    lengths = numpy.linalg.norm(stacked, axis=1, keepdims=True)
    stacked = stacked / numpy.maximum(lengths, FLOOR)
    found: Array = (stacked @ stacked.T).astype(float)
    numpy.fill_diagonal(found, 1.0)
    return found


Timed = Mapping[frozenset[int], float]  # the measured increase for each choice


def joint_cost(kinds: Sequence[str], alone: Sequence[float], timed: Timed) -> Array:
    """Return c of each replacement, (n): without timed choices the value measured with those of its structure, `alone`."""
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
