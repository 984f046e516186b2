"""Prediction of the cost and loss of a choice of sites, from measurements of each site, corrected by measured choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy

from retrofit.passbase.protocol import AnyPass
from retrofit.planning.choosing import Problem, cliques_of
from retrofit.planning.measurements import Site
from retrofit.planning.measuring import Measurements
from retrofit.planning.model_plan import UniformSetting, Worth
from retrofit.planning.prediction import JointError, MeasuredTogether, cosines_of, joint_cost
from retrofit.planning.variants import limited_to

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
        problem = self.problem()
        costs = {name: 1.0 + problem.cost(name, chosen) for name in problem.costs}
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
            costs = {name: 1.0 + problem.cost(name, chosen) for name in problem.costs}
            worths = []
            for part in ("measured", "held out"):
                uniform = record.get("uniform", part)
                worths.append(
                    Worth(costs, self.shown(uniform["distance"]), self.added(uniform["loss"], held_out=part == "held out"))
                )
            found.append(UniformSetting(record.name, worths[0], worths[1]))
        return found

    def recipe(self, chosen: Collection[int]) -> tuple[AnyPass, ...]:
        """Return the passes of a choice, each in its chosen layers: passes without depths late, those for whole layers last."""
        layers = {path for some in self.measurements.layers.values() for path in some}
        found: list[tuple[int, int, AnyPass]] = []
        for number, candidate in enumerate(self.measurements.candidates):
            sites = [self.sites[index] for index in sorted(chosen) if self.sites[index].candidate == number]
            if sites:
                depths = [depth for site in sites for depth in site.depths]
                last = int(not depths) + 2 * any(path in layers for site in sites for path in site.paths)
                found.append((last, number, limited_to(candidate, depths) if depths else candidate))
        return tuple(candidate for _, _, candidate in sorted(found, key=lambda entry: entry[:2]))


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
