"""`apply`: run passes over a model, from one verified program to the next; on failure the model is unchanged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import fx, nn

from retrofit.anatomy.inspection import read_anatomy
from retrofit.checks import Reference, check_rewrite, named_checks
from retrofit.checks.parameters import require_finite
from retrofit.checks.report import Report
from retrofit.emitted import DenseGraph
from retrofit.emitted.graph_parts import propagate_shapes
from retrofit.errors import (
    CaptureError,
    DoesNotFitError,
    RetrofitError,
    SpecError,
    VerificationError,
    without_form,
)
from retrofit.inputs.example_inputs import device_of, named_inputs
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.optional_inputs import with_optional
from retrofit.inputs.probes import describe, distinct_lengths, run
from retrofit.inputs.usable_models import (
    require_in_memory,
    require_rewritable,
    require_values,
    transformer_inside,
)
from retrofit.passbase import recipe_storage
from retrofit.passbase.calibration import calibration_from, readable_calibration, using_tokenizer
from retrofit.passbase.protocol import AnyPass, Recipe, Rewrite, load_pass, pass_names
from retrofit.passbase.replaying import added, rearranged, recipe, rewrites
from retrofit.passbase.running import refuse_early, require_place, run_passes, with_current_names
from retrofit.preview import (
    BECOMES_GRAPH,
    GRAPH_FIX,
    LAYERS_IN_CODE,
    SEE_EVERYTHING,
    fits_as_graph,
    parse_passes,
    prepare_model,
    unseen_refusal,
)
from retrofit.process import serialized
from retrofit.program.capture import capture, failure_in
from retrofit.program.cost import flops_per_token, unit_of
from retrofit.program.program import Program
from retrofit.progress import Progress
from retrofit.provenance import describe_inputs, provenance_of
from retrofit.surgery import Edit, Fate, Keep, transformers_bookkeeping
from retrofit.surgery.dequantization import refuse_packed
from retrofit.surgery.user_hooks import HookWatch

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Applied:
    """The result of `apply`."""

    model: nn.Module
    rewrites: tuple[Rewrite, ...]
    report: Report | None
    parameters_before: int
    parameters_after: int
    flops_before: int  # per token or another unit, forward
    flops_after: int  # 0 if not counted
    fates: Mapping[str, Fate] = dataclasses.field(default_factory=dict)  # of the dense parameters, by their dense names
    unit: str = "token"  # of these FLOPs


def apply(
    model: Model,
    *passes: AnyPass | str,
    example_inputs: Any = None,
    calibration: Any = None,
    tokenizer: Any = None,
    verify: bool = True,
    emit: str = "module",
    checks: str | Collection[str] = "all",
) -> Model:
    """Return `model` rewritten by `passes` in order, in place if its modules allow; on any failure it is unchanged.

    `emit="graph"` returns the rewritten model as an FX graph module on the same parameters and leaves `model` unchanged. The same
    happens to a model whose layers are not modules, and to one whose modules a pass does not fit but whose graph it fits. A
    transformers model would lose its class, its cache and `generate`: it becomes a graph only with `emit="graph"`, which a refusal
    recommends if it works.

    If a module only feeds one transformers model, such as a sentence-transformers pipeline, that model is rewritten.

    `passes` are objects or specs (`"altup(k=2)"`); `example_inputs` (by argument name) are inferred from the model if not given.
    `calibration` is the data to which approximate passes are fitted: texts, token ids (windows, length), or batches of inputs.
    `tokenizer`, an object or a directory, is for passes that read the text of ids; None: the one in the directory that a
    transformers model was loaded from, if there is one. `checks` are those that `verify` makes: `"all"`, `"quick"` (graph, function
    and round trip) or their names.

    Raises `RetrofitError` if a pass does not fit, `VerificationError` if the result fails a check.
    """
    applied = apply_reported(
        model,
        *passes,
        example_inputs=example_inputs,
        calibration=calibration,
        tokenizer=tokenizer,
        verify=verify,
        emit=emit,
        checks=checks,
        count_flops=False,
    )
    return applied.model  # type: ignore[return-value]


def require_use(calibration: Any, passes: Recipe, tokenizer: Any = None) -> None:
    """Raises `SpecError` if calibration data or a tokenizer is given that no pass uses, or missing although a pass needs it."""
    needs = next((pass_.name for pass_ in passes if pass_.needs_calibration), "")
    if calibration is None and needs:
        raise SpecError(
            f"{needs} needs calibration data",
            why="what it begins with is measured on text or other inputs, and nothing in the weights determines it",
            remedy="pass calibration=, on the command line --calibrate FILE: a few thousand tokens like those the model is used on",
            option="calibration",
            code="no-calibration",
        )
    if tokenizer is not None and not any(pass_.uses_tokenizer for pass_ in passes):
        reading = ", ".join(spec for name in pass_names() if (spec := load_pass(name).reads_tokenizer))
        why = f"passes that use it: {reading}; calibration= takes token ids of any tokenizer"
        raise SpecError("none of the passes uses tokenizer=", why=why, remedy="drop it", option="tokenizer", code="no-effect")
    if calibration is not None and not any(pass_.calibrates for pass_ in passes):
        fitted = ", ".join(name for name in pass_names() if load_pass(name).calibrates)
        why = f"passes that use it: {fitted}"
        raise SpecError("none of the passes uses calibration=", why=why, remedy="drop it", option="calibration", code="no-effect")


@serialized
def apply_reported(
    model: nn.Module,
    *passes: AnyPass | str,
    example_inputs: Any = None,
    calibration: Any = None,
    tokenizer: Any = None,
    verify: bool = True,
    emit: str = "module",
    checks: str | Collection[str] = "all",
    progress: Progress | None = None,
    count_flops: bool = True,
    dense: Program | None = None,
    fitted: bool = True,
) -> Applied:
    """Apply passes like `apply`, and return an account of the changes, their cost and the results of the checks.

    With `dense`, the program of an equal model, the modules are rewritten without capturing the model again. Without `fitted`,
    passes that need calibration data are applied without it: the values in the result are to be replaced.
    """
    progress = progress or (lambda stage: None)
    chosen = parse_passes(passes)
    require_rewritable(model)
    require_in_memory(model, "rewritten")
    refuse_packed(model, "rewritten")
    if verify:
        require_values(model, "verified", "load its weights first, or use verify=False")
    if fitted or calibration is not None:
        require_use(calibration, chosen, tokenizer)
    run_checks = named_checks(checks) if verify else ()
    refuse_early(model, chosen)
    calibration = readable_calibration(model, calibration)
    how = functools.partial(
        using_tokenizer(tokenizer)(rewrite_once),
        passes=chosen,
        example_inputs=example_inputs,
        calibration=calibration,
        checks=run_checks,
        progress=progress,
        count_flops=count_flops,
    )
    try:
        return how(model, emit=emit, dense=dense)
    except DoesNotFitError as refusal:
        if emit == "graph" or isinstance(model, fx.GraphModule) or refusal.in_any_form:
            raise without_graph_fix(refusal) from None
        progress("trying its graph")
        inside = transformer_inside(model, example_inputs)
        if transformers_bookkeeping.is_transformers(inside):
            if not fits_as_graph(inside, chosen, named_inputs(inside, example_inputs)):
                raise without_graph_fix(refusal) from None
            refusal.remedies += (GRAPH_FIX,)
            raise
        try:
            return how(model, emit="graph", note=f"{BECOMES_GRAPH}: {refusal.why or refusal.what}")
        except CaptureError as error:
            why = f"{refusal.why or refusal.what}; and the model has no graph to rewrite: {error.why}"
            remedy = without_form(error.remedies, "module") or without_form(refusal.remedies, "graph")
            raise DoesNotFitError(
                refusal.matter, by=refusal.by, why=why, remedy=remedy, site=refusal.site, code=refusal.code
            ) from None
        except RetrofitError:  # the graph cannot store it either
            raise without_graph_fix(refusal) from None


def without_graph_fix(refusal: DoesNotFitError) -> DoesNotFitError:
    """Return the refusal of a graph, without the fix of making it one."""
    refusal.remedies = without_form(refusal.remedies, "graph")
    return refusal


def rewrite_once(
    model: nn.Module,
    *,
    passes: Recipe,
    example_inputs: Any,
    calibration: Any,
    checks: Collection[str],
    emit: str,
    progress: Progress,
    count_flops: bool,
    note: str = "",
    keep: Keep | None = None,
    dense: Program | None = None,
) -> Applied:
    """Rewrite the model's modules or its graph like `apply_reported`, with the named `checks`; `note` is for the first pass.

    `keep` gets the parameters that the edits put into the model (`Edit`). `dense` is the program of the same model with weights,
    whose modules are rewritten as they are: the model is not captured again.
    """
    whole, model = model, transformer_inside(model, example_inputs)
    fed = model if model is not whole else None
    before = sum(parameter.numel() for parameter in model.parameters())
    if dense is None:
        given = model
        model, inputs, dense = prepare_model(model, example_inputs, emit, progress)
        if emit == "module" and isinstance(model, fx.GraphModule) and not isinstance(given, fx.GraphModule):
            note = LAYERS_IN_CODE
    else:
        inputs = distinct_lengths(model, named_inputs(model, example_inputs))
        dense = dataclasses.replace(dense, examples=inputs)  # on the device of this model
    progress(f"planning {passes[0].name}")
    anatomy = read_anatomy(model, dense)
    plan = require_place(model, passes[0], anatomy)
    if plan.unseen and example_inputs is None:
        raise unseen_refusal(passes[0], plan.unseen)
    data = None if calibration is None else calibration_from(model, calibration, inputs)
    reference = None
    optional: tuple[dict[str, Any], ...] = ()
    if checks:
        progress("measuring the dense model")
        reference = Reference.of(model, inputs, dense, checks=checks, optional=example_inputs is None, keep_dense=keep is None)
        optional = reference.optional
    elif example_inputs is None and device_of(model).type != "meta" and keep is None:
        optional = with_optional(model, inputs)
    require_finite(model, None if reference is None else reference.parameters)
    hooks = HookWatch(model)
    calls = hooks.calls(model, inputs)
    edit = Edit(model, data, keep)
    edit.plans[passes[0].spec()] = plan
    modules = dict(model.named_modules(remove_duplicate=False))
    earlier, earlier_record = recipe_storage.stored_recipe(model), recipe_storage.stored_record(model)
    if example_inputs is not None:
        edit.record_provenance(inputs=describe_inputs(inputs))
    if isinstance(model, fx.GraphModule) and not earlier:
        edit.record_provenance(dense=DenseGraph.of(model))
    try:
        recipe_storage.make_room(model, edit)
        config = recipe_storage.dense_config(model)
        done, dense_flops = run_passes(model, passes, inputs, edit, progress, dense, anatomy)
        transformers_bookkeeping.keep_on_one_device(model, modules.values(), edit)
        if note:
            done = (dataclasses.replace(done[0], notes=(note, *done[0].notes)), *done[1:])
        for pass_, rewrite in zip(passes, done, strict=True):
            if rewrite.unseen and example_inputs is None:
                raise unseen_refusal(pass_, rewrite.unseen)
        record = recipe_storage.new_record(model, config, done)
        recipe_storage.store_recipe(model, (*earlier, *(rewrite.spec for rewrite in done)), record)
        before_these = with_current_names(rewrites(model) or (), edit.dense, modules, edit)
        layouts = {**provenance_of(model).rearranged, **rearranged(edit)}
        edit.record_provenance(rewrites=(*before_these, *done), rearranged=layouts, added=added(edit))
        if "name_or_path" in vars(model):  # adapters store it as the name of the model that they were trained on
            edit.set_attribute(model, "name_or_path", "")
        progress("capturing the result")
        report = result = None
        if checks or count_flops or device_of(model).type == "meta":
            result = capture_result(model, inputs, passes)
        else:
            run_result(model, inputs, passes)
        for more in optional:
            run_with_optional(model, more, passes)
        hooks.require_calls(calls, hooks.calls(model, inputs), ", ".join(pass_.name for pass_ in passes))
        if reference is not None:
            progress("verifying")
            report = check_rewrite(
                model,
                reference,
                done,
                edit.account(),
                program=result,
                checks=checks,
                calibration=edit.calibration,
                dense_parameters=edit.dense,
            )
            if not report.ok:
                failed = ", ".join(check.name for check in report.checks if check.status == "failed")
                raise VerificationError(
                    f"the rewritten model failed: {failed}",
                    report=report,
                    why=str(report),
                    remedy="the model was left as it was; this is a bug in retrofit if the dense model passes the same checks",
                    code="differs",
                )
        if isinstance(model, fx.GraphModule):
            propagate_shapes(model, inputs)
    except BaseException:
        edit.undo()
        recipe_storage.store_recipe(model, earlier, earlier_record)
        raise
    flops = flops_per_token(result) if count_flops and result is not None else 0
    after = sum(parameter.numel() for parameter in model.parameters())
    return Applied(
        whole if model is fed else model, done, report, before, after, dense_flops, flops, edit.account(), unit_of(dense)
    )


def capture_result(model: nn.Module, inputs: dict[str, Any], passes: Recipe) -> Program:
    """Return the rewritten model as a program. Raises `DoesNotFitError` if it does not run."""
    try:
        return capture(model, inputs)
    except CaptureError as error:
        raise not_running(error.why, passes) from error


def run_result(model: nn.Module, inputs: dict[str, Any], passes: Recipe) -> None:
    """Raises `DoesNotFitError` unless the rewritten model runs: one short forward, used if its program is not needed."""
    try:
        with preserve_state(model):
            run(model, inputs)
    except Exception as error:  # of any type, from the model's own code
        raise not_running(failure_in(model, error), passes) from error


def run_with_optional(model: nn.Module, inputs: dict[str, Any], passes: Recipe) -> None:
    """Raises `DoesNotFitError` unless the rewritten model runs on the inputs, unseen by the passes, on which the dense one runs."""
    try:
        run_result(model, inputs, passes)
    except DoesNotFitError as error:
        error.what, error.in_any_form = f"{error.what} on {describe(inputs)}, as the dense model does", True
        error.remedies += (SEE_EVERYTHING,)
        raise


def not_running(why: str, passes: Recipe) -> DoesNotFitError:
    one_by_one = "apply the passes one at a time to find the one that does not fit"
    fix = passes[0].way_around if len(passes) == 1 else one_by_one
    return DoesNotFitError(
        "the rewritten model does not run", why=why, remedy=f"the model was left as it was; {fix}", code="does-not-run"
    )


__all__ = ["Applied", "apply", "apply_reported", "recipe"]
