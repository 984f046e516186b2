"""`plan`: choose passes, settings and layers of a model for given targets.

Every candidate is applied once to a copy of the model, and each of its sites is measured: its costs, and its effect on the outputs
by itself. From these the effect of a choice of sites is predicted (`prediction`). The best choice (`choosing`) is measured as a
hybrid, and the prediction corrected by the measurements, until the choice no longer changes. The recipe is then applied to the
model like any other and measured on text used for neither fit nor choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from time import monotonic
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
from retrofit.planning.costs import CHOICES, FRONT, SECONDS, Deadline, OutOfTime, measurable, trains
from retrofit.planning.measurements import MeasurementStore
from retrofit.planning.measuring import NOT_TRIED, Measurements, fair_share
from retrofit.planning.model_plan import ModelPlan, PlannedLayers, PlannedRecipe, UniformSetting, Worth, candidate_rows
from retrofit.planning.planning_data import TokenCounts, planning_data
from retrofit.planning.prediction import SAME, Choice, Predictor
from retrofit.planning.targets import QUANTITIES, Target, parse_targets
from retrofit.planning.variants import candidates_of, layers_by_depth, rewritten_copy, short_spec
from retrofit.preview import plan_of, prepare_model
from retrofit.process import serialized
from retrofit.surgery.dequantization import refuse_packed
from retrofit.training.teaching import hash_settings, hash_weights

ROUNDS = 6  # of choosing and measuring
POINTS = 7  # of the front
HALVINGS = 9  # of the search for the cost at which a loss is reached
SOLUTIONS = 40  # the time left is divided by this for each choice


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
    """Return recipes for `model`, one for each of the `targets` (`"decode 1.5x"`, `"loss +0.05"`), with predicted and measured
    costs and losses; `model` is unchanged. Without targets only the candidates are measured.

    `calibration` is text, token ids (windows, length) or batches: some of it is for fitting passes (`tokens`), some for choosing,
    and the rest for the report. `passes` are the candidates: objects, specs, or names of passes that propose settings; by default
    all installed passes that propose some. `folder` stores the measurements, so that an interrupted plan can be resumed. After
    `minutes` the plan is the best so far, and reports what was left out: the limit decides the number of tokens for fitting and
    measuring, only costs named in a target are timed, and a pass is fitted first in a few layers, from which the others are
    estimated. Each time is measured for `seconds`. With `measure=False` no recipe is applied.

    Targets that cannot be reached are in the plan's `unreached`. Raises `PlanningError` if none can be reached, one cannot be
    parsed, or nothing fits.
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
    refuse_packed(part, "rewritten")
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
        counts = None if force else stored_counts(place, tokens)
        data = planning_data(dense, calibration, tokenizer, inputs, counts=counts, tokens=tokens, seconds=deadline.seconds)
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
        store = MeasurementStore(place, facts, force=force)
        layers = layers_by_depth(read_anatomy(dense, program))
        try:
            with deadline.limit(deadline.left(CHOICES)):
                measurements = Measurements(
                    dense,
                    data,
                    layers,
                    candidates,
                    quantities,
                    store,
                    seed=seed,
                    example_inputs=inputs if example_inputs is not None else None,
                    seconds=seconds,
                    deadline=deadline,
                    program=program,
                    progress=progress,
                )
        except OutOfTime:
            raise PlanningError(
                "the time limit ended before the dense model was measured",
                remedy=["raise --minutes", "use less text"],
                code="no-time",
                option="minutes",
            ) from None
        require_quality(measurements, wanted)
        store.put("tokens", list(dataclasses.astuple(data.counts)))
        measurements.measure_candidates(wanted_costs(wanted, quantities), [limits_of(target) for target in wanted])
        return Planner(measurements, wanted, progress).planned(measure, token_notes(dense, data.counts, tokens, deadline))


def stored_counts(folder: Path | None, tokens: int | None) -> TokenCounts | None:
    """Return the numbers of tokens of the measurements in a folder; `tokens`, if given, is the number for fitting."""
    stored = MeasurementStore.value_in(folder, "tokens")
    if stored is None:
        return None
    fitted, measured, held_out = stored
    return TokenCounts(tokens or fitted, measured, held_out)


def token_notes(model: nn.Module, counts: TokenCounts, tokens: int | None, deadline: Deadline) -> list[str]:
    """Return a note if measurements made within a time limit are used without one."""
    usual = TokenCounts.of(model, tokens)
    if deadline.is_set or counts.measured >= usual.measured:
        return []
    return [
        f"continues from measurements within a time limit: fitted on {counts.fitted:,} tokens, measured on {counts.measured:,}; "
        f"--force starts over, on {usual.fitted:,} and {usual.measured:,}"
    ]


