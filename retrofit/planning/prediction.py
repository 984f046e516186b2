"""Prediction of the cost and loss of a choice of sites, from measurements of each site, corrected by measured choices.

The joint effect of several replacements on outputs and times:

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
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from retrofit.passbase.protocol import AnyPass
from retrofit.planning.choosing import Problem, cliques_of
from retrofit.planning.measurements import Site
from retrofit.planning.measuring import Measurements
from retrofit.planning.model_plan import UniformSetting, Worth
from retrofit.planning.variants import limited_to

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
            excess = hybrid.distance - float(self.matrix.diagonal() @ chosen[:, 0])
            present = numpy.flatnonzero((member * chosen).any(0))
            if len(present) == 1 and abs(blocks.sum()) > FLOOR:
                own[present[0]] = min(1.0, max(0.0, excess / blocks.sum()))
            rows.append((blocks + blocks.T - numpy.diag(blocks.diagonal()))[first, second] / max(hybrid.distance, FLOOR))
            wanted.append(excess / max(hybrid.distance, FLOOR))
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
    log_ratio = math.log(max(distance, FLOOR)) - math.log(max(other, FLOOR))
    return math.exp(-0.5 * (log_ratio / NEAR) ** 2) + 1e-3


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
    solution: Array = numpy.linalg.lstsq(matrix, values, rcond=None)[0]
    return solution[column]


# ── The sites of a plan ───────────────────────────────────────────────────────────────────────────────────────────────────────────


SAME = 1e-6
Choice = frozenset[int]  # numbers of sites


class Predictor:
    """Predicts costs and loss of the sites of `measurements` together."""

    def __init__(self, measurements: Measurements) -> None:
        self.measurements = measurements
        self.sites: list[Site] = measurements.sites
        self.known: dict[tuple[int, ...], MeasuredTogether] = {}
        self.timed: dict[str, dict[Choice, float]] = {name: {} for name in measurements.quantities}
        self.pairs = self.joint = self.second_order()  # from the cosines, and fitted to measurements
        for chosen, found in self.measured_before():
            self.learn(chosen, found)

    def second_order(self) -> JointError:
        """Return the prediction from the effects of each site alone."""
        sketches = {
            index: self.measurements.store.sketch(site.sketch).numpy() for index, site in enumerate(self.sites) if site.sketch
        }
        nothing = numpy.zeros_like(next(iter(sketches.values())))
        cosines = cosines_of([sketches.get(index, nothing) for index in range(len(self.sites))])
        candidates = [site.candidate for site in self.sites]
        return JointError.of([site.alone for site in self.sites], with_means(cosines, candidates, list(sketches)))

    def measured_before(self) -> Iterator[tuple[Choice, dict[str, Any]]]:
        """Yield the measurements of each candidate in all its layers, or in a few, as choices."""
        for number, chosen in self.uniform_choices():
            record = self.measurements.records[number]
            found, few = record.get("uniform measured"), record.get("sampled together")
            if record.is_fitted and found is not None:
                yield chosen, found
            elif few is not None and math.isfinite(few["distance"]):
                yield frozenset(index for index in chosen if self.sites[index].number in few["sites"]), few

    def uniform_choices(self) -> Iterator[tuple[int, Choice]]:
        """Yield each candidate in all its sites."""
        for number in sorted({site.candidate for site in self.sites}):
            yield number, frozenset(index for index, site in enumerate(self.sites) if site.candidate == number)

    # Learning.

    def learn(self, chosen: Collection[int], found: dict[str, Any]) -> None:
        """Use the measured effect of a choice on the outputs for later predictions."""
        index = tuple(sorted(chosen))
        self.known[index] = MeasuredTogether(index, found["distance"], self.added(found["loss"]))
        self.joint = self.pairs.counted([site.candidate for site in self.sites], list(self.known.values()))

    def learn_time(self, name: str, chosen: Choice) -> None:
        """Measure the time of a choice, and use it for later predictions."""
        if name != "memory":
            self.timed[name][chosen] = self.measurements.share_of(chosen, name) - 1.0

    # Predicting.

    def problem(self, without: Collection[str] = ()) -> Problem:
        """Return the problem of choice, except for the sites of the passes in `without`, whose cost exceeds any limit.

        Errors that cancel are not counted: otherwise sites that save nothing would be chosen for that effect.
        """
        kinds = [site.kind for site in self.sites]
        costs = {
            name: joint_cost(kinds, [site.costs[name] for site in self.sites], self.timed.get(name, {}))
            for name in (*self.measurements.quantities, "memory")
        }
        barred = numpy.asarray([self.pass_name(index) in without for index in range(len(self.sites))], dtype=float)
        costs |= {"barred": barred} if barred.any() else {}
        return Problem(numpy.maximum(self.joint.matrix, 0.0), costs, cliques_of([site.paths for site in self.sites]))

    def worth(self, chosen: Collection[int]) -> Worth:
        """Return the predicted costs and loss of a choice; the loss is the measured one, if measured."""
        costs = self.problem().shares(chosen)
        measured = self.known.get(tuple(sorted(chosen)))
        if measured is not None:
            return Worth(costs, self.shown(measured.distance), measured.added_loss)
        points = list(self.known.values())
        joint = self.joint.fitted(points, max(self.joint.expected(chosen, points), SAME))
        distance = joint.distance(chosen)
        loss = None if self.measurements.windows.dense_loss is None else joint.added_loss(distance)
        return Worth(costs, self.shown(distance), loss)

    def lost(self, quantity: str, chosen: Collection[int]) -> float:
        """Return the loss or the error that a choice adds."""
        worth = self.worth(chosen)
        if quantity == "error":
            return worth.distance
        assert worth.added_loss is not None
        return worth.added_loss

    def shown(self, distance: float) -> float:
        """Return a distance as reported: the relative error, not its square."""
        return distance if self.measurements.windows.are_logits else math.sqrt(max(0.0, distance))

    def added(self, loss: float | None, *, held_out: bool = False) -> float | None:
        """Return a loss minus the dense model's on the same windows."""
        dense = (self.measurements.held_out if held_out else self.measurements.windows).dense_loss
        return None if loss is None or dense is None else loss - dense

    def is_finite(self, chosen: Collection[int]) -> bool:
        """Return whether the outputs of a choice are free of NaN and Inf, as far as measured."""
        measured = self.known.get(tuple(sorted(chosen)))
        return measured is None or math.isfinite(measured.distance)

    def is_estimated(self, chosen: Collection[int]) -> bool:
        """Return whether a candidate of a choice was fitted in a few layers only: no hybrid of it can be measured."""
        return not all(self.measurements.records[self.sites[index].candidate].is_fitted for index in chosen)

    def pass_name(self, index: int) -> str:
        return self.measurements.candidates[self.sites[index].candidate].name

    def uniform_settings(self) -> list[UniformSetting]:
        """Return every candidate in all its sites, as measured; its times are fitted to all timings."""
        found, problem = [], self.problem()
        for number, chosen in self.uniform_choices():
            record = self.measurements.records[number]
            if not record.is_fitted:
                found.append(UniformSetting(record.name, self.worth(chosen), None, record.sampled))
                continue
            costs, measured, held_out = problem.shares(chosen), record.get("uniform measured"), record.get("uniform held out")
            worth = Worth(costs, self.shown(measured["distance"]), self.added(measured["loss"]))
            shown = Worth(costs, self.shown(held_out["distance"]), self.added(held_out["loss"], held_out=True))
            found.append(UniformSetting(record.name, worth, shown))
        return found

    def by_candidate(self, chosen: Collection[int]) -> list[tuple[AnyPass, list[Site]]]:
        """Return the candidates of a choice, each with its chosen sites, in order."""
        sites = [self.sites[index] for index in sorted(chosen)]
        found = [
            (candidate, [site for site in sites if site.candidate == number])
            for number, candidate in enumerate(self.measurements.candidates)
        ]
        return [(candidate, own) for candidate, own in found if own]

    def recipe(self, chosen: Collection[int]) -> tuple[AnyPass, ...]:
        """Return the passes of a choice, each in its chosen layers: passes without depths late, those for whole layers last."""
        layers = set(itertools.chain.from_iterable(self.measurements.layers.values()))
        found: list[tuple[int, AnyPass]] = []
        for candidate, sites in self.by_candidate(chosen):
            depths = [depth for site in sites for depth in site.depths]
            last = int(not depths) + 2 * any(path in layers for site in sites for path in site.paths)
            found.append((last, limited_to(candidate, depths) if depths else candidate))
        return tuple(candidate for _, candidate in sorted(found, key=lambda entry: entry[0]))


def with_means(cosines: numpy.ndarray[Any, Any], candidates: Sequence[int], known: Sequence[int]) -> numpy.ndarray[Any, Any]:
    """Return the cosines; for sites not in `known`, the means over the known sites of the same two candidates."""
    which, is_known = numpy.asarray(candidates), numpy.isin(numpy.arange(len(candidates)), known)
    pairs = is_known[:, None] & is_known & ~numpy.eye(len(which), dtype=bool)
    found = cosines.copy()
    for first, second in itertools.product(set(candidates), repeat=2):
        block = (which == first)[:, None] & (which == second)
        seen = block & pairs
        found[block & ~pairs] = cosines[seen].mean() if seen.any() else 0.0
    numpy.fill_diagonal(found, 1.0)
    return found
