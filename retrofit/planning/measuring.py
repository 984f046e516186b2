"""What is measured of a model for a plan, each once: the sites of candidates, candidates everywhere, choices of the solver."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import numpy
from torch import nn

from retrofit.errors import CaptureError, DoesNotFitError, PlanningError
from retrofit.inputs.model_memory import own_bytes
from retrofit.passbase.protocol import AnyPass
from retrofit.planning.choosing import Problem, cliques_of
from retrofit.planning.costs import CHOICES, COSTS, LOSSES, PATIENCE, SECONDS, Deadline, Hybrid, OutOfTime, beside
from retrofit.planning.measurements import KeptMeasurements
from retrofit.planning.planning_data import PlanningData
from retrofit.planning.prediction import JointError, MeasuredTogether, Timed, cosines_of, joint_cost
from retrofit.planning.quality import MeasuredWindows, Quality
from retrofit.planning.variants import (
    LayerPaths,
    Replacement,
    Variant,
    added_bytes,
    build_variant,
    hybrid,
    limited_to,
    restore_variant,
    save_variant,
    short_spec,
    structure,
)
from retrofit.program.program import Program
from retrofit.progress import Progress
from retrofit.training.teaching import short_hash

NOISE = 0.01  # of a time
SAME = 1e-3  # of a distance that is measured again
SAMPLE = 4  # sites that a candidate is fitted in first, where the time is limited
NOT_TRIED = "not tried: time limit"


@dataclasses.dataclass(frozen=True)
class Site:
    """One replacement that can be chosen, as it is kept: which candidate's, where, what it costs and loses by itself."""

    candidate: int
    number: int  # among the candidate's replacements
    depths: tuple[int, ...]
    paths: tuple[str, ...]
    kind: str  # the same of those that take the same time: of one candidate, and one structure
    costs: dict[str, float]  # that it adds, as shares of the dense model's
    alone: float  # distance
    sketch: str  # its name; empty where the distance is that of sites which it is taken to be like