def quantities_of(model: nn.Module, window: dict[str, Any], targets: Sequence[Target]) -> tuple[str, ...]:
    """Return the times to measure: decoding if the model generates, a forward, and a training step if a target names it."""
    named = {name for target in targets for name in target.costs}
    known = measurable(model, window)
    for name in ("decode", "train"):
        if name in named and (name not in known or (name == "train" and not trains(model, window))):
            why = "the model does not generate" if name == "decode" else "no gradient of its outputs can be computed"
            raise PlanningError(f"{name} cannot be a target of this model", why=why, remedy='try "prefill 1.2x"', code="unmeasured")
    return tuple(name for name in known if name != "train" or name in named)


def wanted_costs(targets: Sequence[Target], quantities: Sequence[str]) -> tuple[str, ...]:
    """Return the costs of which a candidate must reduce one: those limited by targets; the first, for a target that limits none."""
    return tuple(dict.fromkeys(name for target in targets for name in target.costs or quantities[:1]))


def require_quality(measurements: Measurements, targets: Sequence[Target]) -> None:
    """Raises `PlanningError` if a target limits a quality that the outputs do not have."""
    for target in targets:
        limit = target.quality
        if limit is not None and limit.quantity == "loss" and measurements.windows.dense_loss is None:
            if measurements.windows.are_logits:
                why, remedy = measurements.data.no_loss, "use text or token ids that the model has a loss for, or limit a cost"
            else:
                why, remedy = "its outputs are not logits of a vocabulary", 'limit the error of the outputs, as in "error +0.1"'
            raise PlanningError(f"the target {str(target)!r}: the model has no loss here", why=why, remedy=remedy, code="no-loss")
        if limit is not None and limit.quantity == "error" and measurements.windows.are_logits:
            raise PlanningError(
                f"the target {str(target)!r}: the outputs are logits",
                remedy='limit the loss, as in "loss +0.05"',
                code="unmeasured",
            )


