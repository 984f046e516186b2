"""`verify`: the checks by name, their measurements of a dense model, and the report on a rewritten one.

A check that raises has failed; none depends on another's result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from retrofit.checks.cache import CacheMeasurement, judge_cache, measure_cache
from retrofit.checks.function import FunctionMeasurement, judge_function, measure_function
from retrofit.checks.gradients import GradientsMeasurement, judge_gradients, measure_gradients
from retrofit.checks.graph import GraphMeasurement, judge_cost, judge_graph, measure_cost, measure_graph
from retrofit.checks.invariances import (
    CausalityMeasurement,
    PaddingMeasurement,
    judge_causality,
    judge_padding,
    measure_causality,
    measure_padding,
)
from retrofit.checks.method import DenseMeasurement, judge_method, measure_method, watch_method
from retrofit.checks.onnx import check_file, judge_onnx, measure_onnx
from retrofit.checks.parameters import ParametersMeasurement, judge_parameters, match_parameters, measure_parameters
from retrofit.checks.report import CheckResult, Finding, Raised, Report, attempt, failed
from retrofit.checks.round_trip import RoundTripMeasurement, judge_round_trip, measure_round_trip
from retrofit.checks.subject import Context, Subject, Watch, other_shapes
from retrofit.emitted import as_dense_graph_of
from retrofit.errors import DoesNotFitError, RetrofitError
from retrofit.inputs.calibration import Calibration
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import with_same_tensors
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.optional_inputs import adds_arguments, optional_tensors, with_optional
from retrofit.inputs.probes import describe, distinct_lengths, recording_arguments, run
from retrofit.inputs.usable_models import (
    require_module,
    require_no_prompt,
    require_torch_module,
    require_trainable,
    require_values,
    transformer_inside,
)
from retrofit.passbase.protocol import Rewrite
from retrofit.passbase.replaying import recipe, rewrites
from retrofit.process import release_freed_memory, serialized
from retrofit.program.cost import Cost
from retrofit.program.program import Program
from retrofit.surgery import Fate
from retrofit.surgery.row_tables import unwarned


@dataclasses.dataclass
class Check:
    """A check for one kind of defect in a rewritten model.

    `measure(subject, before, context)` measures a model: the dense one if `before` and `context` are missing, else the one under
    verification, with the dense model's measurement as `before`. It returns a small frozen dataclass, or None if there is nothing
    to measure. `judge(now, before, context)` compares the two and runs the model only to locate the cause of a failure.
    `watch(subject, context)` records the first forward on the inputs, which saves one.
    """

    measure: Callable[..., Any]
    judge: Callable[[Any, Any, Context], Finding]
    watch: Callable[[Subject, Context | None], contextlib.AbstractContextManager[Any]] | None = None


CHECKS = {
    "graph": Check(measure_graph, judge_graph),
    "parameters": Check(measure_parameters, judge_parameters),
    "function": Check(measure_function, judge_function),
    "method": Check(measure_method, judge_method, watch_method),
    "causality": Check(measure_causality, judge_causality),
    "padding": Check(measure_padding, judge_padding),
    "cache": Check(measure_cache, judge_cache),
    "gradients": Check(measure_gradients, judge_gradients),
    "round trip": Check(measure_round_trip, judge_round_trip),
    "cost": Check(measure_cost, judge_cost),
}
ON_REQUEST = {"onnx": Check(measure_onnx, judge_onnx)}  # more expensive than all the others together
QUICK = ("graph", "function", "round trip")  # the checks that a faulty rewrite fails first
SETS = {"all": tuple(CHECKS), "quick": QUICK}


def named_checks(checks: str | Collection[str]) -> tuple[str, ...]:
    """Return the names of a set of checks, of one check or of several; raise `RetrofitError` for an unknown name."""
    names = SETS.get(checks, (checks,)) if isinstance(checks, str) else tuple(checks)
    for name in names:
        if name not in CHECKS and name not in ON_REQUEST:
            choices = ", ".join([*SETS, *CHECKS, *ON_REQUEST])
            raise RetrofitError(f"unknown check {name!r}", remedy=f"choose from {choices}", option="checks", code="choice")
    return names


def watches(subject: Subject, context: Context | None = None, names: Collection[str] = tuple(CHECKS)) -> dict[str, Watch]:
    """Return the watches of the named checks for the first forward on the inputs."""
    watching = {name: check.watch for name, check in CHECKS.items() if name in names and check.watch is not None}
    return {name: functools.partial(watch, subject, context) for name, watch in watching.items()}


# ── The reference ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Reference:
    """The measurements of a dense model, a few megabytes, without its weights."""

    shapes: tuple[dict[str, Any], ...]  # the inputs of the measurements, those of other shapes, those with optional arguments
    is_large: bool | None = None
    recipe: tuple[str, ...] = ()  # the passes that had rewritten it before
    # By check; None if it was not made, or the model cannot do it.
    graph: GraphMeasurement | None = None
    parameters: ParametersMeasurement | None = None
    function: FunctionMeasurement | None = None
    method: DenseMeasurement | None = None
    causality: CausalityMeasurement | None = None
    padding: PaddingMeasurement | None = None
    cache: CacheMeasurement | None = None
    gradients: GradientsMeasurement | None = None
    round_trip: RoundTripMeasurement | None = None
    cost: Cost | None = None

    @staticmethod
    def of(
        model: nn.Module,
        example_inputs: Any = None,
        program: Program | None = None,
        *,
        checks: Collection[str] = tuple(CHECKS),
        optional: bool | None = None,
        keep_dense: bool = False,
    ) -> Reference:
        """Return the named checks' measurements of `model` in its present state; `program` saves the capture.

        With `optional`, or with None and derived example inputs, inputs with images, videos and sound are measured too if the model
        reads them beside its text. With `keep_dense` the result keeps a large model's tensors, for measurements that few rewrites
        need. Raises `RetrofitError` if the model does not run on the example inputs.
        """
        inputs = distinct_lengths(model, named_inputs(model, example_inputs))
        more = with_optional(model, inputs) if (example_inputs is None if optional is None else optional) else ()
        subject = runnable_subject(model, inputs, program, checks, more)
        if keep_dense and subject.is_large and (twin := with_same_tensors(model)) is not None:
            subject.later = Subject(twin, subject.shapes, runs=dict(subject.runs), is_large=True)
        measurements: dict[str, Any] = {}
        for name in (name for name in CHECKS if name in checks):
            with preserve_state(model):
                found = attempt(CHECKS[name].measure, subject)
            if subject.is_large:
                release_freed_memory()
            if not isinstance(found, Raised):  # otherwise the rewritten model need not do it either
                measurements[field_of(name)] = found
        passes = tuple(applied.spec() for applied in recipe(model) or ())
        return Reference(subject.shapes, subject.is_large, passes, **measurements)

    @property
    def inputs(self) -> dict[str, Any]:
        return self.shapes[0]

    @property
    def optional(self) -> tuple[dict[str, Any], ...]:
        """The inputs with arguments that the first ones leave out."""
        return tuple(inputs for inputs in self.shapes if adds_arguments(inputs, self.inputs))

    def measured_by(self, check: str) -> Any:
        """Return that check's measurement; None if it could not be made, and for a check that runs on request only."""
        return getattr(self, field_of(check), None)


