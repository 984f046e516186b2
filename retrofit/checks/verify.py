"""`verify`: a report on a model, one check at a time; a check that raises has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import fx, nn

from retrofit.checks import onnx
from retrofit.checks.context import Context
from retrofit.checks.finding import Finding, Raised, attempt, failed
from retrofit.checks.parameter_matching import match_parameters
from retrofit.checks.reference import Reference
from retrofit.checks.registry import CHECKS, ON_REQUEST, named_checks, watches
from retrofit.checks.report import CheckResult, Report
from retrofit.checks.subject import Subject, other_shapes
from retrofit.emitted.graph_module import as_dense_graph_of
from retrofit.errors import DoesNotFitError
from retrofit.files.memory import release_freed_memory
from retrofit.inputs.calibration import Calibration
from retrofit.inputs.example_inputs import named_inputs
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
from retrofit.process import serialized
from retrofit.program.program import Program
from retrofit.surgery.edit import Fate

LOAD_FIRST = "load its weights first"


@serialized
def verify(
    model: nn.Module,
    reference: nn.Module | Reference | None = None,
    example_inputs: Any = None,
    *,
    checks: str | Collection[str] = "all",
) -> Report:
    """The report of the checks on `model`; `reference` is the model it was rewritten from, or what was measured on that.

    Without a reference the model is held to its own promises only; a measured one brings its own example inputs. The model is left
    as it was. `checks` are names, `"all"` or `"quick"` (graph, function and round trip); the check `onnx` runs only where it is
    named. Raises `RetrofitError` for a model on the meta device, for one whose inputs cannot be derived and for a check that does
    not exist.
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
        measured = {*checks, "parameters"}  # by which dense parameters are found again
        reference = Reference.of(dense, inputs, checks=measured, optional=example_inputs is None)
    accounts, passes = rewrites(model), recipe(model) or ()
    if reference is not None and tuple(one.spec() for one in passes[: len(reference.recipe)]) == reference.recipe:
        passes = passes[len(reference.recipe) :]  # only what was done since is held against it
        accounts = None if accounts is None else accounts[len(reference.recipe) :]
    exact = all(one.exact for one in (accounts if accounts is not None else passes))
    if reference is None:
        inputs = distinct_lengths(model, named_inputs(model, example_inputs))
        others = [one for one in other_shapes(model, inputs) if admits(model, one)]
        optional = with_optional(model, inputs) if example_inputs is None else ()
        subject = Subject(model, (inputs, *others, *optional))
        return run_checks(Context(subject, has_reference=False, rewrites=accounts, exact=exact), None, checks)
    context = Context(
        compared_subject(model, reference),
        has_reference=True,
        rewrites=accounts,
        fates=match_parameters(reference["parameters"].prints, model),
        exact=exact,
        dense=dense,
    )
    return run_checks(context, reference, checks)


@serialized
def verify_onnx(path: str | Path, model: nn.Module, example_inputs: Any = None) -> Report:
    """The report of the check `onnx` on an ONNX file: whether it computes what `model`, or a part of it, does."""
    require_module(model)
    require_values(model, "verified", LOAD_FIRST)
    subject = Subject(model, (named_inputs(model, example_inputs),))
    return Report((timed("onnx", model, lambda: onnx.check_file(Path(path), subject)),))


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
    """The report of the checks on a model just rewritten, its dense parameters being where `fates` says.

    `calibration` is what its passes were fitted on, `dense_parameters` are those of the dense model by its names.
    A `program` captured since the rewriting spares a capture.
    """
    require_values(model, "verified", LOAD_FIRST)
    checks = named_checks(checks)
    exact = all(one.exact for one in rewrites)
    subject = compared_subject(model, reference, program)
    known = dict(dense_parameters or {})
    context = Context(subject, True, rewrites, dict(fates), exact, fresh=True, calibration=calibration, dense_parameters=known)
    return run_checks(context, reference, checks)


def admits(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the model takes inputs of these sizes: False where it is a graph and says that one of them is fixed in it."""
    if not isinstance(model, fx.GraphModule):
        return True
    try:
        with preserve_state(model):
            run(model, inputs)
    except DoesNotFitError:
        return False
    except Exception:  # a failure of the checks
        return True
    return True


def compared_subject(model: nn.Module, reference: Reference, program: Program | None = None) -> Subject:
    """The model with the inputs that the dense model was measured on."""
    return Subject(model, tuple(named_inputs(model, inputs) for inputs in reference.shapes), program, is_large=reference.is_large)


def run_checks(context: Context, reference: Reference | None, checks: Collection[str]) -> Report:
    """The results of the named checks; none depends on another's."""
    if reference is not None and reference["causality"] is not None:
        context.reads_ahead = reference["causality"].reads_ahead
    context.subject.watches = watches(context.subject, context, checks)

    def run_check(name: str) -> Finding:
        check, before = (CHECKS | ON_REQUEST)[name], reference[name] if reference is not None else None
        if context.subject.is_large:
            release_freed_memory()
        return check.judge(check.measure(context.subject, before, context), before, context)

    model, shapes = context.subject.model, context.subject.shapes
    with recording_arguments() as given:
        results = tuple(timed(name, model, lambda name=name: run_check(name)) for name in CHECKS | ON_REQUEST if name in checks)  # type: ignore[misc]
    given.update(name for inputs in shapes for name in inputs)
    described = (describe(one) for one in shapes if one is shapes[0] or adds_arguments(one, shapes[0]))
    return Report(results, tuple(described), tuple(name for name in optional_tensors(model) if name not in given))


def timed(name: str, model: nn.Module, check: Callable[[], Finding]) -> CheckResult:
    """The result of one check on an undisturbed model; one that raises has failed with what it raised."""
    start = time.perf_counter()
    with preserve_state(model):
        found = attempt(check)
    finding = failed("", found.error) if isinstance(found, Raised) else found
    return CheckResult(name, finding.status, finding.measured, finding.why, time.perf_counter() - start)