class Planner:
    """The choice for each target, from the measurements."""

    def __init__(self, measurements: Measurements, targets: Sequence[Target], progress: Callable[[str], None]) -> None:
        self.measurements, self.targets, self.progress = measurements, tuple(targets), progress
        self.deadline = measurements.deadline
        if not measurements.sites:
            self.refuse_empty()
        self.predictor = Predictor(measurements)
        self.incompatible: set[frozenset[str]] = set()  # names of passes that cannot be in one recipe

    def refuse_empty(self) -> None:
        """Raises `PlanningError` because no candidate was measured."""
        reasons = "\n".join(f"{name}: {why}" for name, why in self.measurements.left_out.items())
        if self.more_time():
            raise PlanningError(
                "no candidate could be measured within the time limit",
                why=reasons,
                remedy=["raise --minutes (measurements are kept)", "use fewer candidates"],
                code="no-time",
                option="minutes",
            )
        raise PlanningError(
            "no candidate fits the model and meets the target",
            why=reasons,
            remedy="choose other passes or settings with --pass",
            code="no-candidate",
        )

    def more_time(self) -> bool:
        """Return whether the time was too short for a candidate."""
        return any(why.startswith(NOT_TRIED) for why in self.measurements.left_out.values())

    def planned(self, measure: bool, notes: Sequence[str] = ()) -> ModelPlan:
        """Return the plans for all reachable targets, the front, the uniform settings. Raises `PlanningError` if there is none."""
        choices: dict[Target, Choice] = {}
        unreached: dict[Target, PlanningError] = {}
        for place, target in enumerate(self.targets):
            seconds = fair_share(self.deadline.left(CHOICES), len(self.targets) - place)
            try:
                self.require_reachable(target)
                choices[target] = self.settle(target, monotonic() + seconds)
            except PlanningError as error:
                unreached[target] = error
        for target, chosen in choices.items():
            choices[target] = self.choice_at_last(target, chosen)
        planned = []
        for place, (target, chosen) in enumerate(choices.items()):
            seconds = fair_share(self.deadline.left(), len(choices) - place)
            try:
                self.require_finite(target, chosen)
                planned.append(self.planned_recipe(target, chosen, measure, seconds))
            except PlanningError as error:
                unreached[target] = error
        uniform = self.predictor.uniform_settings()
        if unreached and not planned:
            raise self.none_reached(next(iter(unreached.values())), uniform)
        held_out = self.measurements.held_out
        return ModelPlan(
            tuple(planned),
            tuple(uniform),
            tuple(self.front()),
            self.main(),
            held_out.are_logits,
            held_out.dense_loss,
            {name: self.measurements.store.values[f"dense {name}"] for name in self.measurements.quantities},
            dict(self.measurements.left_out),
            unreached,
            tuple(notes),
        )

    def none_reached(self, error: PlanningError, uniform: Sequence[UniformSetting]) -> PlanningError:
        """Return the error with the measurements of every candidate, and what was left out."""
        rows = [("in all layers", ": ".join(row)) for row in candidate_rows(uniform, self.main())]
        rows += [("left out", f"{name}: {why}") for name, why in self.measurements.left_out.items()]
        error.why = "\n".join([error.why, *(f"{title}: {text}" for title, text in rows)])
        if self.more_time():
            error.remedies = (*error.remedies, "raise --minutes: the same command continues")
        return error

    def main(self, target: Target | None = None) -> str:
        """Return the cost to reduce: the first that the (first) target limits, else decoding's, else a forward's."""
        target = target or next(iter(self.targets), None)
        return next(iter(() if target is None else target.costs), self.measurements.quantities[0])

    # Choosing.

    def require_reachable(self, target: Target) -> None:
        """Raises `PlanningError`, naming what can be reached, if no choice keeps the target's limits on costs."""
        problem, limits = self.predictor.problem(), limits_of(target)
        for name, most in limits.items():
            reached = least_share(problem, name, {})
            if reached > 1.0 + most + SAME:
                raise self.unreachable(target, name, reached)
        if len(limits) > 1 and self.chosen(problem, limits) is None:
            name = next(iter(limits))
            raise self.unreachable(target, name, least_share(problem, name, limits), " within the other limits")

    def unreachable(self, target: Target, name: str, reached: float, within: str = "") -> PlanningError:
        """Return the refusal for a target whose cost `name` the candidates lower only to the share `reached`."""
        remedy = ["name other passes or settings with --pass"]
        if reached >= 1 - SAME:
            return out_of_reach(target, f"no candidate lowers what {name} costs{within}", remedy)
        best = f"{1 / reached if QUANTITIES[name].kind == 'speed' else reached:.2f}x"
        why = f"with these candidates {name} {best} is the most{within}"
        return out_of_reach(target, why, [f'ask for at most "{name} {best}"', *remedy])

    def chosen(self, problem: Problem, limits: Mapping[str, float], starts: Sequence[Choice] = ()) -> Choice | None:
        """Return the best choice within limits that is found in a share of the time."""
        return choose(problem, limits, starts, self.deadline.left(FRONT) / SOLUTIONS)

    def choice(self, target: Target) -> Choice:
        """Return the best choice for a target whose passes can be in one recipe. Raises `PlanningError` if there is none."""
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
        """Return the refusal for limits that can each be kept, but not all at once."""
        least = self.chosen(self.predictor.problem(), limits_of(target))
        if target.quality is not None and least is not None:
            name = target.quality.quantity
            lost = f"{name} +{self.predictor.lost(name, least):.2g}"
            return out_of_reach(target, f"meeting the other limits adds {lost}", [f'allow "{lost}"', "choose other passes"])
        pairs = "; ".join(" and ".join(sorted(pair)) for pair in self.incompatible)
        why = f"the passes that reach it cannot be combined: {pairs}"
        return out_of_reach(target, why, ["relax the target", "add other passes or settings"])

    def best_without(self, target: Target, without: frozenset[str]) -> Choice | None:
        found = self.best(target, without)
        names = set(map(self.predictor.pass_name, found or ()))
        clash = next((pair for pair in self.incompatible if pair <= names), None)
        if found is None or clash is None:
            return found
        others = [other for name in sorted(clash) if (other := self.best_without(target, without | {name})) is not None]
        problem, main = self.predictor.problem(), self.main(target)
        return min(others, key=lambda other: problem.cost(main, other) if target.quality else problem.loss(other), default=None)

    def best(self, target: Target, without: frozenset[str]) -> Choice | None:
        """Return the choice with the least loss within the limits on costs; with a limit on the loss, the fastest that keeps it."""
        problem = self.predictor.problem(without)
        limits = {**limits_of(target), **({"barred": 0.5} if without else {})}
        if target.quality is None:
            return self.chosen(problem, limits)
        main = self.main(target)
        if main in limits:  # if the least loss within the limits does not keep the other limit, no choice does
            found = self.chosen(problem, limits)
            return found if found is not None and self.keeps_quality(target, found) else None
        fastest = least_cost(problem, main, limits)
        if fastest is None:
            return None
        low, high = problem.cost(main, fastest), 0.0
        best: Choice = frozenset()
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = self.chosen(problem, {**limits, main: middle}, [best])
            if found is not None and self.keeps_quality(target, found):
                best, high = found, problem.cost(main, found)
            else:
                low = middle
        return best

    def keeps_quality(self, target: Target, chosen: Choice) -> bool:
        """Return whether a choice keeps the target's limit on the loss, if it has one."""
        quality = target.quality
        return quality is None or self.predictor.lost(quality.quantity, chosen) <= quality.value

    def settle(self, target: Target, until: float = math.inf, *, timing: bool = True) -> Choice:
        """Return the choice for a target once measuring it no longer changes it; with `timing`, its time is measured too."""
        chosen: Choice = frozenset()
        for _ in range(ROUNDS):
            self.progress(f"choosing for {target}")
            try:
                following = self.choice(target)
            except PlanningError:
                if chosen:  # predicted to reach it, and measured not to
                    break
                raise
            if following == chosen:
                break
            chosen = following
            try:
                with self.deadline.limit(min(self.deadline.left(CHOICES), until - monotonic())):
                    self.measure(target, chosen, timing)
            except OutOfTime:
                break
            if not self.predictor.is_finite(chosen):
                break
        return chosen

    def measure(self, target: Target, chosen: Choice, timing: bool) -> None:
        """Measure the loss of a choice, and with `timing` its times, and correct the predictions."""
        predicted = self.predictor.worth(chosen).distance
        if not self.predictor.is_estimated(chosen):
            self.predictor.learn(chosen, self.measurements.together(chosen))
            self.progress(f"distance {self.predictor.worth(chosen).distance:.3f}, predicted {predicted:.3f}")
        if timing and self.predictor.is_finite(chosen):
            for name in limits_of(target) or (self.main(target),):
                self.predictor.learn_time(name, chosen)

    def choice_at_last(self, target: Target, chosen: Choice) -> Choice:
        """Return the final choice for a target, after all are timed: better times may show that the settled one just misses it."""
        with suppress(PlanningError):  # if none reaches it any more, the settled one is the closest
            chosen = self.settle(target, timing=False)
        return self.best_measured(target, chosen)

    def best_measured(self, target: Target, chosen: Choice) -> Choice:
        """Return the best of all measured choices, including uniform settings; `chosen` if none reaches the target."""
        predictor, limits, main = self.predictor, limits_of(target), self.main(target)
        problem = predictor.problem()

        def reaches(choice: Choice) -> bool:
            return predictor.is_finite(choice) and problem.is_allowed(choice, limits) and self.keeps_quality(target, choice)

        def rank(choice: Choice) -> float:
            return predictor.worth(choice).distance if target.quality is None else problem.cost(main, choice)

        choices = [chosen] if predictor.is_estimated(chosen) else []
        reached = [choice for choice in (*choices, *map(frozenset, predictor.known)) if reaches(choice)]
        return min(reached, key=rank, default=chosen)

    def require_finite(self, target: Target, chosen: Choice) -> None:
        """Raises `PlanningError` if the outputs of a choice contain NaN or Inf."""
        if not self.predictor.is_finite(chosen):
            why = f"with {specs_text(self.predictor.recipe(chosen))} the outputs contain NaN or Inf"
            raise out_of_reach(target, why, ["relax the target", "choose other passes with --pass", "plan in float32"])

    def nothing_within(self, target: Target) -> PlanningError:
        """Return the refusal for a target that allows less than the least loss of any site."""
        assert target.quality is not None
        name, problem, main = target.quality.quantity, self.predictor.problem(), self.main(target)
        useful = [index for index in range(problem.count) if problem.cost(main, {index}) < 0]
        if not useful:
            return self.unreachable(target, main, 1.0)
        why = f"the cheapest site costs {name} +{min(self.predictor.lost(name, {index}) for index in useful):.2g} by itself"
        return out_of_reach(target, why, ["allow more", "add milder settings with --pass"], "cannot be met by any site")

    # Which passes can be in one recipe.

    def clash(self, chosen: Choice) -> bool:
        """Return whether two passes of the choice cannot be in one recipe, and record them in `incompatible`."""
        recipe = self.predictor.recipe(chosen)
        names = [candidate.name for candidate in recipe]
        if len(set(names)) == 1:
            return False
        key = f"fits {specs_text(recipe)}"
        refused = self.measurements.store.measure(key, lambda: self.first_refused(recipe))
        if refused is None:
            return False
        earlier = {name for name in names[:refused] if name != names[refused]} or {name for name in names if name != names[refused]}
        before = len(self.incompatible)
        self.incompatible |= {frozenset({name, names[refused]}) for name in earlier}
        return len(self.incompatible) > before

    def first_refused(self, recipe: Sequence[AnyPass]) -> int | None:
        """Return the position of the first pass of a recipe that rewrites less after those before it; None if all fit."""
        try:
            found = plan_of(self.measurements.dense, *recipe, example_inputs=self.measurements.example_inputs)
        except RetrofitError:  # cannot be determined without weights; applying the recipe will show it
            return None
        return next((place for place, planned in enumerate(found.passes) if not planned.fits), None)

    # The results.

    def planned_recipe(self, target: Target, chosen: Choice, measure: bool, seconds: float) -> PlannedRecipe:
        """Return the plan for a target, with the rewritten model measured if the `seconds` suffice."""
        recipe = self.predictor.recipe(chosen)
        measured = None
        with suppress(OutOfTime), self.deadline.limit(seconds):
            measured = self.rewritten_worth(recipe) if measure else None
        layers = [
            PlannedLayers(
                short_spec(candidate),
                tuple(depth for site in sites for depth in site.depths),
                tuple(self.predictor.shown(site.alone) for site in sites),
            )
            for candidate, sites in self.predictor.by_candidate(chosen)
        ]
        specs = tuple(candidate.spec() for candidate in recipe)
        return PlannedRecipe(target, specs, tuple(layers), self.predictor.worth(chosen), measured)

    def rewritten_worth(self, recipe: Sequence[AnyPass]) -> Worth:
        """Return costs and loss of the model rewritten by a recipe, relative to the dense model's and on held-out windows."""
        measurements = self.measurements

        def measured() -> dict[str, Any]:
            self.progress("rewriting by the recipe")
            data, seed, inputs = measurements.data.fitted, measurements.seed, measurements.example_inputs
            try:
                model, _ = rewritten_copy(measurements.dense, recipe, data, seed, inputs)
            except RetrofitError as error:
                raise PlanningError(
                    f"the recipe does not fit the model: {error.what}",
                    why=error.why,
                    remedy="drop one of its passes with --pass",
                    code="does-not-fit",
                    option="passes",
                ) from error
            model.eval()
            self.progress("measuring the rewritten model")
            found = measurements.held_out.measure(model)
            costs = {}
            for name in measurements.quantities:
                _, (costs[name],) = measurements.beside(lambda: nullcontext(model), name)
            memory = own_bytes(model) / measurements.bytes
            return {"costs": {**costs, "memory": memory}, **found.figures}

        found = measurements.store.measure(f"rewritten {specs_text(recipe)}", measured)
        added = self.predictor.added(found["loss"], held_out=True)
        return Worth(found["costs"], self.predictor.shown(found["distance"]), added)

    def front(self) -> list[Worth]:
        """Return the predicted values of the best choices, from the dense model's cost to the least reachable one."""
        main, problem = self.main(), self.predictor.problem()
        fastest = least_cost(problem, main, {})
        least = 0.0 if fastest is None else problem.cost(main, fastest)
        found, before = [], Choice()
        for place, share in enumerate(numpy.linspace(0, 1, POINTS + 1)[1:]):
            chosen = choose(problem, {main: share * least}, [before], self.deadline.left(FRONT) / (POINTS - place))
            if chosen:
                found.append(self.predictor.worth(chosen))
                before = chosen
        return found


def out_of_reach(target: Target, why: str, remedy: list[str], what: str = "cannot be reached") -> PlanningError:
    return PlanningError(f"the target {str(target)!r} {what}", why=why, remedy=remedy, code="out-of-reach", option="targets")


def least_share(problem: Problem, name: str, limits: Mapping[str, float]) -> float:
    """Return the least of one cost within the limits on the others, as a share of the dense model's; 1 if there is no choice."""
    chosen = least_cost(problem, name, limits)
    return 1.0 if chosen is None else 1.0 + problem.cost(name, chosen)


def specs_text(recipe: Sequence[AnyPass]) -> str:
    return "; ".join(candidate.spec() for candidate in recipe)


def limits_of(target: Target) -> dict[str, float]:
    """Return the upper limit of each cost minus the dense model's share of 1."""
    return {name: most - 1.0 for name, most in target.costs.items()}
