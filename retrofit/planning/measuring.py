"""Measure a model for a plan, each value once: the sites of candidates, candidates in all layers, choices of the solver."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import Any

from torch import nn

from retrofit.errors import CaptureError, DoesNotFitError, PlanningError
from retrofit.inputs.model_memory import own_bytes
from retrofit.passbase.protocol import AnyPass
from retrofit.planning.costs import CHOICES, COSTS, LOSSES, PATIENCE, SECONDS, Deadline, Hybrid, OutOfTime, beside
from retrofit.planning.measurements import (
    NOISE,
    CandidateRecord,
    MeasurementStore,
    Site,
    sampled_name,
    sketch_name,
    spread,
    variant_name,
)
from retrofit.planning.planning_data import PlanningData
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

SAME = 1e-3  # relative to a distance that is measured again
SAMPLE = 4  # sites in which a candidate is fitted first, if the time is limited
NOT_TRIED = "not tried: time limit"
FEW_ROUNDS = "in few rounds"  # suffix of the names of times that were measured in a hurry


class Measurements:
    """All measurements of one model."""

    def __init__(
        self,
        dense: nn.Module,
        data: PlanningData,
        layers: LayerPaths,
        candidates: Sequence[AnyPass],
        quantities: Sequence[str],
        store: MeasurementStore,
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
        self.quantities, self.store, self.seed, self.example_inputs = tuple(quantities), store, seed, example_inputs
        self.seconds, self.progress, self.deadline = seconds, progress, deadline or Deadline(None)
        self.allowance = math.inf  # seconds for one time
        self.fit_seconds: dict[int, float] = {}  # per site, by candidate
        self.variants: dict[int, Variant] = {}
        self.unfitted: dict[int, Variant] = {}
        self.sites: list[Site] = []
        self.left_out: dict[str, str] = {}
        progress("measuring the dense model")
        paths = list(dict.fromkeys(path for layer_paths in layers.values() for path in layer_paths))
        self.windows = MeasuredWindows.of(dense, data.measured, paths, data.shift)
        self.held_out = MeasuredWindows.of(dense, data.held_out, (), data.shift)
        self.bytes = own_bytes(dense)
        self.records = [
            CandidateRecord(number, candidate, store, self.quantities, self.bytes)
            for number, candidate in enumerate(self.candidates)
        ]
        if not self.deadline.is_set:
            for name in store.values.pop(FEW_ROUNDS, []):
                store.values.pop(name, None)

    # Candidates, one after the other.

    def measure_candidates(self, wanted: Collection[str], limits: Sequence[Mapping[str, float]]) -> None:
        """Measure the sites of every candidate that fits and reduces one of the `wanted` costs, as far as the time allows.

        Costs come first, because they do not depend on values: a candidate that saves nothing need not be fitted. Then the first
        setting of every pass is fitted. Of the others follow, for each target in turn, those within its `limits` on costs, with the
        least to spare first, then those closest to them. In a limited time all are first fitted in a few layers. `left_out` names
        what the time did not suffice for.
        """
        known = self.with_costs(wanted)
        self.unfitted.clear()
        saving = []
        for record in self.in_turn(known, wanted, limits):
            if wanted and not any(map(record.saves, wanted)):
                self.left_out[record.name] = f"saves nothing here: {record.least_text(wanted)}"
            else:
                saving.append(record)
        sampled = [record for record in saving if self.sample_of(record)]
        tried: dict[int, float] = {}
        for place, record in enumerate(saving):
            left = self.deadline.left(LOSSES if any(other.has_losses for other in saving) else CHOICES)
            tried[record.number] = fair_share(left, len(saving) - place)
            self.in_time(record, self.measure_sample if record in sampled else self.measure_losses, tried[record.number])
        for record in saving:
            if not record.has_losses and (left := self.deadline.left(LOSSES)) > tried[record.number]:
                self.in_time(record, self.measure_sample if record in sampled else self.measure_losses, left)
        for record in sampled:
            if record.has_losses and self.seconds_of_all(record) < (left := self.deadline.left(LOSSES)):
                self.in_time(record, self.measure_losses, left)
        for record in saving:
            if record.has_losses:
                self.sites += record.choosable()
                self.left_out.pop(record.name, None)
                if text := record.missing_text():
                    self.left_out[record.name] = text

    def with_costs(self, wanted: Collection[str]) -> list[CandidateRecord]:
        """Return the candidates that fit, with their costs, the first setting of every pass first, as far as the time allows.

        Left out are masks that could reduce no `wanted` cost.
        """
        known: list[CandidateRecord] = []
        ordered = firsts_first(self.records)
        for place, record in enumerate(ordered):
            left = self.deadline.left(COSTS) if known else self.deadline.left(LOSSES) / 2  # so that a slow one does not take all
            self.allowance = left / ((len(ordered) - place) * max(1, len(self.quantities)))
            if self.in_time(record, functools.partial(self.measure_costs, wanted=wanted), left) and record.get("sites") is not None:
                known.append(record)
        self.allowance = math.inf
        return sorted(known, key=lambda record: record.number)

    def in_time(self, record: CandidateRecord, measure: Callable[[CandidateRecord], None], seconds: float) -> bool:
        """Measure a candidate within the seconds; return whether it was possible, and note in `left_out` why not."""
        try:
            with self.deadline.limit(seconds):
                return self.fits(record, measure)
        except OutOfTime:
            self.left_out[record.name] = f"{NOT_TRIED}{record.cost_text()}"
            return False

    def fits(self, record: CandidateRecord, measure: Callable[[CandidateRecord], None]) -> bool:
        """Measure a candidate; return whether it fits, and note in `left_out` why not."""
        try:
            if (refused := record.get("refused")) is not None:
                raise PlanningError(refused, code="does-not-fit")
            measure(record)
        except (CaptureError, DoesNotFitError, PlanningError) as error:
            reason = f"{error.matter}: {error.why}" if error.why else error.matter  # the report names the pass
            self.left_out[record.name] = self.store.measure(record.key("refused"), functools.partial(str, reason))
            return False
        return True

    def in_turn(
        self, records: Sequence[CandidateRecord], wanted: Collection[str], limits: Sequence[Mapping[str, float]]
    ) -> list[CandidateRecord]:
        """Return the candidates in the order in which they are fitted."""
        ordered = firsts_first(records)
        count = len({record.candidate.name for record in records})
        firsts, others = ordered[:count], ordered[count:]
        if self.deadline.is_set:  # candidates without a fit are measured fastest
            firsts.sort(key=lambda record: record.candidate.calibrates)

        def to_spare(record: CandidateRecord, limit: Mapping[str, float]) -> float:
            """Return by how much the candidate in all layers saves more than a target requires."""
            return min(1 + most - record.share(quantity) for quantity, most in limit.items())

        def for_target(limit: Mapping[str, float]) -> list[CandidateRecord]:
            return sorted(others, key=lambda record: ((spare := to_spare(record, limit)) < 0, abs(spare)))

        def least_share(record: CandidateRecord) -> float:
            return min((record.share(quantity) for quantity in wanted), default=1.0)

        orders = [for_target(limit) for limit in limits if limit] or [sorted(others, key=least_share)]
        numbers = dict.fromkeys(record.number for in_order in zip(*orders, strict=True) for record in in_order)
        return [*firsts, *(self.records[number] for number in numbers)]

    def measure_costs(self, record: CandidateRecord, wanted: Collection[str]) -> None:
        """Measure the sites of one candidate, and the times that they add, on an unfitted variant: all only if it is to be fitted.

        Masks have no such variant, and are fitted only if they reduce a `wanted` cost when everything is masked.
        """
        if record.candidate.only_masks and wanted and record.get("sites") is None:
            least = {name: self.fully_masked_share(record, name) for name in wanted if name in self.quantities}
            if not any(share < 1 - NOISE for share in least.values()):
                texts = [f"{name} would take {share:.2f} times as much" for name, share in least.items()]
                why = f"even with every input zero, {', '.join(texts)}" if texts else "masks save no memory"
                self.left_out[record.name] = f"saves nothing here: {why}"
                return
        self.store.measure(record.key("sites"), lambda: self.describe(self.unfitted_variant(record)))
        self.measure_times(record, self.unfitted_variant, [name for name in self.quantities if name in wanted])
        if not wanted or any(map(record.saves, wanted)):
            self.measure_times(record, self.unfitted_variant, self.quantities)

    def measure_losses(self, record: CandidateRecord) -> None:
        """Measure the effect on the outputs of each site of one candidate by itself, and of all together."""
        if not record.is_fitted:  # a fit may find more to change than was visible without it
            self.store.put(record.key("sites"), self.describe(self.variant(record)))
            self.measure_times(record, self.variant, self.quantities)
        self.measure_uniform(record)
        count = len(record.sites)
        for index in spread(count) if self.deadline.is_set else range(count):
            self.progress(f"{record.name}: site {index + 1} of {count} by itself")
            self.store.measure(record.key("alone", index), functools.partial(self.measure_alone, record, index))

    def sample_of(self, record: CandidateRecord) -> list[int]:
        """Return the depths in which a candidate is fitted first; none if these are all, or time is not limited."""
        sites = record.sites
        chosen = [sites[index]["depths"] for index in spread(len(sites))[:SAMPLE]]
        fitted_late = record.candidate.calibrates and not record.candidate.only_masks
        only_some = self.deadline.is_set and fitted_late and len(sites) > SAMPLE and all(chosen)
        return [depth for depths in chosen for depth in depths] if only_some else []

    def measure_sample(self, record: CandidateRecord) -> None:
        """Measure the effect on the outputs of a few sites of one candidate, each by itself and together."""
        if record.is_fitted or record.get("sampled together") is not None:
            return
        began = monotonic()
        few = limited_to(record.candidate, self.sample_of(record))
        self.progress(f"fitting {short_spec(few)}")
        variant = self.built(few)
        self.fit_seconds[record.number] = (monotonic() - began) / len(variant)
        index_of = {tuple(site["depths"]): index for index, site in enumerate(record.sites)}
        if any(replacement.depths not in index_of for replacement in variant):  # a fit may find more to change
            return
        numbers = [index_of[replacement.depths] for replacement in variant]
        for index, replacement in zip(numbers, variant, strict=True):
            self.progress(f"{record.name}: site {index + 1} by itself")
            measure = functools.partial(self.alone, replacement, sampled_name(record.candidate, index))
            self.store.measure(record.key("sampled", index), measure)

        together = record.key("sampled together")
        self.store.measure(together, lambda: {**self.quality(variant, self.windows).figures, "sites": numbers})

    def seconds_of_all(self, record: CandidateRecord) -> float:
        """Return an estimate of the time to fit one candidate in all its layers, from that of a few."""
        return self.fit_seconds.get(record.number, 0.0) * len(record.sites)

    # Variants.

    def variant(self, record: CandidateRecord) -> Variant:
        """Return the candidate applied to the whole model, split by layer; it is built again after an interruption."""
        if record.number not in self.variants:
            self.variants[record.number] = self.restored(record) or self.fitted(record)
        return self.variants[record.number]

    def unfitted_variant(self, record: CandidateRecord) -> Variant:
        """Return the variant with its values before fitting; if nothing is fitted, the variant itself.

        For masks it is the fitted variant: their savings depend on the thresholds.
        """
        if not record.candidate.calibrates or record.candidate.only_masks:
            return self.variant(record)
        if record.number not in self.unfitted:
            self.progress(f"building {record.name}")
            self.unfitted[record.number] = self.built(record.candidate, fit=False)
        return self.unfitted[record.number]

    def built(self, candidate: AnyPass, *, fit: bool = True) -> Variant:
        return build_variant(
            self.dense, candidate, self.data.fitted, self.layers, self.seed, self.example_inputs, self.program, fit=fit
        )

    def fitted(self, record: CandidateRecord) -> Variant:
        """Return the variant, fitted; it is stored if there is a folder."""
        self.progress(f"fitting {record.name}")
        variant = self.built(record.candidate)
        if (file := self.store.file(variant_name(record.candidate))) is not None:
            save_variant(file, variant, self.dense)
        return variant

    def restored(self, record: CandidateRecord) -> Variant | None:
        """Return the variant with its stored values; None if there are none, or its measurements differ from the stored ones."""
        file = self.store.file(variant_name(record.candidate))
        if file is None or not file.is_file():
            return None
        self.progress(f"reading {record.name} again")
        variant = self.built(record.candidate, fit=not record.candidate.calibrates)
        if not restore_variant(file, variant, self.dense):
            return None
        before = record.get("alone", 0)
        same = before is None or math.isclose(self.quality(variant[:1], self.windows).distance, before["distance"], rel_tol=SAME)
        return variant if same else None

    def describe(self, variant: Variant) -> list[dict[str, Any]]:
        """Return a description of each replacement of a candidate, without its modules."""
        return [
            {
                "depths": list(replacement.depths),
                "paths": list(replacement.paths),
                "bytes": added_bytes(self.dense, replacement),
                "structure": short_hash(structure(replacement).encode()),
            }
            for replacement in variant
        ]

    # Times.

    def measure_times(
        self, record: CandidateRecord, variant: Callable[[CandidateRecord], Variant], quantities: Collection[str]
    ) -> None:
        """Measure what a site of each structure of one candidate adds to some of the dense model's times, as shares of them."""
        members: dict[str, list[int]] = {}
        for index, site in enumerate(record.sites):
            members.setdefault(site["structure"], []).append(index)

        def added(quantity: str, indices: list[int]) -> float:
            replacements = [variant(record)[index] for index in indices]
            self.progress(f"{record.name}: timing {quantity}")
            return (self.share(replacements, quantity) - 1.0) / len(indices)

        for kind, indices in members.items():
            for quantity in quantities:
                self.measure_time(record.key(quantity, kind), functools.partial(added, quantity, indices))

    def fully_masked_share(self, record: CandidateRecord, quantity: str) -> float:
        """Return the least time that masks in the candidate's sites can reach, as a share of the dense model's."""
        candidate = record.candidate
        dial = candidate.recovery.dial
        if dial is None:
            return 0.0

        def share() -> float:
            variant = self.built(candidate, fit=False)
            for replacement in variant:
                for module in replacement.modules.values():
                    dial.turn(module, math.inf)
            self.progress(f"{record.name}: timing {quantity} with every input zero")
            return self.share(variant, quantity)

        values = [getattr(candidate, field.name) for field in dataclasses.fields(candidate)]
        kind = ", ".join([candidate.name, *(str(value) for value in values if isinstance(value, (bool, str)))])  # not how much
        return self.measure_time(f"{quantity} fully masked, {kind}", share)

    def measure_time(self, name: str, action: Callable[[], float]) -> float:
        """Return the time `name`, measured by `action` if not known; a time from few rounds is marked as such."""

        def measured() -> float:
            if self.seconds_given() < self.seconds:
                self.store.values.setdefault(FEW_ROUNDS, []).append(name)
            return action()

        return float(self.store.measure(name, measured))

    def share(self, replacements: Sequence[Replacement], quantity: str) -> float:
        """Return the time of a hybrid as a share of the dense model's, measured alternately."""
        base, (share,) = self.beside(lambda: hybrid(self.dense, replacements), quantity)
        self.store.measure(f"dense {quantity}", lambda: base)
        return share

    def seconds_given(self) -> float:
        """Return the seconds for timing each of two models, including patience."""
        return min(self.allowance, self.deadline.left() / 4) / (2 * PATIENCE)

    def beside(self, other: Hybrid, quantity: str) -> tuple[float, list[float]]:
        """Return the dense model's time and another's as a share of it, from fewer rounds if little time is left."""
        given = self.seconds_given()
        return beside(
            lambda: contextlib.nullcontext(self.dense),
            [other],
            quantity,
            self.data.window,
            min(self.seconds, given),
            given < self.seconds,
        )

    # Losses.

    def measure_alone(self, record: CandidateRecord, index: int) -> dict[str, Any]:
        """Return the quality of the dense model with one replacement; its effect on the predictions is stored as a sketch."""
        return self.alone(self.variant(record)[index], sketch_name(record.candidate, index))

    def alone(self, replacement: Replacement, sketch: str) -> dict[str, Any]:
        """Return the quality of the dense model with one replacement, and store its sketch by that name."""
        found = self.quality([replacement], self.windows, sketch=True)
        assert found.sketch is not None
        self.store.keep_sketch(sketch, found.sketch)
        return found.figures

    def quality(self, replacements: Sequence[Replacement], windows: MeasuredWindows, *, sketch: bool = False) -> Quality:
        paths = [path for replacement in replacements for path in replacement.paths]
        with hybrid(self.dense, replacements) as model:
            return windows.measure(model, paths, sketch=sketch)

    def measure_uniform(self, record: CandidateRecord) -> None:
        """Measure the candidate in all its sites, on the windows for measuring and on the held-out ones."""
        for name, windows in (("measured", self.windows), ("held out", self.held_out)):

            def uniform(windows: MeasuredWindows = windows) -> dict[str, Any]:
                self.progress(f"{record.name}: in all layers")
                return self.quality(self.variant(record), windows).figures

            self.store.measure(record.key("uniform", name), uniform)

    # Choices: sites of several candidates together.

    def together(self, chosen: Collection[int]) -> dict[str, Any]:
        """Return the measured effect of a choice on the outputs."""

        def measured() -> dict[str, Any]:
            self.progress(f"measuring {len(chosen)} sites together")
            return self.quality(self.replacements(chosen), self.windows).figures

        found: dict[str, Any] = self.store.measure(f"together {self.label(chosen)}", measured)
        return found

    def share_of(self, chosen: Collection[int], quantity: str) -> float:
        """Return the measured time of a choice as a share of the dense model's."""

        def measured() -> float:
            self.progress(f"timing {quantity} of {len(chosen)} sites together")
            return self.share(self.replacements(chosen), quantity)

        return self.measure_time(f"{quantity} {self.label(chosen)}", measured)

    def replacements(self, chosen: Collection[int]) -> list[Replacement]:
        """Return the replacements of a choice; for a candidate that was not fitted in all layers, ones that take the same time."""
        found = []
        for site in (self.sites[index] for index in sorted(chosen)):
            record = self.records[site.candidate]
            found.append((self.variant if record.is_fitted else self.unfitted_variant)(record)[site.number])
        return found

    def label(self, chosen: Collection[int]) -> str:
        """Return a choice as text."""
        by_candidate: dict[str, list[str]] = {}
        for site in (self.sites[index] for index in sorted(chosen)):
            by_candidate.setdefault(self.records[site.candidate].name, []).append(str(site.number))
        return "; ".join(f"{name}: {' '.join(numbers)}" for name, numbers in by_candidate.items())


def fair_share(seconds: float, count: int) -> float:
    """Return the seconds for the first of `count` items: more than an equal share, since most need less."""
    return 2 * seconds / (count + 1)


def firsts_first(records: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    """Return the candidates, the first setting of every pass before the others."""
    names = [record.candidate.name for record in records]
    firsts = [record for place, record in enumerate(records) if names[place] not in names[:place]]
    return [*firsts, *(record for record in records if record not in firsts)]
