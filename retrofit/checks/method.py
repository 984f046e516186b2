"""The method check: a pass's modules compute the method's formulas, compared with an independent reference.

A pass may bring a reference (`Pass.reference`): for each of its modules the formula as plain loops in float64. The calls of these
modules are recorded in forwards of the rewritten model (many tokens, one token, step by step with a cache), and repeated by the
module and by the reference: in evaluation, in training with the same random draws, and backward. Then the connections between the
modules are compared (which block, which ids, whose loss) and, if the model has just been rewritten, their initial values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrofit.checks.gradients import loss_of
from retrofit.checks.recording import SiteWays, Way, recorder_of
from retrofit.checks.replay import Mode, PerturbedParameters, ReplayResult, own_modules, replay
from retrofit.checks.report import Finding, failed, passed, skipped
from retrofit.checks.subject import Context, Subject
from retrofit.errors import first_line
from retrofit.inputs.module_calls import RecordedCall, first_tensor, watched
from retrofit.inputs.usable_models import is_adapted
from retrofit.passbase.method_reference import (
    DenseModules,
    Inside,
    ModuleReference,
    Observed,
    ObservedSite,
    SiteCall,
)
from retrofit.passbase.protocol import parse_spec
from retrofit.passbase.replaying import recipe, rewrites
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.surgery.wrappers import Wrapper

ELEMENTS = 40_000_000  # parameters of compared sites; of larger models some sites, evenly spaced
THOROUGH = 8  # sites of a class that are compared in every way and mode; the others in a plain forward
NAMED = 3  # problems that the report names
PROBES = 24  # random rows to try its projections on
ROWS = 2  # kept rows of each dense module's input and output
ADAPTED = "its adapters are not part of the formula; merge them (retrofit.merge_adapters), then verify"
NO_REFERENCE = "no MethodReference for its modules"
Item = TypeVar("Item")
Groups = Mapping[str, list[tuple[Way, list[RecordedCall]]]]  # site → its calls in each way
FEATURES, SMALL = 4, 64  # input features for which rows of a dense matrix are kept; all of a matrix with so few


@dataclasses.dataclass(frozen=True)
class DenseMeasurement:
    """Recorded calls of a dense model's modules, and the ways in which the model runs."""

    modules: DenseModules = dataclasses.field(default_factory=DenseModules)
    ways: frozenset[str] = frozenset()  # in which it runs, as text
    sites: frozenset[tuple[str, str]] = frozenset()  # of earlier passes, possibly trained: pass, path


@dataclasses.dataclass(frozen=True)
class MethodMeasurement:
    """The comparisons and the disagreements."""

    compared: int = 0  # sites
    sites: int = 0
    calls: int = 0
    gap: float = 0.0
    problems: tuple[tuple[str, str], ...] = ()  # path, disagreement
    unknown: tuple[str, ...] = ()  # passes without a reference
    missing: tuple[tuple[str, str], ...] = ()  # what was not compared, and why


def measure_method(
    subject: Subject, before: DenseMeasurement | None = None, context: Context | None = None
) -> DenseMeasurement | MethodMeasurement:
    """Return the outputs of a dense model's modules, or the distances of a rewritten model's sites from their formulas."""
    if context is None:
        calls = subject.seen("method", functools.partial(watch_method, subject))
        return DenseMeasurement(dense_modules(subject.model, calls), dense_ways(subject), earlier_sites(subject))
    return SiteComparison(context, before).run()


def watch_method(subject: Subject, context: Context | None = None) -> contextlib.AbstractContextManager[Any]:
    """Record a forward on the inputs: the calls of a dense model's modules, or of the sites of a rewritten one."""
    if context is None:
        return dense_calls(subject.model)
    recorder = recorder_of(subject.model, references_of(SiteComparison(context).sites))
    recorder.inputs = subject.inputs
    return recorder.recording()


def judge_method(now: MethodMeasurement, before: Any, context: Context) -> Finding:
    missing = not_compared(now)
    if now.problems:
        named = [f"{context.place(path)}: {what}" if path else what for path, what in now.problems[:NAMED]]
        more = len(now.problems) - len(named)
        return failed(describe(now), "\n".join([*named, *([f"and {more} more"] if more else []), *missing]))
    if not now.compared or not now.calls:
        gone = bool(passes_of(context)) and not now.sites
        none = "the model's modules do not match its passes" if gone else "no pass has rewritten the model"
        return skipped("\n".join(missing) or none)
    return passed(describe(now), "\n".join(missing))


