"""`plan`: which passes, with which settings, in which layers of a model, for what it is to reach.

Every candidate is applied once to a copy of the model, and each of its sites measured: what it costs, and what it does to the
outputs by itself. A choice of sites is predicted from these (`joint_error`), made (`choosing`), measured as a hybrid, and the
prediction corrected by what was measured, until the choice stays. The recipe is then applied to the model as any recipe is, and
measured on text that nothing was fitted or chosen on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from retrofit.anatomy.inspection import read_anatomy
from retrofit.errors import PlanningError, RetrofitError
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_memory import own_bytes
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.usable_models import require_in_memory, require_module, require_uncompiled, require_values, transformer_inside
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import AnyPass
from retrofit.planning.choosing import Problem, choose, least_cost
from retrofit.planning.costs import CHOICES, SECONDS, Deadline, OutOfTime, measurable, trains
from retrofit.planning.measurements import KeptMeasurements
from retrofit.planning.measuring import NOT_TRIED, Measurements, Site
from retrofit.planning.model_plan import ModelPlan, PlannedLayers, PlannedRecipe, UniformSetting, Worth, candidate_rows
from retrofit.planning.planning_data import TokenCounts, planning_data
from retrofit.planning.prediction import JointError, MeasuredTogether
from retrofit.planning.targets import Target, parse_targets
from retrofit.planning.variants import candidates_of, layers_by_depth, limited_to, rewritten_copy, short_spec
from retrofit.preview import plan_of, prepare_model
from retrofit.process import serialized
from retrofit.training.teaching import hash_settings, hash_weights

ROUNDS = 6  # of choosing and measuring
POINTS = 7  # of the front
HALVINGS = 9  # in looking for the cost at which a loss is reached
SAME = 1e-6


@serialized
def plan(
    model: nn.Module,
    calibration: Any,
    targets: str | Sequence[str],
    *,
    passes: AnyPass | str | Sequence[AnyPass | str] | None = None,
    tokenizer: Any = None,
    example_inputs: Any = None,
    folder: str | Path | None = None,
    tokens: int | None = None,
    minutes: float | None = None,
    seconds: float = SECONDS,
    measure: bool = True,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelPlan:
    """Recipes for `model`, one for each of the `targets` (`"decode 1.5x"`, `"loss +0.05"`), with what they were predicted to be
    worth and were measured to be; `model` is left as it was. Without targets only the candidates are measured.

    `calibration` is text, token ids (windows, length) or batches: passes are fitted on some of it (`tokens`), choices are made on
    some, and the rest is for the report. `passes` are the candidates: objects, specs, or names of passes that propose settings; all
    installed passes that propose some where not given. `folder` keeps the measurements, so that an interrupted plan goes on. After
    the `minutes` the plan is the best so far, and says what they did not suffice for: they decide on how many tokens is fitted and
    measured, only costs that a target names are timed, and a pass is fitted in a few layers first, which the others are taken to
    be like. A time is measured for `seconds`. With `measure=False` no recipe is applied.
    A target that cannot be reached is among the plan's `unreached`. Raises `PlanningError` where none can be, where one cannot be
    read, or nothing fits.
    """
    deadline = Deadline(minutes)
    progress = progress or (lambda stage: None)
    wanted = parse_targets([targets] if isinstance(targets, str) else list(targets)) if targets else ()
    candidates = candidates_of(passes)
    require_module(model)
    require_uncompiled(model)
    require_in_memory(model, "measured")
    require_values(model, "measured", "load its weights first")
    part = transformer_inside(model, example_inputs)
    if recipe_storage.stored_recipe(part):
        raise PlanningError(
            "the model is already rewritten",
            why=f"its recipe is {', '.join(recipe_storage.stored_recipe(part))}",
            remedy="plan for the dense model",
            code="rewritten",
        )
    with evaluation_mode(part):
        dense, inputs, program = prepare_model(part, example_inputs, "module", progress)
        place = None if folder is None else Path(folder)
        counts = token_counts(dense, tokens, deadline, None if force else place)
        data = planning_data(dense, calibration, tokenizer, counts, inputs)
        quantities = quantities_of(dense, data.window, wanted)
        if deadline.is_set:
            quantities = tuple(name for name in quantities if name in wanted_costs(wanted, quantities)) or quantities[:1]
        facts = {
            "model": hash_weights(dense),
            "settings": hash_settings(dense),
            "device": device_of(dense).type,
            "text": data.fingerprint,
            "seed": seed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        kept = KeptMeasurements(place, facts, force=force)
        layers = layers_by_depth(read_anatomy(dense, program))
        try:
            with deadline.limit(deadline.left(CHOICES)):
                measurements = Measurements(
                    dense,
                    data,
                    layers,
                    candidates,
                    quantities,
                    kept,
                    seed=seed,
                    example_inputs=inputs if example_inputs is not None else None,
                    seconds=seconds,
                    deadline=deadline,
                    program=program,
                    progress=progress,
                )
        except OutOfTime:
            raise PlanningError(
                "the time limit ended before the dense model was measured", remedy="raise --minutes, or use less text"
            ) from None
        require_quality(measurements, wanted)
        kept.put("tokens", list(dataclasses.astuple(counts)))
        measurements.measure_candidates(wanted_costs(wanted, quantities), [limits_of(one) for one in wanted])
        return Planner(measurements, wanted, progress).planned(measure)


def token_counts(model: nn.Module, tokens: int | None, deadline: Deadline, folder: Path | None) -> TokenCounts:
    """How many tokens are used; in a limited time as many as those that are kept were measured on."""
    kept = KeptMeasurements.value_in(folder, "tokens") if deadline.is_set else None
    if kept is None:
        return TokenCounts.of(model, tokens, deadline.seconds)
    fitted, measured, held_out = kept
    return TokenCounts(tokens or fitted, measured, held_out)


def quantities_of(model: nn.Module, window: dict[str, Any], targets: Sequence[Target]) -> tuple[str, ...]:
    """The times that are measured: decoding where the model generates, a forward, and a training step where a target names it."""
    named = {name for target in targets for name in target.costs}
    known = measurable(model, window)
    for name in ("decode", "train"):
        if name in named and (name not in known or (name == "train" and not trains(model, window))):
            why = "the model does not generate" if name == "decode" else "no gradient of its outputs can be computed"
            raise PlanningError(f"{name} cannot be a target of this model", why=why, remedy='try "prefill 1.2x"')
    return tuple(name for name in known if name != "train" or name in named)


def wanted_costs(targets: Sequence[Target], quantities: Sequence[str]) -> tuple[str, ...]:
    """The costs of which a candidate has to save some: those that a target limits; the first, where one limits none."""
    return tuple(dict.fromkeys(name for target in targets for name in target.costs or quantities[:1]))


def require_quality(measurements: Measurements, targets: Sequence[Target]) -> None:
    """Raises `PlanningError` where a target limits a quality that the outputs do not have."""
    for target in targets:
        limit = target.quality
        if limit is not None and limit.quantity == "loss" and measurements.windows.dense_loss is None:
            logits = measurements.windows.are_logits
            why = measurements.data.no_loss if logits else "its outputs are not logits of a vocabulary"
            remedy = "use text or token ids that the model has a loss for, or limit a cost"
            if not logits:
                remedy = 'limit the error of the outputs, as in "error +0.1"'
            raise PlanningError(f"the target {str(target)!r}: the model has no loss here", why=why, remedy=remedy, code="no-loss")
        if limit is not None and limit.quantity == "error" and measurements.windows.are_logits:
            raise PlanningError(f"the target {str(target)!r}: the outputs are logits", remedy='limit the loss, as in "loss +0.05"')


class Planner:
    """The choice for each target, from what was measured."""

    def __init__(self, measurements: Measurements, targets: Sequence[Target], progress: Callable[[str], None]) -> None:
        self.measurements, self.targets, self.say = measurements, tuple(targets), progress
        self.deadline = measurements.deadline
        self.sites: list[Site] = measurements.sites
        if not self.sites:
            reasons = "; ".join(f"{name}: {why}" for name, why in measurements.left_out.items())
            if any(why.startswith(NOT_TRIED) for why in measurements.left_out.values()):
                remedy = "raise --minutes (measurements are kept), or use fewer candidates"
                raise PlanningError("no candidate could be measured within the time limit", why=reasons, remedy=remedy)
            raise PlanningError(
                "no candidate fits the model and meets the target",
                why=reasons,
                remedy="choose other passes or settings with --pass",
                code="no-candidate",
            )
        self.cosines = self.pairs = measurements.joint_error()
        self.known: dict[tuple[int, ...], MeasuredTogether] = {}
        self.timed: dict[str, dict[frozenset[int], float]] = {name: {} for name in measurements.quantities}
        self.apart: set[frozenset[str]] = set()  # names of passes that cannot be in one recipe
        for chosen, kept in measurements.measured_together():
            self.learn(measurements.as_measured(chosen, kept))

    def planned(self, measure: bool) -> ModelPlan:
        """The plans for all targets that can be reached, the front, the uniform settings."""
        choices: dict[Target, frozenset[int]] = {}
        unreached: dict[Target, PlanningError] = {}
        for target in self.targets:
            try:
                self.require_reachable(target)
                choices[target] = self.settle(target)
            except PlanningError as error:
                unreached[target] = error
        for target, chosen in choices.items():
            choices[target] = self.choice_at_last(target, chosen)
        planned = []
        for target, chosen in choices.items():
            try:
                self.require_finite(target, chosen)
                planned.append(self.planned_recipe(target, chosen, measure))
            except PlanningError as error:
                unreached[target] = error
        uniform = self.uniform_settings()
        if unreached and not planned:
            nearest = next(iter(unreached.values()))
            nearest.why += f"; in all layers: {'; '.join(': '.join(row) for row in candidate_rows(uniform, self.main()))}"
            raise nearest
        held_out = self.measurements.held_out
        return ModelPlan(
            tuple(planned),
            tuple(uniform),
            tuple(self.front()),
            self.main(),
            held_out.are_logits,
            held_out.dense_loss,
            {name: self.measurements.kept.values[f"dense {name}"] for name in self.measurements.quantities},
            dict(self.measurements.left_out),
            unreached,
        )

    # Predicting.

    def joint_error(self, near: float) -> JointError:
        """The prediction of what sites do together, as fitted to what was measured near a distance."""
        return self.cosines.fitted(list(self.known.values()), near)

    def problem(self, without: Collection[str] = ()) -> Problem:
        """What is to be chosen from, but for the sites of some passes, which cost more than any limit allows."""
        problem = self.measurements.problem(self.cosines.matrix, self.timed)
        barred = numpy.asarray([self.pass_name(site) in without for site in self.sites])
        return (
            problem if not barred.any() else dataclasses.replace(problem, costs={**problem.costs, "barred": barred.astype(float)})
        )

    def pass_name(self, site: Site) -> str:
        return self.measurements.candidates[site.candidate].name

    def learn(self, measured: MeasuredTogether) -> None:
        self.known[measured.chosen] = measured
        self.cosines = self.pairs.counted([site.candidate for site in self.sites], list(self.known.values()))

    def main(self, target: Target | None = None) -> str:
        """The cost that is to fall: the first that the (first) target limits, else that of decoding, else of a forward."""
        target = target or next(iter(self.targets), None)
        return next(iter(() if target is None else target.costs), self.measurements.quantities[0])

    def worth(self, chosen: Collection[int]) -> Worth:
        """What a choice is predicted to be worth; what it loses is what it was measured to lose, where it was."""
        problem = self.problem()
        costs = {name: 1.0 + problem.cost(name, chosen) for name in problem.costs}
        measured = self.known.get(tuple(sorted(chosen)))
        if measured is not None:
            return Worth(costs, self.told(measured.distance), measured.added_loss)
        joint = self.joint_error(max(self.cosines.expected(chosen, list(self.known.values())), SAME))
        distance = joint.distance(chosen)
        return Worth(costs, self.told(distance), self.loss(joint, distance))

    def loss(self, joint: JointError, distance: float) -> float | None:
        return None if self.measurements.windows.dense_loss is None else joint.added_loss(distance)

    def told(self, distance: float) -> float:
        """A distance as it is reported: the relative error, not its square."""
        return distance if self.measurements.windows.are_logits else math.sqrt(max(0.0, distance))

    def lost(self, target: Target, chosen: Collection[int]) -> float:
        """The quality that a target limits, of a choice as it is predicted."""
        worth = self.worth(chosen)
        assert target.quality is not None
        if target.quality.quantity == "error":
            return worth.distance
        assert worth.added_loss is not None
        return worth.added_loss

    # Choosing.

    def require_reachable(self, target: Target) -> None:
        """Raises `PlanningError`, which says what can be reached, where no choice keeps the target's limits on costs."""
        problem, limits = self.problem(), limits_of(target)
        for name, most in limits.items():
            least = least_cost(problem, name, {})
            reached = 1.0 + (problem.cost(name, least) if least is not None else 0.0)
            if reached > 1.0 + most + SAME:
                raise self.unreachable(target, name, reached)
        if len(limits) > 1 and choose(problem, limits) is None:
            name = next(iter(limits))
            least = least_cost(problem, name, limits)
            reached = 1.0 + (problem.cost(name, least) if least is not None else 0.0)
            raise self.unreachable(target, name, reached, " within the other limits")

    def unreachable(self, target: Target, name: str, reached: float, within: str = "") -> PlanningError:
        speed = name in ("decode", "prefill")
        best = f"{1 / reached:.2f}x" if speed else f"{reached:.2f}x"
        fits = reached < 1 - SAME
        return PlanningError(
            f"the target {str(target)!r} cannot be reached",
            why=f"with these candidates {name} {best} is the most{within}"
            if fits
            else f"no candidate lowers what {name} costs{within}",
            remedy=(f'ask for at most "{name} {best}", or name' if fits else "name") + " other passes or settings with --pass",
            code="out-of-reach",
        )

    def choice(self, target: Target) -> frozenset[int]:
        """The best choice for a target, of those whose passes can be in one recipe; raises `PlanningError` where there is none."""
        while True:
            found = self.best_without(target, frozenset())
            if found is None:
                self.require_reachable(target)
                raise self.nothing_together(target)
            if not found:
                raise self.nothing_within(target)
            if not self.clash(found):
                return found

    def nothing_together(self, target: Target) -> PlanningError:
        """Where every limit can be kept, but not all of them at once."""
        limits = limits_of(target)
        least = choose(self.problem(), limits)
        if target.quality is not None and least is not None:
            name, lost = target.quality.quantity, self.lost(target, least)
            why = f"meeting the other limits adds {name} +{lost:.2g}"
            return PlanningError(
                f"the target {str(target)!r} cannot be reached",
                why=why,
                remedy=f'allow "{name} +{lost:.2g}", or name other passes',
                code="out-of-reach",
            )
        pairs = "; ".join(" and ".join(sorted(pair)) for pair in self.apart)
        return PlanningError(
            f"the target {str(target)!r} cannot be reached",
            why=f"the passes that reach it cannot be combined: {pairs}",
            remedy="relax the target, or add other passes or settings",
            code="out-of-reach",
        )

    def best_without(self, target: Target, without: frozenset[str]) -> frozenset[int] | None:
        found = self.best(target, without)
        names = set() if found is None else {self.pass_name(self.sites[index]) for index in found}
        clash = next((pair for pair in self.apart if pair <= names), None)
        if found is None or clash is None:
            return found
        others = [one for name in sorted(clash) if (one := self.best_without(target, without | {name})) is not None]
        problem = self.problem()
        return min(
            others, key=lambda one: problem.cost(self.main(target), one) if target.quality else problem.loss(one), default=None
        )

    def best(self, target: Target, without: frozenset[str]) -> frozenset[int] | None:
        """The choice that loses least within the limits on costs; with a limit on the loss the fastest that keeps it."""
        problem = self.problem(without)
        limits = {**limits_of(target), **({"barred": 0.5} if without else {})}
        if target.quality is None:
            return choose(problem, limits)
        main = self.main(target)
        if main in limits:  # the least loss within the limits keeps the other limit, or nothing does
            found = choose(problem, limits)
            return found if found is not None and self.lost(target, found) <= target.quality.value else None
        fastest = least_cost(problem, main, limits)
        if fastest is None:
            return None
        low, high = problem.cost(main, fastest), 0.0
        best: frozenset[int] = frozenset()
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = choose(problem, {**limits, main: middle}, [best])
            if found is not None and self.lost(target, found) <= target.quality.value:
                best, high = found, problem.cost(main, found)
            else:
                low = middle
        return best

    def settle(self, target: Target, *, timing: bool = True) -> frozenset[int]:
        """The choice for a target once measuring it no longer changes it; its time is measured too where `timing`."""
        chosen: frozenset[int] = frozenset()
        for _ in range(ROUNDS):
            self.say(f"choosing for {target}")
            try:
                following = self.choice(target)
            except PlanningError:
                if chosen:  # what was predicted to reach it was measured not to
                    break
                raise
            if following == chosen:
                break
            chosen = following
            try:
                with self.deadline.limit(self.deadline.left(CHOICES)):
                    self.measure(target, chosen, timing)
            except OutOfTime:
                break
            if not self.is_finite(chosen):
                break
        return chosen

    def measure(self, target: Target, chosen: frozenset[int], timing: bool) -> None:
        """The predictions take account of what a choice was measured to lose, and where `timing` to take."""
        predicted = self.worth(chosen).distance
        if not self.measurements.is_estimated(chosen):
            self.learn(self.measurements.together(chosen))
            self.say(f"distance {self.worth(chosen).distance:.3f}, predicted {predicted:.3f}")
        for name in (limits_of(target) or (self.main(target),)) if timing and self.is_finite(chosen) else ():
            self.learn_time(name, chosen)

    def choice_at_last(self, target: Target, chosen: frozenset[int]) -> frozenset[int]:
        """The choice for a target when all targets have been timed, by which one that was settled on may just miss its own."""
        with suppress(PlanningError):  # where none reaches it any more, what was settled on is the nearest
            chosen = self.settle(target, timing=False)
        return self.best_measured(target, chosen)

    def best_measured(self, target: Target, chosen: frozenset[int]) -> frozenset[int]:
        """The best of all choices that were measured, settings in all layers among them; `chosen` where none reaches the target."""
        problem, limits, main = self.problem(), limits_of(target), self.main(target)

        def reaches(one: frozenset[int]) -> bool:
            return (
                self.is_finite(one)
                and problem.is_allowed(one, limits)
                and (target.quality is None or self.lost(target, one) <= target.quality.value)
            )

        def worth(one: frozenset[int]) -> float:
            return self.worth(one).distance if target.quality is None else problem.cost(main, one)

        choices = [chosen] if self.measurements.is_estimated(chosen) else []
        reached = [one for one in (*choices, *map(frozenset, self.known)) if reaches(one)]
        return min(reached, key=worth, default=chosen)

    def is_finite(self, chosen: Collection[int]) -> bool:
        """Whether a choice gives numbers, as far as it was measured."""
        measured = self.known.get(tuple(sorted(chosen)))
        return measured is None or math.isfinite(measured.distance)

    def require_finite(self, target: Target, chosen: Collection[int]) -> None:
        """Raises `PlanningError` where the outputs of a choice contain NaN or Inf."""
        if not self.is_finite(chosen):
            raise PlanningError(
                f"the target {str(target)!r} cannot be reached",
                why=f"with {'; '.join(one.spec() for one in self.recipe(chosen))} the outputs contain NaN or Inf",
                remedy="relax the target, choose other passes with --pass, or plan in float32",
                code="out-of-reach",
            )

    def learn_time(self, name: str, chosen: frozenset[int]) -> None:
        """The prediction of a time takes account of what a choice was measured to take."""
        if name != "memory":
            self.timed[name][chosen] = self.measurements.share_of(chosen, name) - 1.0

    def nothing_within(self, target: Target) -> PlanningError:
        assert target.quality is not None
        added = {index: self.lost(target, {index}) for index in range(len(self.sites))}
        problem = self.problem()
        useful = {index: loss for index, loss in added.items() if problem.cost(self.main(target), {index}) < 0}
        if not useful:
            return self.unreachable(target, self.main(target), 1.0)
        least = min(useful.values())
        return PlanningError(
            f"the target {str(target)!r} cannot be met by any site",
            why=f"the cheapest site costs {target.quality.quantity} +{least:.2g} by itself",
            remedy="allow more, or add milder settings with --pass",
        )

    # Which passes can be in one recipe.

    def clash(self, chosen: Collection[int]) -> bool:
        """Whether two passes of the choice cannot be in one recipe, which is then known."""
        recipe = self.recipe(chosen)
        names = [one.name for one in recipe]
        if len(set(names)) == 1:
            return False
        key = f"fits {'; '.join(one.spec() for one in recipe)}"
        refused = self.measurements.kept.measure(key, lambda: self.first_refused(recipe))
        if refused is None:
            return False
        earlier = {name for name in names[:refused] if name != names[refused]} or {name for name in names if name != names[refused]}
        before = len(self.apart)
        self.apart |= {frozenset({name, names[refused]}) for name in earlier}
        return len(self.apart) > before

    def first_refused(self, recipe: Sequence[AnyPass]) -> int | None:
        """The place of the first pass of a recipe that rewrites less after those before it; None where all fit."""
        try:
            found = plan_of(self.measurements.dense, *recipe, example_inputs=self.measurements.example_inputs)
        except RetrofitError:  # without weights it cannot be seen: the recipe itself will tell
            return None
        return next((place for place, one in enumerate(found.passes) if not one.fits), None)

    # What comes of it.

    def recipe(self, chosen: Collection[int]) -> tuple[AnyPass, ...]:
        """The passes of a choice, each in the layers chosen for it; those that replace whole layers, or none, come last."""
        measurements = self.measurements
        layers = {path for some in measurements.layers.values() for path in some}
        found: list[tuple[int, int, AnyPass]] = []
        for number, candidate in enumerate(measurements.candidates):
            sites = [self.sites[index] for index in sorted(chosen) if self.sites[index].candidate == number]
            if sites:
                depths = [depth for site in sites for depth in site.depths]
                last = int(not depths) + 2 * any(path in layers for site in sites for path in site.paths)
                found.append((last, number, limited_to(candidate, depths) if depths else candidate))
        return tuple(one for _, _, one in sorted(found, key=lambda entry: entry[:2]))

    def planned_recipe(self, target: Target, chosen: frozenset[int], measure: bool) -> PlannedRecipe:
        recipe = self.recipe(chosen)
        measured = None
        with suppress(OutOfTime), self.deadline.limit(self.deadline.left()):
            measured = self.rewritten_worth(recipe) if measure else None
        layers = []
        for number, candidate in enumerate(self.measurements.candidates):
            sites = [self.sites[index] for index in sorted(chosen) if self.sites[index].candidate == number]
            if sites:
                depths = tuple(depth for site in sites for depth in site.depths)
                layers.append(PlannedLayers(short_spec(candidate), depths, tuple(self.told(site.alone) for site in sites)))
        return PlannedRecipe(target, tuple(one.spec() for one in recipe), tuple(layers), self.worth(chosen), measured)

    def rewritten_worth(self, recipe: Sequence[AnyPass]) -> Worth:
        """What the model rewritten by a recipe is worth: its times beside the dense model's, and on the windows held out."""

        def measured() -> dict[str, Any]:
            self.say("rewriting by the recipe")
            one = self.measurements
            try:
                model, _ = rewritten_copy(one.dense, recipe, one.data.fitted, one.seed, one.example_inputs)
            except RetrofitError as error:
                raise PlanningError(
                    f"the recipe does not fit the model: {error.what}",
                    why=error.why,
                    remedy="drop one of its passes with --pass",
                    code="does-not-fit",
                ) from error
            model.eval()
            self.say("measuring the rewritten model")
            costs = {}
            for name in one.quantities:
                _, (costs[name],) = one.beside(lambda: nullcontext(model), name)
            found = one.held_out.measure(model)
            return {"costs": {**costs, "memory": own_bytes(model) / one.bytes}, "distance": found.distance, "loss": found.loss}

        key = f"rewritten {'; '.join(one.spec() for one in recipe)}"
        found = self.measurements.kept.measure(key, measured)
        return Worth(found["costs"], self.told(found["distance"]), self.added(found["loss"], self.measurements.held_out.dense_loss))

    @staticmethod
    def added(loss: float | None, dense: float | None) -> float | None:
        return None if loss is None or dense is None else loss - dense

    def uniform_settings(self) -> list[UniformSetting]:
        """Every candidate in all its sites, as it was measured; its times as they are fitted to everything timed."""
        found, problem = [], self.problem()
        for number, chosen in self.measurements.uniform_choices():
            spec = short_spec(self.measurements.candidates[number])
            if self.measurements.is_estimated(chosen):
                found.append(UniformSetting(spec, self.worth(chosen), None, self.measurements.sampled(number)))
                continue
            costs = {name: 1.0 + problem.cost(name, chosen) for name in problem.costs}
            worths: list[Worth] = []
            for part, windows in (("measured", self.measurements.windows), ("held out", self.measurements.held_out)):
                kept = self.measurements.kept.values[f"{spec} uniform {part}"]
                worths.append(Worth(costs, self.told(kept["distance"]), self.added(kept["loss"], windows.dense_loss)))
            found.append(UniformSetting(spec, worths[0], worths[1]))
        return found

    def front(self) -> list[Worth]:
        """What the best choices are predicted to be worth, from the dense model's cost to the least that can be reached."""
        main, problem = self.main(), self.problem()
        fastest = least_cost(problem, main, {})
        least = 0.0 if fastest is None else problem.cost(main, fastest)
        found, before = [], frozenset[int]()
        for share in numpy.linspace(0, 1, POINTS + 1)[1:]:
            chosen = choose(problem, {main: share * least}, [before])
            if chosen:
                found.append(self.worth(chosen))
                before = chosen
        return found


def limits_of(target: Target) -> dict[str, float]:
    """The most that each limited cost may add to the dense model's share of 1."""
    return {name: most - 1.0 for name, most in target.costs.items()}
