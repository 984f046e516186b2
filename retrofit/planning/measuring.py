"""What is measured of a model for a plan, each once: the sites of candidates, candidates everywhere, choices of the solver."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
from torch import nn

from retrofit.errors import CaptureError, DoesNotFitError, PlanningError
from retrofit.pipeline.protocol import AnyPass
from retrofit.planning.candidates import short_spec
from retrofit.planning.choosing import Problem, cliques_of
from retrofit.planning.costs import COSTS, LEAST, LOSSES, PATIENCE, SECONDS, Deadline, Hybrid, OutOfTime, beside
from retrofit.planning.joint_cost import Timed, joint_cost
from retrofit.planning.joint_error import JointError, MeasuredTogether, cosines_of
from retrofit.planning.kept_measurements import KeptMeasurements
from retrofit.planning.kept_variants import restore_variant, save_variant
from retrofit.planning.planning_data import PlanningData
from retrofit.planning.quality import MeasuredWindows, Quality
from retrofit.planning.variants import LayerPaths, Replacement, Variant, added_bytes, build_variant, hybrid, structure
from retrofit.runtime.peak_memory import own_bytes
from retrofit.training.fingerprints import short_hash

Progress = Callable[[str], None]
NOISE = 0.01  # of a time
SAME = 1e-3  # of a distance that is measured again
HURRIED = 2  # rounds of a time where little of a limited one is left
NOT_TRIED = "not tried: the time given was over"


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
        progress: Progress,
    ) -> None:
        self.dense, self.data, self.layers, self.candidates = dense, data, layers, tuple(candidates)
        self.quantities, self.kept, self.seed, self.example_inputs = tuple(quantities), kept, seed, example_inputs
        self.seconds, self.say, self.deadline = seconds, progress, deadline or Deadline(None)
        self.allowance = math.inf  # seconds for one time
        self.partial: set[int] = set()  # candidates of which not every site was measured
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
        spare, then what comes nearest to them.
        """
        known = self.with_costs()
        self.unfitted.clear()
        saving = []
        for number in self.in_turn(known, wanted, limits):
            if wanted and not any(self.saves(number, one) for one in wanted):
                self.left_out[short_spec(self.candidates[number])] = f"saves nothing here: {self.least_costs(number, wanted)}"
            else:
                saving.append(number)
        for place, number in enumerate(saving):
            left = self.deadline.left(LOSSES)  # the first may take half of it, lest a slow one takes all
            seconds = left if self.sites or place == len(saving) - 1 else left / 2
            if self.in_time(number, self.measure_losses, seconds) or self.has_sites(number):
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
            self.left_out[short_spec(self.candidates[number])] = NOT_TRIED
            return False

    def has_sites(self, number: int) -> bool:
        """Whether some sites of a candidate were measured, and the candidate was not refused."""
        name = short_spec(self.candidates[number])
        return f"{name} refused" not in self.kept.values and f"{name} uniform held out" in self.kept.values

    def add_sites(self, number: int) -> None:
        """The sites of a candidate that were measured can be chosen; those that were not are left out."""
        name = short_spec(self.candidates[number])
        found, count = self.sites_of(number), len(self.kept.values[f"{name} sites"])
        measured = sum(f"{name} alone {index}" in self.kept.values for index in range(count))
        self.left_out.pop(name, None)
        if measured < count:
            self.partial.add(number)
            self.left_out[name] = f"{count - measured} of its {count} sites were not measured: the time given was over"
        elif len(found) < count:
            self.left_out[name] = f"at {count - len(found)} of its {count} sites its outputs are no numbers"
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
        for index, one in enumerate(self.kept.values[f"{name} sites"]):
            if (alone := self.kept.values.get(f"{name} alone {index}")) is None:
                continue
            costs = {quantity: self.kept.values[f"{name} {quantity} {one['structure']}"] for quantity in self.quantities}
            costs["memory"] = one["bytes"] / self.bytes
            if math.isfinite(alone["distance"]):
                kind = f"{number} {one['structure']}"
                found.append(Site(number, index, tuple(one["depths"]), tuple(one["paths"]), kind, costs, alone["distance"]))
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
                self.dense, candidate, self.data.fitted, self.layers, self.seed, self.example_inputs, fit=False
            )
        return self.unfitted[number]

    def fitted(self, number: int) -> Variant:
        """The variant, fitted, and kept where there is a folder."""
        candidate = self.candidates[number]
        self.say(f"fitting {short_spec(candidate)}")
        variant = build_variant(self.dense, candidate, self.data.fitted, self.layers, self.seed, self.example_inputs)
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
            self.dense, candidate, self.data.fitted, self.layers, self.seed, self.example_inputs, fit=not candidate.calibrates
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
        return beside(self.as_dense(), [other], quantity, self.data.window, min(self.seconds, given), HURRIED if hurried else LEAST)

    def as_dense(self) -> Callable[[], AbstractContextManager[nn.Module]]:
        return lambda: contextlib.nullcontext(self.dense)

    def measure_alone(self, number: int, index: int) -> dict[str, Any]:
        """The quality of the dense model with one replacement; what it does to the predictions is kept as a sketch."""
        found = self.quality([self.variant(number)[index]], self.windows, sketch=True)
        assert found.sketch is not None
        self.kept.keep_sketch(sketch_name(self.candidates[number], index), found.sketch)
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
        sketches = [self.kept.sketch(sketch_name(self.candidates[site.candidate], site.number)).numpy() for site in self.sites]
        return JointError.of([site.alone for site in self.sites], cosines_of(sketches))

    def uniform_choices(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Each candidate in all its sites, as a choice, where all were measured."""
        for number in sorted({site.candidate for site in self.sites} - self.partial):
            yield number, frozenset(index for index, site in enumerate(self.sites) if site.candidate == number)

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
        return [self.variant(self.sites[index].candidate)[self.sites[index].number] for index in sorted(chosen)]

    def label(self, chosen: Collection[int]) -> str:
        """A choice as text."""
        by_candidate: dict[str, list[str]] = {}
        for site in (self.sites[index] for index in sorted(chosen)):
            by_candidate.setdefault(short_spec(self.candidates[site.candidate]), []).append(str(site.number))
        return "; ".join(f"{name}: {' '.join(numbers)}" for name, numbers in by_candidate.items())


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