def not_compared(now: MethodMeasurement) -> list[str]:
    """Return the omissions, one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for what, why in now.missing:
        by_reason.setdefault(why, []).append(what)
    lines = [f"no formula was compared with {', '.join(now.unknown)}: {NO_REFERENCE}"] if now.unknown else []
    for why, whats in by_reason.items():
        more = f" (and {len(whats) - 1} more like it)" if len(whats) > 1 else ""
        lines.append(f"{whats[0]}{more}: {why}")
    return lines


def describe(now: MethodMeasurement) -> str:
    some = f"{now.compared} of {now.sites}" if now.compared < now.sites else str(now.sites)
    return f"{some} modules, {now.calls} comparisons with the formula, at most {now.gap:.1e} apart"


# ── The dense model ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def dense_calls(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keep the last rows of the inputs and outputs of each module with parameters within this context, if both are floats."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        received = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
        returned = first_tensor(output)
        if path not in found and received and returned is not None and received[0].dim() and returned.dim():
            x, y = (value.detach().reshape(-1, value.shape[-1])[-ROWS:].clone() for value in (received[0], returned))
            if len(x) == len(y):
                found[path] = x, y  # (rows, d), (rows, d')

    with watched({path: module for path, module in model.named_modules() if path and has_parameters(module)}, after=keep):
        yield found


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@torch.no_grad()
def dense_modules(model: nn.Module, calls: Mapping[str, tuple[Tensor, Tensor]]) -> DenseModules:
    """Return the recorded rows of a dense model's modules, and rows of the matrices of plain projections."""
    probes: dict[str, tuple[Tensor, Tensor]] = {}
    products: dict[str, tuple[Tensor, Tensor]] = {}
    matrix_rows: dict[str, tuple[list[int], Tensor]] = {}
    for path, (x, y) in calls.items():
        module = model.get_submodule(path)
        matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
        if len(matrices) != 1 or {*matrices[0].shape} != {x.shape[-1], y.shape[-1]}:
            continue
        width = x.shape[-1]
        rows = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(2)).to(x)
        features = evenly_spaced(list(range(width)), width if width <= SMALL else FEATURES)
        ones = nn.functional.one_hot(torch.tensor(features), width)
        with contextlib.suppress(Exception):  # a module may need more arguments
            parts = (rows, 2 * rows, x, ones.to(x))
            made = module(torch.cat([*parts, 0 * rows[:1]]))  # in one call: each reads the matrix
            if isinstance(made, Tensor) and made.shape == (sum(map(len, parts)) + 1, y.shape[-1]):
                single, double, product, column = (made[:-1] - made[-1:]).detach().split([*map(len, parts)])
                if torch.allclose(double, 2 * single, 1e-3):
                    probes[path], products[path] = (rows, single.clone()), (x, product.clone())
                    matrix_rows[path] = features, column.clone()
    return DenseModules(calls, probes, products, matrix_rows)


def dense_ways(subject: Subject) -> frozenset[str]:
    """Return the names of the ways in which a dense model runs; none for a large one, whose every forward reads all its weights."""
    if subject.is_large:
        return frozenset()
    return frozenset(way.words for way, _ in SiteWays(subject.model, {}, subject.inputs, subject.run().logits).calls())


def earlier_sites(subject: Subject) -> frozenset[tuple[str, str]]:
    """Return the sites of the passes that had rewritten the model before."""
    sites = SiteComparison(Context(subject, has_reference=False)).sites
    return frozenset((applied.name, dense_path(subject.model, site.path)) for site in sites for applied in site.options)


# ── The rewritten model ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class InstalledSite:
    """A module that a pass installed, its reference, and the passes that may have installed it."""

    path: str
    module: nn.Module
    reference: ModuleReference
    options: list[Any]

    @property
    def own(self) -> list[nn.Module]:
        return [part for _, part in own_modules(self.module, (*self.reference.given, *self.reference.functions))]

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for part in self.own for parameter in part._parameters.values() if parameter is not None)

    @property
    def is_adapted(self) -> bool:
        return any(is_adapted(part) for part in self.own)


