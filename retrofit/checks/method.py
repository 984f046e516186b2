"""The method check: what a pass installed computes what its method says, held against an independent reference.

Every pass may bring a reference (`Pass.reference`): for each of its modules the formula in plain loops in float64. The calls of
these modules are recorded in forwards of the rewritten model (many tokens, one token, step by step on a cache), and each is made
again by the module and by the reference: evaluating, training with the same random draws, and backward. Then comes what lies
between the modules (which block, which ids, whose loss) and, where the model has just been rewritten, what they begin with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.checks.context import Context
from retrofit.checks.finding import Finding, failed, passed, skipped
from retrofit.checks.gradients import loss_of
from retrofit.checks.site_recording import MOST, CallRecorder, has_cache
from retrofit.checks.site_replay import Found, MovedParameters, own_modules, replay
from retrofit.checks.stepping import section, step_inputs
from retrofit.checks.subject import Subject
from retrofit.errors import first_line
from retrofit.pipeline.method_reference import MethodReference, ModuleReference, Observed, ObservedSite, RecordedCall
from retrofit.pipeline.registry import parse_spec
from retrofit.pipeline.replaying import recipe, rewrites
from retrofit.runtime.probes import accepts, extent_of, output_ids_name, resized, run
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.surgery.wrappers import Wrapper

ELEMENTS = 40_000_000  # parameters of sites that are computed again; of larger models some sites, evenly spaced
STEPS = 5  # tokens decoded one at a time: of a few in a row some are anchors and some are not
NAMED = 3  # problems that the report names
PROBES = 8  # random rows that its projections are tried on
ROWS = 2  # of what each dense module receives and returns


@dataclasses.dataclass(frozen=True)
class DenseCalls:
    """Of a dense model: some rows of what each module with one tensor received, and of what it returned."""

    calls: Mapping[str, tuple[Tensor, Tensor]]
    probes: Mapping[str, tuple[Tensor, Tensor]]  # of plain projections: random rows, and their products with the weight


@dataclasses.dataclass(frozen=True)
class MethodMeasurement:
    """What was compared, and what does not agree."""

    compared: int = 0  # sites
    sites: int = 0
    calls: int = 0
    gap: float = 0.0
    problems: tuple[tuple[str, str], ...] = ()  # path, what is wrong
    unknown: tuple[str, ...] = ()  # passes without a reference
    stopped: tuple[tuple[str, str], ...] = ()  # site or pass, the error that stopped its comparison


def measure(subject: Subject, before: Any = None, context: Context | None = None) -> Any:
    if context is None:
        calls = dense_calls(subject)
        return DenseCalls(calls, dense_probes(subject.model, calls))
    return Comparison(subject, before if isinstance(before, DenseCalls) else None, context).run()


def judge(now: MethodMeasurement, before: Any, context: Context) -> Finding:
    reasons = [f"no reference of {', '.join(now.unknown)}"] if now.unknown else []
    reasons += [f"{path} was not compared: {why}" for path, why in now.stopped[:NAMED]]
    unknown = "\n".join(reasons)
    if now.problems:
        named = [f"{context.place(path)}: {what}" if path else what for path, what in now.problems[:NAMED]]
        more = len(now.problems) - len(named)
        return failed(describe(now), "\n".join([*named, *([f"and {more} more"] if more else [])]))
    if not now.compared or not now.calls:
        return skipped(unknown or "no pass has rewritten the model")
    return passed(describe(now), unknown)


def describe(now: MethodMeasurement) -> str:
    some = f"{now.compared} of {now.sites}" if now.compared < now.sites else str(now.sites)
    return f"{some} modules, {now.calls} comparisons with the formula, at most {now.gap:.1e} apart"


# ── The dense model ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def dense_calls(subject: Subject) -> dict[str, tuple[Tensor, Tensor]]:
    """The last rows of what each module with parameters receives and returns, where both are floats: (rows, d), (rows, d')."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def recorder(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
            value = output[0] if isinstance(output, (tuple, list)) and output else output
            if path not in found and given and isinstance(value, Tensor) and value.is_floating_point():
                rows = [one.detach().reshape(-1, one.shape[-1])[-ROWS:].clone() for one in (given[0], value) if one.dim()]
                if len(rows) == 2 and len(rows[0]) == len(rows[1]):
                    found[path] = rows[0], rows[1]

        return hook

    handles = [
        module.register_forward_hook(recorder(path), with_kwargs=True)
        for path, module in subject.model.named_modules()
        if path and any(True for _ in module.parameters())
    ]
    try:
        run(subject.model, subject.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def dense_probes(model: nn.Module, calls: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of every module that only multiplies by one matrix and adds a bias: random rows, and their products with the matrix."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for path, (x, y) in calls.items():
        module = model.get_submodule(path)
        matrices = [one for one in module.parameters() if one.dim() == 2]
        if len(matrices) != 1 or {*matrices[0].shape} != {x.shape[-1], y.shape[-1]}:
            continue
        rows = torch.randn(PROBES, x.shape[-1], generator=torch.Generator().manual_seed(2)).to(x)
        with contextlib.suppress(Exception):  # one that takes more than this
            none, once, twice = (module(scale * rows) for scale in (0, 1, 2))
            if (
                isinstance(once, Tensor)
                and once.shape == (PROBES, y.shape[-1])
                and torch.allclose(twice - none, 2 * (once - none), 1e-3)
            ):
                found[path] = rows, (once - none).detach()
    return found


# ── The rewritten model ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Site:
    """A module that some pass installed, its reference, and the passes that may have installed it."""

    path: str
    module: nn.Module
    reference: ModuleReference
    options: list[Any]

    @property
    def elements(self) -> int:
        inside = own_modules(self.module, (*self.reference.given, *self.reference.functions))
        return sum(one.numel() for _, part in inside for one in part._parameters.values() if one is not None)


class Comparison:
    """A rewritten model held against the references of its passes."""

    def __init__(self, subject: Subject, before: DenseCalls | None, context: Context) -> None:
        self.subject, self.model, self.context = subject, subject.model, context
        self.before = before or DenseCalls({}, {})
        self.passes = passes_of(self.model, context)
        self.references: dict[str, MethodReference] = {one.name: one.reference for one in self.passes if one.reference is not None}
        self.sites = self.find_sites()
        self.problems: list[tuple[str, str]] = []
        self.stopped: dict[str, str] = {}  # by site: the error that stopped its comparison
        self.calls, self.gap = 0, 0.0

    def run(self) -> MethodMeasurement:
        unknown = tuple(dict.fromkeys(one.name for one in self.passes if one.reference is None))
        if not self.references:
            return MethodMeasurement(unknown=unknown)
        whole = self.record(self.subject.inputs)
        chosen = self.chosen_sites()
        groups = {path: [(calls[:1], "")] for path, calls in whole.items() if calls}
        for name, calls in self.other_recordings(chosen):
            groups.setdefault(name, []).append(calls)
        for site in chosen:
            if len(self.problems) <= NAMED:
                self.compare(site, groups.get(site.path, []))
        for one in {one.name: one for one in self.passes if one.reference is not None}.values():
            self.check_model(one, whole)
        return MethodMeasurement(
            len(chosen), len(self.sites), self.calls, self.gap, tuple(self.problems), unknown, tuple(self.stopped.items())
        )

    def find_sites(self) -> list[Site]:
        """The modules that have a reference, each once."""
        found: list[Site] = []
        for path, module in self.model.named_modules():
            for name, reference in self.references.items():
                one = reference.of(module)
                if one is not None:
                    found.append(Site(path, module, one, [each for each in self.passes if each.name == name]))
        return found

    def chosen_sites(self) -> list[Site]:
        """All of them, or of a large model as many as there is room for, the first and the last of each class among them."""
        total = sum(site.elements for site in self.sites)
        if total <= ELEMENTS:
            return self.sites
        chosen: list[Site] = []
        for kind in dict.fromkeys(type(site.module) for site in self.sites):
            same = [site for site in self.sites if type(site.module) is kind]
            share = sum(site.elements for site in same) / total * ELEMENTS
            count = min(len(same), max(2, int(share / max(1.0, sum(site.elements for site in same) / len(same)))))
            chosen += [same[index * (len(same) - 1) // max(1, count - 1)] for index in range(count)]
        return list({id(site): site for site in chosen}.values())

    # Recording.

    def record(
        self, inputs: Mapping[str, Any], most: int = MOST, sites: Sequence[Site] | None = None
    ) -> dict[str, list[RecordedCall]]:
        """The calls of the sites in a forward on these inputs."""
        recorder = CallRecorder(self.model, {site.path: site.reference for site in (self.sites if sites is None else sites)}, most)
        recorder.inputs = inputs
        with recorder.recording() as calls:
            run(self.model, inputs)
        return calls

    def other_recordings(self, sites: Sequence[Site]) -> Iterator[tuple[str, tuple[list[RecordedCall], str]]]:
        """Calls on one token, step by step on a cache, and on as many tokens as some site computes in another way."""
        inputs = self.subject.inputs
        batch, length = extent_of(inputs)
        most = max((site.reference.tokens for site in sites), default=0)
        ways: list[tuple[str, Callable[[], dict[str, list[RecordedCall]]]]] = []
        if length > 1:
            ways.append((" on one token", lambda: self.record(resized(self.model, inputs, 1, 1, seed=11), sites=sites)))
            ways.append((" step by step on a cache", lambda: self.record_steps(sites)))
            if most > batch * length:
                rows = -(-(most + 1) // length)
                large = [site for site in sites if site.reference.tokens > batch * length]
                ways.append(
                    (f" on {rows * length} tokens", lambda: self.record(resized(self.model, inputs, rows, length, 13), sites=large))
                )
        for words, way in ways:
            try:
                found = way()
            except Exception:  # a model that takes no single token, or does not decode; the other checks say so where it should
                continue
            for path, calls in found.items():
                if calls:
                    yield path, (calls if "cache" in words else calls[:1], words)

    def record_steps(self, sites: Sequence[Site]) -> dict[str, list[RecordedCall]]:
        """The calls of a sequence whose last tokens are decoded one at a time; none where the model keeps no cache."""
        if not accepts(self.model, "use_cache"):
            return {}
        whole, _ = step_inputs(self.model, self.subject.inputs, "steps")
        name = output_ids_name(whole, self.subject.run().logits)
        if name is None or whole[name].shape[1] <= STEPS + 1:
            return {}
        total, cache = whole[name].shape[1], None
        once = [site for site in sites if site.reference.cached]
        recorder = CallRecorder(self.model, {site.path: site.reference for site in once}, STEPS + 2)
        with recorder.recording() as calls:
            for start, stop in [(0, total - STEPS), *((last, last + 1) for last in range(total - STEPS, total))]:
                recorder.inputs = chunk = {**section(whole, name, start, stop), "use_cache": True}
                output = run(self.model, chunk, past_key_values=cache) if cache is not None else run(self.model, chunk)
                cache = getattr(output, "past_key_values", None)
                if cache is None:
                    return {}
        # one that several depths share keeps none, and an encoder's layers begin anew in each step
        return {path: found for path, found in calls.items() if len(found) == STEPS + 1 and all(map(has_cache, found))}

    # Comparing.

    def compare(self, site: Site, groups: Sequence[tuple[list[RecordedCall], str]]) -> None:
        """The site's calls by the module and by its reference; the first difference is a problem."""
        parameters = MovedParameters.of(site.module, site.reference, [call for calls, _ in groups for call in calls])
        for calls, words in groups:
            for training, gradients, seed, mode in self.ways(site, words):
                attempts: list[Found] = []
                for options in site.options:
                    attempts.append(self.attempt(site, options, calls, parameters, training, gradients, seed))
                    if not attempts[-1].problem:
                        break
                if attempts[-1].stopped:
                    self.stopped.setdefault(site.path, attempts[-1].stopped)
                    return
                self.calls += 1
                if attempts[-1].problem:
                    self.problems.append((site.path, f"{mode}{words}, {attempts[-1].problem}"))
                    return
                self.gap = max(self.gap, attempts[-1].gap)

    def ways(self, site: Site, words: str) -> list[tuple[bool, bool, int, str]]:
        """Training, gradients, seed, and the words for it."""
        evaluating = (False, False, 0, "in evaluation mode")
        if words:
            return [evaluating] if "tokens" not in words else [evaluating, (True, True, 3, "in training mode")]
        same = [one for one in self.sites if one.reference is site.reference]
        count = -(-site.reference.trainings // len(same))  # each of them has its own random numbers
        first = 1 + count * next(number for number, one in enumerate(same) if one is site)
        trainings = [(True, True, seed, "in training mode") for seed in range(first, first + count)]
        return [evaluating, (False, True, 0, "in evaluation mode with gradients"), *trainings]

    @staticmethod
    def attempt(
        site: Site,
        options: Any,
        calls: Sequence[RecordedCall],
        parameters: MovedParameters,
        training: bool,
        gradients: bool,
        seed: int,
    ) -> Found:
        try:
            return replay(
                site.module, site.reference, options, calls, parameters, training=training, gradients=gradients, seed=seed
            )
        except Exception as error:  # code that does not run in float64, or by itself: then nothing was compared
            return Found(stopped=first_line(error))

    # The model as a whole.

    def check_model(self, one: Any, whole: Mapping[str, list[RecordedCall]]) -> None:
        """What the pass's reference says of the model as a whole, and of its start where it has just been rewritten."""
        sites = [
            ObservedSite(site.path, dense_path(self.model, site.path), site.module, whole.get(site.path, []))
            for site in self.sites
            if one in site.options
        ]
        sites.sort(key=lambda site: site.calls[0].number if site.calls else len(whole))
        observed = Observed(
            self.model,
            one,
            self.subject.inputs,
            sites,
            self.context.fates,
            self.before.calls,
            self.before.probes,
            self.context.calibrated,
            self.passes,
            self.training_loss,
            self.recorded_losses,
        )
        for check in (one.reference.wiring, one.reference.start if self.context.fresh else None):
            if check is None:
                continue
            try:
                self.problems.extend(check(observed))
            except Exception as error:
                self.stopped.setdefault(one.name, first_line(error))

    def training_loss(self) -> float | None:
        """The model's own loss in training mode, None where it has none."""
        with self.in_training():
            loss, own, _ = loss_of(self.model, self.subject.inputs, self.subject.run().logits.shape, 71)
        return float(loss.detach()) if own else None

    def recorded_losses(self) -> float:
        """The sum of the auxiliary losses that are recorded in training mode."""
        with self.in_training(), auxiliary_losses() as losses:
            self.model(**self.subject.inputs)
        return float(sum(float(one.detach()) for one in losses))

    @contextlib.contextmanager
    def in_training(self) -> Iterator[None]:
        """Within this context the model trains, on the same random numbers each time."""
        self.subject.run()
        self.model.train()
        torch.manual_seed(71)
        try:
            with torch.enable_grad():
                yield
        finally:
            self.model.eval()


def dense_path(model: nn.Module, path: str) -> str:
    """The path without the steps from a module that wraps another to that."""
    module, steps = model, []
    for step in path.split("."):
        if not (isinstance(module, Wrapper) and step == "layer"):
            steps.append(step)
        module = module.get_submodule(step)
    return ".".join(steps)


def passes_of(model: nn.Module, context: Context) -> tuple[Any, ...]:
    """The passes that the model was rewritten with, in order."""
    accounts = rewrites(model) or context.rewrites
    if accounts is not None:
        return tuple(parse_spec(one.spec) for one in accounts)
    return tuple(recipe(model) or ())