def field_of(check: str) -> str:
    """Return the field of `Reference` for a check."""
    return check.replace(" ", "_")


def runnable_subject(
    model: nn.Module,
    inputs: dict[str, Any],
    program: Program | None,
    checks: Collection[str] = tuple(CHECKS),
    optional: Sequence[dict[str, Any]] = (),
) -> Subject:
    """Return the model with the shapes of inputs that it runs on; raise `RetrofitError` if it does not run on the first."""
    subject = Subject(model, (inputs, *other_shapes(model, inputs), *optional), program)
    subject.watches = watches(subject, names=checks)
    with preserve_state(model):
        runs = [attempt(subject.run, shape) for shape in range(len(subject.shapes))]
    if isinstance(runs[0], Raised):
        raise RetrofitError(
            f"{type(model).__name__} does not run on {describe(inputs)}",
            why=runs[0].error,
            remedy="pass example_inputs= that its forward accepts",
            code="does-not-run",
        )
    shapes = {shape: ran for shape, ran in enumerate(runs) if not isinstance(ran, Raised)}
    chosen, made = tuple(subject.shapes[shape] for shape in shapes), dict(enumerate(shapes.values()))
    return Subject(model, chosen, program, made, watched=subject.watched)


# ── The report ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


LOAD_FIRST = "load its weights first"