class SiteComparison:
    """Comparison of a rewritten model with the references of its passes."""

    def __init__(self, context: Context, before: DenseMeasurement | None = None) -> None:
        self.context, self.subject, self.model = context, context.subject, context.subject.model
        self.before = before or DenseMeasurement()
        self.passes = passes_of(context)
        self.with_reference = {applied.name: applied for applied in self.passes if applied.reference is not None}
        self.sites = self.find_sites()
        self.thorough = self.sites  # compared in every way and mode
        self.problems: list[tuple[str, str]] = []
        self.missing: list[tuple[str, str]] = []  # omissions and their reasons
        self.calls, self.gap = 0, 0.0
        self.uncached: set[str] = set()

    def run(self) -> MethodMeasurement:
        unknown = tuple(dict.fromkeys(applied.name for applied in self.passes if applied.reference is None))
        if not self.with_reference:
            return MethodMeasurement(unknown=unknown)
        recorded = self.subject.seen("method", functools.partial(watch_method, self.subject, self.context))
        chosen = self.chosen_sites()
        self.thorough = [site for same in by_class(chosen) for site in evenly_spaced(same, THOROUGH)]
        plain = Way("", dict, trains=True)
        groups = {path: [(plain, calls[:1])] for path, calls in recorded.items() if calls}
        is_large, logits = bool(self.subject.is_large), self.subject.run().logits
        around = [outer for outer in chosen if any(site.path.startswith(f"{outer.path}.") for site in self.thorough)]
        others = SiteWays(self.model, references_of([*self.thorough, *around]), self.subject.inputs, logits, is_large=is_large)
        for way, found in others.calls():
            for path, calls in found.items():
                groups.setdefault(path, []).append((way, calls))
        self.missing += others.missing
        self.uncached = others.uncached
        for words, why in others.raised.items():
            if words in self.before.ways:
                self.problems.append(("", f"it does not run{words}, and the dense model does: {why}"))
        for site in chosen:
            if len(self.problems) <= NAMED:
                self.compare(site, [(way, self.calls_inside(site, way, groups)) for way, _ in groups.get(site.path, [])])
        for applied in self.with_reference.values():
            self.check_model(applied, recorded)
        return MethodMeasurement(
            len(chosen), len(self.sites), self.calls, self.gap, tuple(self.problems), unknown, tuple(self.missing)
        )

    def find_sites(self) -> list[InstalledSite]:
        """Return the modules with a reference, each once."""
        found: list[InstalledSite] = []
        for path, module in self.model.named_modules():
            for name, applied in self.with_reference.items():
                reference = applied.reference.of(module)
                if reference is not None:
                    found.append(InstalledSite(path, module, reference, [each for each in self.passes if each.name == name]))
        return found

    def chosen_sites(self) -> list[InstalledSite]:
        """Return all sites, or for a large model as many as fit, including the first and last of each class."""
        total = sum(site.elements for site in self.sites)
        if total <= ELEMENTS:
            return self.sites
        share = ELEMENTS / total
        return [site for same in by_class(self.sites) for site in evenly_spaced(same, max(2, int(share * len(same))))]

    def calls_inside(self, site: InstalledSite, way: Way, groups: Groups) -> list[RecordedCall]:
        """Return the site's calls, with the model's inputs as they are inside enclosing modules that run on fewer tokens."""
        calls = next((calls for recorded_way, calls in groups.get(site.path, []) if recorded_way is way), [])
        for outer in self.sites:
            if outer.reference.inside is None or not site.path.startswith(f"{outer.path}."):
                continue
            inside: dict[int, Inside] = {}  # by the number of the outer call
            before: tuple[SiteCall, ...] = ()
            for call in self.calls_inside(outer, way, groups):
                outer_call = site_call(outer, call, before)
                inside[call.number] = outer.reference.inside(outer_call)
                before = (*before, outer_call) if outer_call.cached else ()
            around = [max((number for number in inside if number < call.number), default=None) for call in calls]
            calls = [
                call if number is None else dataclasses.replace(call, inputs=inside[number].inputs, staying=inside[number].staying)
                for call, number in zip(calls, around, strict=True)
            ]
        return calls

    # Comparing.

    def compare(self, site: InstalledSite, groups: Sequence[tuple[Way, list[RecordedCall]]]) -> None:
        """Compare the site's calls by the module and by its reference; the first difference is a problem."""
        if site.is_adapted:
            self.missing.append((f"{site.path} was not compared", ADAPTED))
            return
        if not groups and not any(site.path.startswith(f"{outer.path}.") for outer in self.sites):  # else it is part of that site
            self.missing.append((f"{site.path} was not compared", "the model does not call it"))
        parameters = PerturbedParameters.of(site.module, site.reference, [call for _, calls in groups for call in calls])
        for way, calls in groups:
            for mode in self.modes(site, way):
                for applied in site.options:
                    found = replay_or_stop(site, applied, calls, parameters, mode)
                    if not found.problem:
                        break
                if found.stopped:
                    self.missing.append((f"{site.path} was not compared {mode.words}{way.words}", found.stopped))
                    continue
                self.calls += 1
                if found.problem:
                    self.problems.append((site.path, f"{mode.words}{way.words}, {found.problem}"))
                    return
                self.gap = max(self.gap, found.gap)

    def modes(self, site: InstalledSite, way: Way) -> list[Mode]:
        """Return the modes in which the site's calls are repeated."""
        evaluating = Mode("in evaluation mode")
        if site not in self.thorough:
            return [evaluating]
        if way.words:
            trains = way.trains and site.reference.trainings
            return [evaluating, Mode("in training mode", True, True, 3)] if trains else [evaluating]
        same = [other for other in self.thorough if other.reference is site.reference]
        count = -(-site.reference.trainings // len(same))  # each repetition has its own random numbers
        first = 1 + count * next(number for number, other in enumerate(same) if other is site)
        trainings = [Mode("in training mode", True, True, seed) for seed in range(first, first + count)]
        return [evaluating, Mode("in evaluation mode with gradients", gradients=True), *trainings]

    # The model as a whole.

    def check_model(self, applied: Any, recorded: Mapping[str, list[RecordedCall]]) -> None:
        """Compare the model as a whole with its pass's reference, and its start where it has just been rewritten."""
        sites = [
            ObservedSite(site.path, dense_path(self.model, site.path), site.module, recorded.get(site.path, []))
            for site in self.sites
            if applied in site.options
        ]
        sites.sort(key=lambda site: site.calls[0].number if site.calls else len(recorded))
        observed = Observed(
            model=self.model,
            options=applied,
            inputs=self.subject.inputs,
            sites=sites,
            dense=dataclasses.replace(self.before.modules, parameters=self.context.dense_parameters, fates=self.context.fates),
            recipe=self.passes,
            training_loss=self.training_loss,
            recorded_losses=self.recorded_losses,
            calibration=self.context.calibration,
            uncached=self.uncached,
        )
        new = [site for site in sites if (applied.name, site.dense_path) not in self.before.sites]
        is_new = self.context.fresh and applied.name in {parse_spec(each.spec).name for each in self.context.rewrites or ()}
        checks = {"what lies between its modules": (applied.reference.wiring, sites)}
        checks |= {"its start": (applied.reference.start, new)} if is_new else {}
        for name, (check, concerned) in checks.items():
            if check is None:
                continue
            try:
                observed.sites = concerned
                self.problems.extend(check(observed))
            except Exception as error:
                self.missing.append((f"{applied.name}: {name} was not compared", first_line(error)))
        self.missing += [(f"{path} was not compared with the dense module at its start", why) for path, why in observed.missing]

    def training_loss(self) -> float | None:
        """Return the model's own loss in training mode, None if it has none."""
        with self.in_training():
            loss, own, _ = loss_of(self.model, self.subject.inputs, self.subject.run().logits.shape, 71)
        return float(loss.detach()) if own else None

    def recorded_losses(self) -> float:
        """Return the sum of the auxiliary losses recorded in training mode."""
        with self.in_training(), auxiliary_losses() as losses:
            self.model(**self.subject.inputs)
        return float(sum(float(loss.detach()) for loss in losses))

    @contextlib.contextmanager
    def in_training(self) -> Iterator[None]:
        """Put the model into training mode within this context, with the same random numbers each time."""
        self.subject.run()
        self.model.train()
        torch.manual_seed(71)
        try:
            with torch.enable_grad():
                yield
        finally:
            self.model.eval()


def replay_or_stop(
    site: InstalledSite, applied: Any, calls: Sequence[RecordedCall], parameters: PerturbedParameters, mode: Mode
) -> ReplayResult:
    """Return the result of `replay`, or the error that stopped it: code that does not run in float64, or on its own."""
    try:
        return replay(site.module, site.reference, applied, calls, parameters, mode)
    except Exception as error:
        return ReplayResult(stopped=first_line(error))


def site_call(site: InstalledSite, call: RecordedCall, before: tuple[SiteCall, ...]) -> SiteCall:
    """Return a recorded call as the reference sees it, without the given children."""
    return SiteCall(site.module, site.options[-1], call.args, call.kwargs, call.inputs, {}, before=before, cached=call.had_cache)


def by_class(sites: Sequence[InstalledSite]) -> list[list[InstalledSite]]:
    """Return the sites grouped by the class of their module."""
    groups: dict[type, list[InstalledSite]] = {}
    for site in sites:
        groups.setdefault(type(site.module), []).append(site)
    return list(groups.values())


def evenly_spaced(items: list[Item], count: int) -> list[Item]:
    """Return at most `count` of the items, including the first and the last."""
    if len(items) <= count:
        return items
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def references_of(sites: Sequence[InstalledSite]) -> dict[str, ModuleReference]:
    return {site.path: site.reference for site in sites}


def dense_path(model: nn.Module, path: str) -> str:
    """Return the path without the steps from a wrapper to the module that it wraps."""
    module, steps = model, []
    for step in path.split("."):
        if not (isinstance(module, Wrapper) and step == "layer"):
            steps.append(step)
        module = module.get_submodule(step)
    return ".".join(steps)


def passes_of(context: Context) -> tuple[Any, ...]:
    """Return the passes that rewrote the model, in order."""
    model = context.subject.model
    done = rewrites(model) or context.rewrites
    if done is not None:
        return tuple(parse_spec(rewrite.spec) for rewrite in done)
    return tuple(recipe(model) or ())