class Measurements:
    """Everything measured of one model."""

    def __init__(
        self,
        dense: nn.Module,
        data: PlanningData,
        layers: LayerPaths,
        candidates: Sequence[AnyPass],
        quantities: Sequence[str],
        kept: KeptMeasurements,
        *,
        seed: int,
        example_inputs: Any,
        seconds: float = SECONDS,
        deadline: Deadline | None = None,
        program: Program | None = None,
        progress: Progress,
    ) -> None:
        self.dense, self.data, self.layers, self.candidates = dense, data, layers, tuple(candidates)
        self.program = program
        self.quantities, self.kept, self.seed, self.example_inputs = tuple(quantities), kept, seed, example_inputs
        self.seconds, self.say, self.deadline = seconds, progress, deadline or Deadline(None)
        self.allowance = math.inf  # seconds for one time
        self.fit_seconds: dict[int, float] = {}  # of a sample of each
        self.variants: dict[int, Variant] = {}
        self.unfitted: dict[int, Variant] = {}
        self.sites: list[Site] = []
        self.left_out: dict[str, str] = {}
        progress("measuring the dense model")
        paths = list(dict.fromkeys(path for some in layers.values() for path in some))
        self.windows = MeasuredWindows.of(dense, data.measured, paths, data.shift)
        self.held_out = MeasuredWindows.of(dense, data.held_out, (), data.shift)
        self.bytes = own_bytes(dense)
        self.base: dict[str, float] = {}

    # Candidates, one after the other.

    def measure_candidates(self, wanted: Collection[str] = (), limits: Sequence[Mapping[str, float]] = ()) -> None:
        """The sites of every candidate have been measured, of those that fit and save something of what is `wanted`, where
        something is, as far as the time goes; what it did not go for is left out.

        First what each costs, which does not depend on values: what saves nothing need not be fitted. Then the first setting of
        every pass is fitted, and of the others, for each target in turn, what reaches its `limits` on costs with the least to
        spare, then what comes nearest to them. In a limited time all are first fitted in a few layers.
        """
        known = self.with_costs()
        self.unfitted.clear()
        saving = []
        for number in self.in_turn(known, wanted, limits):
            if wanted and not any(self.saves(number, one) for one in wanted):
                self.left_out[short_spec(self.candidates[number])] = f"saves nothing here: {self.least_costs(number, wanted)}"
            else:
                saving.append(number)
        few = [number for number in saving if self.sample_of(number)]
        whole = [number for number in saving if number not in few]
        for place, number in enumerate([*few, *whole]):
            left = self.deadline.left(LOSSES if any(map(self.has_sites, saving)) else CHOICES)
            seconds = left if place == len(saving) - 1 else left / 2  # lest one that is slow takes all
            self.in_time(number, self.measure_sample if number in few else self.measure_losses, seconds)
        for number in few:
            if self.has_sites(number) and self.seconds_of_all(number) < (left := self.deadline.left(LOSSES)):
                self.in_time(number, self.measure_losses, left)
        for number in saving:
            if self.has_sites(number):
                self.add_sites(number)

    def with_costs(self) -> list[int]:
        """The candidates that fit and whose costs are known: a setting of every pass before others, as far as the time goes."""
        known: list[int] = []
        numbers = self.firsts_first(range(len(self.candidates)))
        for place, number in enumerate(numbers):
            left = self.deadline.left(COSTS) if known else self.deadline.left(LOSSES) / 2  # lest one that is slow takes all
            self.allowance = left / ((len(numbers) - place) * max(1, len(self.quantities)))
            if self.in_time(number, self.measure_costs, left):
                known.append(number)
        self.allowance = math.inf
        return sorted(known)

    def in_time(self, number: int, measure: Callable[[int], None], seconds: float) -> bool:
        """Whether a candidate could be measured in so many seconds; where not it is left out, and why is known."""
        try:
            with self.deadline.limit(seconds):
                return self.fits(number, measure)
        except OutOfTime:
            self.left_out[short_spec(self.candidates[number])] = f"{NOT_TRIED}{self.known_costs(number)}"
            return False

    def has_sites(self, number: int) -> bool:
        """Whether some sites of a candidate were measured, and the candidate was not refused."""
        name = short_spec(self.candidates[number])
        if f"{name} refused" in self.kept.values or f"{name} sites" not in self.kept.values:
            return False
        return f"{name} uniform held out" in self.kept.values or self.sampled(number)[0] > 0

    def add_sites(self, number: int) -> None:
        """The sites of a candidate that were measured can be chosen; those that were not are left out."""
        name = short_spec(self.candidates[number])
        found, (measured, count) = self.sites_of(number), self.sampled(number)
        self.left_out.pop(name, None)
        if measured < count:
            self.left_out[name] = f"{count - measured} of its {count} sites were not measured: assumed to be like the others"
        elif len(found) < count:
            self.left_out[name] = f"at {count - len(found)} of its {count} sites its outputs contain NaN or Inf"
        self.sites += found

    def firsts_first(self, numbers: Sequence[int]) -> list[int]:
        """The candidates, the first setting of every pass before the others."""
        names = [self.candidates[number].name for number in numbers]
        firsts = [number for place, number in enumerate(numbers) if names[place] not in names[:place]]
        return [*firsts, *(number for number in numbers if number not in firsts)]

    def in_turn(self, numbers: Sequence[int], wanted: Collection[str], limits: Sequence[Mapping[str, float]]) -> list[int]:
        """The candidates in the order in which they are fitted."""
        ordered = self.firsts_first(numbers)
        count = len({self.candidates[number].name for number in numbers})
        firsts, others = ordered[:count], ordered[count:]
        if self.deadline.is_set:  # what needs no fit is known soonest
            firsts.sort(key=lambda number: self.candidates[number].calibrates)

        def saved(number: int, quantity: str) -> float:
            return -sum(self.added_by_structure(number, quantity))

        def to_spare(number: int, limit: Mapping[str, float]) -> float:
            """What the candidate in all layers saves more than a target asks for."""
            return min(saved(number, quantity) + most for quantity, most in limit.items())

        def for_target(limit: Mapping[str, float]) -> list[int]:
            return sorted(others, key=lambda number: ((spare := to_spare(number, limit)) < 0, abs(spare)))

        def most_saved(number: int) -> float:
            return max((saved(number, one) for one in wanted), default=0.0)

        orders = [for_target(one) for one in limits if one] or [sorted(others, key=most_saved, reverse=True)]
        return [*firsts, *dict.fromkeys(number for in_order in zip(*orders, strict=True) for number in in_order)]

    def fits(self, number: int, measure: Callable[[int], None]) -> bool:
        """Whether a candidate could be measured; where not it is left out, and why is known."""
        name = short_spec(self.candidates[number])
        try:
            if (refused := self.kept.values.get(f"{name} refused")) is not None:
                raise PlanningError(refused)
            measure(number)
        except (CaptureError, DoesNotFitError, PlanningError) as error:
            what = error.what.removeprefix(f"{self.candidates[number].name}: ")  # as passes begin; the name is said anyway
            reason = f"{what}: {error.why}" if error.why else what
            self.left_out[name] = self.kept.measure(f"{name} refused", functools.partial(str, reason))
            return False
        return True

    def measure_costs(self, number: int) -> None:
        """What the sites of one candidate are, and the times that they add, from a variant that nothing was fitted in."""
        self.kept.measure(f"{short_spec(self.candidates[number])} sites", lambda: self.describe(self.unfitted_variant(number)))
        self.measure_times(number, self.unfitted_variant)

    def measure_losses(self, number: int) -> None:
        """What each site of one candidate does to the outputs by itself, and all of them together."""
        name = short_spec(self.candidates[number])
        if f"{name} uniform held out" not in self.kept.values:  # a fit may find more to change than was seen without it
            self.kept.put(f"{name} sites", self.describe(self.variant(number)))
            self.measure_times(number, self.variant)
        self.measure_uniform(number)
        count = len(self.kept.values[f"{name} sites"])
        for index in spread(count) if self.deadline.is_set else range(count):
            self.say(f"{name}: site {index + 1} of {count} by itself")
            self.kept.measure(f"{name} alone {index}", functools.partial(self.measure_alone, number, index))

    def sample_of(self, number: int) -> list[int]:
        """The depths that a candidate is fitted in first; none where they are no less than all, or time is not limited."""
        candidate, sites = self.candidates[number], self.kept.values[f"{short_spec(self.candidates[number])} sites"]
        chosen = [sites[index]["depths"] for index in spread(len(sites))[:SAMPLE]]
        apart = self.deadline.is_set and candidate.calibrates and len(sites) > SAMPLE and all(chosen)
        return [depth for depths in chosen for depth in depths] if apart else []

    def measure_sample(self, number: int) -> None:
        """What a few sites of one candidate do to the outputs, each by itself and together."""
        candidate, name = self.candidates[number], short_spec(self.candidates[number])
        sites = self.kept.values[f"{name} sites"]
        if any(f"{name} {what}" in self.kept.values for what in ("uniform held out", "sampled together")):
            return
        began = monotonic()
        few = limited_to(candidate, self.sample_of(number))
        self.say(f"fitting {short_spec(few)}")
        variant = build_variant(self.dense, few, self.data.fitted, self.layers, self.seed, self.example_inputs, self.program)
        self.fit_seconds[number] = (monotonic() - began) / len(variant)
        index_of = {tuple(one["depths"]): index for index, one in enumerate(sites)}
        if any(one.depths not in index_of for one in variant):  # a fit may find more to change than was seen without it
            return
        numbers = [index_of[one.depths] for one in variant]
        for index, one in zip(numbers, variant, strict=True):
            self.say(f"{name}: site {index} by itself")
            self.kept.measure(f"{name} sampled {index}", functools.partial(self.alone, one, sampled_name(candidate, index)))

        def together() -> dict[str, Any]:
            found = self.quality(variant, self.windows)
            return {"distance": found.distance, "loss": found.loss, "sites": numbers}

        self.kept.measure(f"{name} sampled together", together)

    def seconds_of_all(self, number: int) -> float:
        """About how long fitting one candidate in all its layers and measuring it will take, by what a few of them took."""
        return self.fit_seconds.get(number, 0.0) * len(self.kept.values[f"{short_spec(self.candidates[number])} sites"])

    def sampled(self, number: int) -> tuple[int, int]:
        """Of how many sites of one candidate the effect is known, and how many there are."""
        name = short_spec(self.candidates[number])
        count = len(self.kept.values[f"{name} sites"])
        return sum(self.known_alone(number, index) is not None for index in range(count)), count

    def known_alone(self, number: int, index: int) -> tuple[float, str] | None:
        """The distance that a site causes by itself, and the name of its sketch; None where it was not measured."""
        candidate = self.candidates[number]
        for kind, sketch in (("alone", sketch_name), ("sampled", sampled_name)):
            if (found := self.kept.values.get(f"{short_spec(candidate)} {kind} {index}")) is not None:
                return found["distance"], sketch(candidate, index)
        return None

    def known_costs(self, number: int) -> str:
        """The times of a candidate in all its layers, as far as they are known, as the end of a sentence."""
        try:
            shares = {one: 1 + sum(self.added_by_structure(number, one)) for one in self.quantities}
        except KeyError:
            return ""
        return f"; {', '.join(f'{one} takes {share:.2f} times as much' for one, share in shares.items())}" if shares else ""

    def saves(self, number: int, quantity: str) -> bool:
        """Whether the sites of one structure together take less of a quantity, by more than the error of a time."""
        return min(self.added_by_structure(number, quantity)) < (-NOISE if quantity in self.quantities else 0.0)

    def added_by_structure(self, number: int, quantity: str) -> list[float]:
        """What all sites of each structure add to a quantity, as shares of the dense model's."""
        name, added = short_spec(self.candidates[number]), dict[str, float]()
        for one in self.kept.values[f"{name} sites"]:
            each = (
                self.kept.values[f"{name} {quantity} {one['structure']}"]
                if quantity in self.quantities
                else one["bytes"] / self.bytes
            )
            added[one["structure"]] = added.get(one["structure"], 0.0) + each
        return list(added.values())

    def least_costs(self, number: int, wanted: Collection[str]) -> str:
        """What a candidate takes of each quantity, in words."""
        return ", ".join(f"{one} takes {1 + min(self.added_by_structure(number, one)):.2f} times as much" for one in wanted)

    def sites_of(self, number: int) -> list[Site]:
        """The sites of one candidate that was measured, with what each costs and loses by itself."""
        name, found = short_spec(self.candidates[number]), []
        sites = self.kept.values[f"{name} sites"]
        known = {index: one for index in range(len(sites)) if (one := self.known_alone(number, index)) is not None}
        for index, one in enumerate(sites):
            if (alone := known.get(index)) is None:
                like = between({place: distance for place, (distance, _) in known.items() if math.isfinite(distance)}, index)
                alone = like, ""
            costs = {quantity: self.kept.values[f"{name} {quantity} {one['structure']}"] for quantity in self.quantities}
            costs["memory"] = one["bytes"] / self.bytes
            if math.isfinite(alone[0]):
                kind = f"{number} {one['structure']}"
                found.append(Site(number, index, tuple(one["depths"]), tuple(one["paths"]), kind, costs, *alone))
        return found

    def variant(self, number: int) -> Variant:
        """The candidate applied to the whole model, taken apart; it is built again after an interruption."""
        if number not in self.variants:
            self.variants[number] = self.restored(number) or self.fitted(number)
        return self.variants[number]

    def unfitted_variant(self, number: int) -> Variant:
        """The same with the values that it has without data; where nothing is fitted, the variant itself."""
        candidate = self.candidates[number]
        if not candidate.calibrates:
            return self.variant(number)
        if number not in self.unfitted:
            self.say(f"building {short_spec(candidate)}")
            self.unfitted[number] = build_variant(
                self.dense, candidate, self.data.fitted, self.layers, self.seed, self.example_inputs, self.program, fit=False
            )
        return self.unfitted[number]

    def fitted(self, number: int) -> Variant:
        """The variant, fitted, and kept where there is a folder."""
        candidate = self.candidates[number]
        self.say(f"fitting {short_spec(candidate)}")
        variant = build_variant(self.dense, candidate, self.data.fitted, self.layers, self.seed, self.example_inputs, self.program)
        if (file := self.kept.file(variant_name(candidate))) is not None:
            save_variant(file, variant, self.dense)
        return variant

    def restored(self, number: int) -> Variant | None:
        """The variant with the values that were kept; None where there are none, or it does not measure as it did."""
        candidate, file = self.candidates[number], self.kept.file(variant_name(self.candidates[number]))
        if file is None or not file.is_file():
            return None
        self.say(f"reading {short_spec(candidate)} again")
        variant = build_variant(
            self.dense,
            candidate,
            self.data.fitted,
            self.layers,
            self.seed,
            self.example_inputs,
            self.program,
            fit=not candidate.calibrates,
        )
        if not restore_variant(file, variant, self.dense):
            return None
        before = self.kept.values.get(f"{short_spec(candidate)} alone 0")
        same = before is None or math.isclose(self.quality(variant[:1], self.windows).distance, before["distance"], rel_tol=SAME)
        return variant if same else None

    def describe(self, variant: Variant) -> list[dict[str, Any]]:
        """What each replacement of a candidate is, without its modules."""
        return [
            {
                "depths": list(one.depths),
                "paths": list(one.paths),
                "bytes": added_bytes(self.dense, one),
                "structure": short_hash(structure(one).encode()),
            }
            for one in variant
        ]

    def measure_times(self, number: int, variant: Callable[[int], Variant]) -> None:
        """What a site of each structure of one candidate adds to the times of the dense model, as shares of them."""
        name = short_spec(self.candidates[number])
        members: dict[str, list[int]] = {}
        for index, one in enumerate(self.kept.values[f"{name} sites"]):
            members.setdefault(one["structure"], []).append(index)

        def added(quantity: str, indices: list[int]) -> float:
            replacements = [variant(number)[index] for index in indices]
            self.say(f"{name}: timing {quantity}")
            return (self.share(replacements, quantity) - 1.0) / len(indices)

        for kind, indices in members.items():
            for quantity in self.quantities:
                self.kept.measure(f"{name} {quantity} {kind}", functools.partial(added, quantity, indices))

    def share(self, replacements: Sequence[Replacement], quantity: str) -> float:
        """The time of a hybrid as a share of the dense model's, measured in turn."""
        base, (share,) = self.beside(lambda: hybrid(self.dense, replacements), quantity)
        self.kept.measure(f"dense {quantity}", lambda: base)
        return share

    def beside(self, other: Hybrid, quantity: str) -> tuple[float, list[float]]:
        """The dense model's time and the share of it that another takes; in fewer rounds where little time is left."""
        given = min(self.allowance, self.deadline.left() / 4) / (2 * PATIENCE)  # of two models, and patience
        hurried = given < self.seconds
        return beside(self.as_dense(), [other], quantity, self.data.window, min(self.seconds, given), hurried)

    def as_dense(self) -> Callable[[], AbstractContextManager[nn.Module]]:
        return lambda: contextlib.nullcontext(self.dense)

    def measure_alone(self, number: int, index: int) -> dict[str, Any]:
        """The quality of the dense model with one replacement; what it does to the predictions is kept as a sketch."""
        return self.alone(self.variant(number)[index], sketch_name(self.candidates[number], index))

    def alone(self, replacement: Replacement, sketch: str) -> dict[str, Any]:
        """The quality of the dense model with one replacement, whose sketch is kept by that name."""
        found = self.quality([replacement], self.windows, sketch=True)
        assert found.sketch is not None
        self.kept.keep_sketch(sketch, found.sketch)
        return {"distance": found.distance, "loss": found.loss}

    def quality(self, replacements: Sequence[Replacement], windows: MeasuredWindows, *, sketch: bool = False) -> Quality:
        paths = [path for one in replacements for path in one.paths]
        with hybrid(self.dense, replacements) as model:
            return windows.measure(model, paths, sketch=sketch)

    def measure_uniform(self, number: int) -> None:
        """The candidate wherever it fits: on the windows measured and on those held out."""
        spec = short_spec(self.candidates[number])
        for name, windows in (("measured", self.windows), ("held out", self.held_out)):

            def uniform(windows: MeasuredWindows = windows) -> dict[str, Any]:
                self.say(f"{spec}: in all layers")
                found = self.quality(list(self.variant(number)), windows)
                return {"distance": found.distance, "loss": found.loss}

            self.kept.measure(f"{spec} uniform {name}", uniform)

    # All of them together.

    def problem(self, matrix: numpy.ndarray[Any, Any], timed: Mapping[str, Timed]) -> Problem:
        """What is to be chosen from; `timed` are the choices whose times were measured, by the quantity.

        That errors cancel is not counted on: sites would be chosen for it that save nothing.
        """
        kinds = [site.kind for site in self.sites]
        costs = {
            name: joint_cost(kinds, [site.costs[name] for site in self.sites], timed.get(name, {}))
            for name in (*self.quantities, "memory")
        }
        return Problem(numpy.maximum(matrix, 0.0), costs, cliques_of([site.paths for site in self.sites]))

    def joint_error(self) -> JointError:
        """The prediction of what sites do together, from what each does alone."""
        sketches = {index: self.kept.sketch(site.sketch).numpy() for index, site in enumerate(self.sites) if site.sketch}
        nothing = numpy.zeros_like(next(iter(sketches.values())))
        cosines = cosines_of([sketches.get(index, nothing) for index in range(len(self.sites))])
        return JointError.of(
            [site.alone for site in self.sites], with_means(cosines, [site.candidate for site in self.sites], list(sketches))
        )

    def uniform_choices(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Each candidate in all its sites, as a choice."""
        for number in sorted({site.candidate for site in self.sites}):
            yield number, frozenset(index for index, site in enumerate(self.sites) if site.candidate == number)

    def measured_together(self) -> Iterator[tuple[frozenset[int], dict[str, Any]]]:
        """What was measured of each candidate in all its layers, or in a few, as choices."""
        for number, chosen in self.uniform_choices():
            name = short_spec(self.candidates[number])
            found = self.kept.values.get(f"{name} uniform measured")
            few = self.kept.values.get(f"{name} sampled together")
            if not self.is_estimated(chosen) and found is not None:
                yield chosen, found
            elif few is not None and math.isfinite(few["distance"]):
                yield frozenset(index for index in chosen if self.sites[index].number in few["sites"]), few

    def is_estimated(self, chosen: Collection[int]) -> bool:
        """Whether a candidate of a choice was fitted in a few layers only: no hybrid of it can be measured."""
        return any(self.is_sampled(self.sites[index].candidate) for index in chosen)

    def is_sampled(self, number: int) -> bool:
        """Whether a candidate was fitted in a few layers only, or in none."""
        return f"{short_spec(self.candidates[number])} uniform held out" not in self.kept.values

    def together(self, chosen: Collection[int]) -> MeasuredTogether:
        """What a choice does to the outputs, measured."""
        found = self.kept.measure(f"together {self.label(chosen)}", lambda: self.measure_together(chosen))
        return self.as_measured(chosen, found)

    def as_measured(self, chosen: Collection[int], found: dict[str, Any]) -> MeasuredTogether:
        dense = self.windows.dense_loss
        added = None if found["loss"] is None or dense is None else found["loss"] - dense
        return MeasuredTogether(tuple(sorted(chosen)), found["distance"], added)

    def measure_together(self, chosen: Collection[int]) -> dict[str, Any]:
        self.say(f"measuring {len(chosen)} sites together")
        found = self.quality(self.replacements(chosen), self.windows)
        return {"distance": found.distance, "loss": found.loss}

    def share_of(self, chosen: Collection[int], quantity: str) -> float:
        """The time of a choice as a share of the dense model's, measured."""

        def measured() -> float:
            self.say(f"timing {quantity} of {len(chosen)} sites together")
            return self.share(self.replacements(chosen), quantity)

        return float(self.kept.measure(f"{quantity} {self.label(chosen)}", measured))

    def replacements(self, chosen: Collection[int]) -> list[Replacement]:
        """What a choice puts into the model; of a candidate that was not fitted in all layers what takes the same time."""
        found = []
        for site in (self.sites[index] for index in sorted(chosen)):
            variant = self.unfitted_variant if self.is_sampled(site.candidate) else self.variant
            found.append(variant(site.candidate)[site.number])
        return found

    def label(self, chosen: Collection[int]) -> str:
        """A choice as text."""
        by_candidate: dict[str, list[str]] = {}
        for site in (self.sites[index] for index in sorted(chosen)):
            by_candidate.setdefault(short_spec(self.candidates[site.candidate]), []).append(str(site.number))
        return "; ".join(f"{name}: {' '.join(numbers)}" for name, numbers in by_candidate.items())


def between(known: Mapping[int, float], place: int) -> float:
    """The value at a place between those known, on a line of their logarithms; that of the nearest outside of them."""
    places = sorted(place for place, value in known.items() if value > 0)
    if not places:
        return math.nan
    return float(numpy.exp(numpy.interp(place, places, [math.log(known[one]) for one in places])))


def with_means(cosines: numpy.ndarray[Any, Any], candidates: Sequence[int], known: Sequence[int]) -> numpy.ndarray[Any, Any]:
    """Return the cosines; those of sites that are not `known` are the means over the known sites of the same two candidates."""
    which, is_known = numpy.asarray(candidates), numpy.isin(numpy.arange(len(candidates)), known)
    pairs = is_known[:, None] & is_known & ~numpy.eye(len(which), dtype=bool)
    found = cosines.copy()
    for one, other in itertools.product(set(candidates), repeat=2):
        block = (which == one)[:, None] & (which == other)
        seen = block & pairs
        found[block & ~pairs] = cosines[seen].mean() if seen.any() else 0.0
    numpy.fill_diagonal(found, 1.0)
    return found


def spread(count: int) -> list[int]:
    """The numbers below `count`, each far from those before it: any first ones of them lie spread over all."""
    bits = max(1, (count - 1).bit_length())
    backwards = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [number for number in backwards if number < count]


def variant_name(candidate: AnyPass) -> str:
    """The name of what is kept of a candidate's values."""
    return f"{candidate.name}-{short_hash(candidate.spec().encode())}"


def sketch_name(candidate: AnyPass, number: int) -> str:
    """The name of what is kept of a site's effect on the predictions."""
    return f"{variant_name(candidate)}-{number}"


def sampled_name(candidate: AnyPass, number: int) -> str:
    """The same of a site that was fitted in a few layers only."""
    return f"{variant_name(candidate)}-few-{number}"