@serialized
@unwarned()
def verify(
    model: nn.Module,
    reference: nn.Module | Reference | None = None,
    example_inputs: Any = None,
    *,
    checks: str | Collection[str] = "all",
) -> Report:
    """Return the report of the checks on `model`; `reference` is the dense model, or its measurements.

    Without a reference the model is compared with its own promises only; a measured one brings its own example inputs. The model is
    left unchanged. `checks` are names, `"all"` or `"quick"` (graph, function and round trip); the check `onnx` runs only if it is
    named. Raises `RetrofitError` for a model on the meta device, for one whose inputs cannot be derived and for an unknown check.
    """
    require_module(model)
    require_no_prompt(model)
    require_trainable(model)
    model = transformer_inside(model, example_inputs)
    require_values(model, "verified", LOAD_FIRST)
    checks = named_checks(checks)
    dense = None
    if reference is not None and not isinstance(reference, Reference):
        require_torch_module(reference, "reference")
        reference = transformer_inside(reference, example_inputs)
        require_values(reference, "verified", LOAD_FIRST)
        inputs = named_inputs(model, example_inputs)
        dense = reference if recipe(reference) else as_dense_graph_of(model, reference, inputs)
        measured = {*checks, "parameters"}  # to find dense parameters again
        reference = Reference.of(dense, inputs, checks=measured, optional=example_inputs is None)
    done, passes = rewrites(model), recipe(model) or ()
    if reference is not None and tuple(applied.spec() for applied in passes[: len(reference.recipe)]) == reference.recipe:
        passes = passes[len(reference.recipe) :]  # only later passes are judged
        done = None if done is None else done[len(reference.recipe) :]
    exact = all(rewrite.exact for rewrite in (done if done is not None else passes))
    if reference is None:
        inputs = distinct_lengths(model, named_inputs(model, example_inputs))
        others = [shape for shape in other_shapes(model, inputs) if admits(model, shape)]
        optional = with_optional(model, inputs) if example_inputs is None else ()
        subject = Subject(model, (inputs, *others, *optional))
        return run_checks(Context(subject, has_reference=False, rewrites=done, exact=exact), None, checks)
    context = Context(
        compared_subject(model, reference),
        has_reference=True,
        rewrites=done,
        fates=match_parameters(reference.parameters.prints, model) if reference.parameters is not None else {},
        exact=exact,
        dense=dense,
    )
    return run_checks(context, reference, checks)


@serialized
def verify_onnx(path: str | Path, model: nn.Module, example_inputs: Any = None) -> Report:
    """Return the report of the check `onnx` on an ONNX file: whether it computes `model` or a part of it."""
    require_module(model)
    require_values(model, "verified", LOAD_FIRST)
    subject = Subject(model, (named_inputs(model, example_inputs),))
    return Report((run_timed("onnx", model, lambda: check_file(Path(path), subject)),))


@unwarned()
def check_rewrite(
    model: nn.Module,
    reference: Reference,
    rewrites: tuple[Rewrite, ...],
    fates: Mapping[str, Fate],
    *,
    program: Program | None = None,
    checks: str | Collection[str] = "all",
    calibration: Calibration | None = None,
    dense_parameters: Mapping[str, nn.Parameter] | None = None,
) -> Report:
    """Return the report of the checks on a model that has just been rewritten, with its dense parameters where `fates` says.

    `calibration` is the data its passes were fitted on, `dense_parameters` are those of the dense model by its names. A `program`
    captured since the rewriting saves a capture.
    """
    require_values(model, "verified", LOAD_FIRST)
    checks = named_checks(checks)
    exact = all(rewrite.exact for rewrite in rewrites)
    subject = compared_subject(model, reference, program)
    known = dict(dense_parameters or {})
    context = Context(subject, True, rewrites, dict(fates), exact, fresh=True, calibration=calibration, dense_parameters=known)
    return run_checks(context, reference, checks)


def admits(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Return whether the model takes inputs of these sizes; a graph may have fixed one of them."""
    if not isinstance(model, fx.GraphModule):
        return True
    try:
        with preserve_state(model):
            run(model, inputs)
    except DoesNotFitError:
        return False
    except Exception:  # a failure for the checks to report
        return True
    return True


def compared_subject(model: nn.Module, reference: Reference, program: Program | None = None) -> Subject:
    """Return the model with the inputs of the dense model's measurements."""
    return Subject(model, tuple(named_inputs(model, inputs) for inputs in reference.shapes), program, is_large=reference.is_large)


def run_checks(context: Context, reference: Reference | None, checks: Collection[str]) -> Report:
    """Return the results of the named checks; none depends on another's."""
    if reference is not None and reference.causality is not None:
        context.reads_ahead = reference.causality.reads_ahead
    context.subject.watches = watches(context.subject, context, checks)

    def run_check(name: str) -> Finding:
        check, before = (CHECKS | ON_REQUEST)[name], reference.measured_by(name) if reference is not None else None
        if context.subject.is_large:
            release_freed_memory()
        return check.judge(check.measure(context.subject, before, context), before, context)

    model, shapes = context.subject.model, context.subject.shapes
    with recording_arguments() as given:
        results = tuple(run_timed(name, model, lambda name=name: run_check(name)) for name in CHECKS | ON_REQUEST if name in checks)  # type: ignore[misc]
    given.update(name for inputs in shapes for name in inputs)
    described = (describe(inputs) for inputs in shapes if inputs is shapes[0] or adds_arguments(inputs, shapes[0]))
    return Report(results, tuple(described), tuple(name for name in optional_tensors(model) if name not in given))


def run_timed(name: str, model: nn.Module, check: Callable[[], Finding]) -> CheckResult:
    """Return the result of one check on an unchanged model; an error is a failure."""
    start = time.perf_counter()
    with preserve_state(model):
        found = attempt(check)
    finding = failed("", found.error) if isinstance(found, Raised) else found
    return CheckResult(name, finding.status, finding.measured, finding.why, time.perf_counter() - start)
