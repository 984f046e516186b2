"""`plan_of`: the sites that passes would rewrite in a model, their near misses, and the cost of the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import fx, nn

from retrofit.anatomy import Anatomy, format_change
from retrofit.anatomy.inspection import inspect, read_anatomy
from retrofit.anatomy.parts import NearMiss
from retrofit.emitted import graph_module
from retrofit.errors import CaptureError, DoesNotFitError, Remedy, RetrofitError, SpecError, without_form
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import without_weights
from retrofit.inputs.model_state import preserve_random_state
from retrofit.inputs.probes import distinct_lengths
from retrofit.inputs.usable_models import (
    require_rewritable,
    transformer_inside,
)
from retrofit.passbase.protocol import AnyPass, Plan, Recipe, as_pass
from retrofit.passbase.report_text import aligned, plan_rows, separated
from retrofit.passbase.running import run_passes
from retrofit.process import serialized
from retrofit.program.capture import capture
from retrofit.program.cost import Cost, cost_of, flops_of_run, flops_per_token
from retrofit.program.program import Program
from retrofit.progress import Progress
from retrofit.surgery import Edit, transformers_bookkeeping

AS_GRAPH = "the result is a graph module on the same parameters, saved as .pt2"
BECOMES_GRAPH = f"its modules cannot express this rewrite, so {AS_GRAPH}"
LAYERS_IN_CODE = f"its layers are in the code of a larger module, so {AS_GRAPH}"
SEE_EVERYTHING = "pass example_inputs= with everything the model should read, for example images"
GRAPH_FIX = Remedy("rewrite its graph, without its class, cache and generate: retrofit.apply(model, …, emit='graph')", "graph")


@dataclasses.dataclass(frozen=True)
class PlannedPass:
    """One pass of a recipe and its plan."""

    spec: str
    exact: bool
    plan: Plan

    @property
    def fits(self) -> bool:
        """Return whether the pass finds anything to rewrite; `apply` refuses a pass that does not."""
        return bool(self.plan.sites)


@dataclasses.dataclass(frozen=True)
class RecipePlan:
    """The plan of a sequence of passes on one model, with the cost before and after."""

    passes: tuple[PlannedPass, ...]
    parameters_before: int
    parameters_after: int
    flops_before: int  # per token, forward
    flops_after: int | None  # None if the result could not be captured without weights
    unit: str = "token"  # of these FLOPs
    becomes_graph: bool = False  # the model has modules, the result is its graph

    @property
    def fits(self) -> bool:
        """Return whether every pass finds something to rewrite."""
        return all(pass_.fits for pass_ in self.passes)

    def as_graph(self, note: str) -> RecipePlan:
        """Return the same for a result that is a graph, with a note on the first pass."""
        first, *others = self.passes
        noted = dataclasses.replace(first, plan=dataclasses.replace(first.plan, notes=(*first.plan.notes, note)))
        return dataclasses.replace(self, passes=(noted, *others), becomes_graph=True)

    def with_fix(self, fix: str) -> RecipePlan:
        """Return the same with an additional fix for the first near miss of each pass that fits nowhere."""
        passes = []
        for planned in self.passes:
            misses = planned.plan.near_misses
            if not planned.fits and misses:
                first = dataclasses.replace(misses[0], remedies=(*misses[0].remedies, fix))
                planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, near_misses=(first, *misses[1:])))
            passes.append(planned)
        return dataclasses.replace(self, passes=tuple(passes))

    def without_graph_fix(self) -> RecipePlan:
        """Return the same for a model that is a graph or cannot become one: without fixes that require a graph."""
        passes = []
        for planned in self.passes:
            found = planned.plan.near_misses
            misses = tuple(dataclasses.replace(miss, remedies=without_form(miss.remedies, "graph")) for miss in found)
            passes.append(dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, near_misses=misses)))
        return dataclasses.replace(self, passes=tuple(passes))

    def rows(self) -> list[tuple[str, str]]:
        """Return the planned changes of each pass, then parameters and FLOPs before and after, as rows of two cells."""
        after = "unknown until it is applied" if self.flops_after is None else format_change(self.flops_before, self.flops_after)
        return [
            *separated(plan_rows(planned.spec, planned.exact, planned.plan) for planned in self.passes),
            ("parameters", format_change(self.parameters_before, self.parameters_after)),
            (f"FLOPs per {self.unit}", after),
        ]

    def __str__(self) -> str:
        return aligned(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for `json`."""
        return {
            "passes": [
                {
                    "spec": planned.spec,
                    "exact": planned.exact,
                    "fits": planned.fits,
                    "sites": [{"name": site.name, "what": site.what} for site in planned.plan.sites],
                    "near_misses": [
                        {"name": miss.name, "why": miss.why, "remedy": miss.remedy, "code": miss.code}
                        for miss in planned.plan.near_misses
                    ],
                    "new_parameters": planned.plan.new_parameters,
                    "formula": planned.plan.formula,
                    "notes": list(planned.plan.notes),
                }
                for planned in self.passes
            ],
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "flops_per_token": {"before": self.flops_before, "after": self.flops_after, "unit": self.unit},
        }


@serialized
def plan_of(
    model: nn.Module, *passes: AnyPass | str, example_inputs: Any = None, emit: str = "module", progress: Progress | None = None
) -> RecipePlan:
    """Return what `apply(model, *passes)` would rewrite, what it would not and why, and the cost of the result.

    `model` does not change: the first plan is made from the model itself, and every plan is applied to a copy without weights. A
    pass that fits nowhere has a plan without sites, and the later passes are planned without it. If `apply` would rewrite the
    model's graph instead, the plan is that for the graph. Raises `RetrofitError` if the model cannot be captured or contains no
    transformer, `SpecError` if a pass cannot be parsed.
    """
    report = progress or (lambda stage: None)
    parsed = parse_passes(passes)
    require_rewritable(model)
    plan, planned_as = plan_once(model, parsed, example_inputs, emit, report)
    if isinstance(planned_as, fx.GraphModule):
        plan = plan.without_graph_fix()
        return plan.as_graph(LAYERS_IN_CODE) if emit == "module" and not isinstance(model, fx.GraphModule) else plan
    if plan.fits and plan.flops_after is not None:
        return plan
    if any(planned.plan.fits_no_form for planned in plan.passes):
        return plan.without_graph_fix()
    report("planning for its graph")
    try:
        for_graph, _ = plan_once(model, parsed, example_inputs, "graph", report)
    except RetrofitError:
        return plan.without_graph_fix()
    if not for_graph.fits or for_graph.flops_after is None:
        return plan.without_graph_fix()
    if transformers_bookkeeping.is_transformers(planned_as):
        return plan if plan.fits else plan.with_fix(GRAPH_FIX)
    return for_graph.as_graph(BECOMES_GRAPH)


def plan_once(model: nn.Module, parsed: Recipe, example_inputs: Any, emit: str, report: Progress) -> tuple[RecipePlan, nn.Module]:
    """Return the plan for the model's modules, or its graph, and the model that it is for."""
    with preserve_random_state():
        model = transformer_inside(model, example_inputs)
        model, inputs, program = prepare_model(model, example_inputs, emit, report)
        skeleton = without_weights(model)
        dense = cost_of(program)
        run_counts = runs_as_captured(skeleton, inputs, dense)
        planned: list[PlannedPass] = []
        done: list[str] = []
        for pass_ in parsed:
            report(f"planning {pass_.name}")
            anatomy = inspect_skeleton(skeleton, inputs, pass_, done) if done else read_anatomy(model, program)
            plan = plan_pass(pass_, anatomy, skeleton, seen=example_inputs is not None)
            planned.append(PlannedPass(plan.spec or pass_.spec(), pass_.exact if plan.exact is None else plan.exact, plan))
            if plan.sites:
                done.append(pass_.name)
        report("counting the cost of the result")
        flops_before = dense.flops_per_token
        flops_after = skeleton_flops(skeleton, inputs, dense, run_counts) if done else flops_before
    before, after = count_parameters(model), count_parameters(skeleton)
    return RecipePlan(tuple(planned), before, after, flops_before, flops_after, dense.unit), model


def plan_pass(pass_: AnyPass, anatomy: Anatomy, skeleton: nn.Module, seen: bool) -> Plan:
    """Return the plan of a pass, applied to the skeleton; one without sites if the pass refuses the model.

    A plan that may be wrong for arguments missing from inferred inputs is refused, unless the inputs are `seen` to be all that the
    model reads.
    """
    edit = Edit(skeleton)
    near_misses: tuple[NearMiss, ...] = ()
    try:
        plan: Plan = pass_.plan(anatomy)
        near_misses = plan.near_misses
        if plan.unseen and not seen:
            raise unseen_refusal(pass_, plan.unseen)
        if plan.sites:
            pass_.carry_out(plan, edit)
        elif not near_misses:
            raise pass_.nothing_fits(plan)
        return dataclasses.replace(plan, notes=(*pass_.idle_notes(), *plan.notes))
    except DoesNotFitError as error:
        edit.undo()
        why = f"{error.what}: {error.why}" if error.why else error.what
        refusal = NearMiss("", why, error.remedies, error.in_any_form, error.code)
        return Plan((), (*near_misses, refusal))


def inspect_skeleton(skeleton: nn.Module, inputs: dict[str, Any], pass_: AnyPass, done: list[str]) -> Anatomy:
    """Return the anatomy after the previous passes. Raises `CaptureError` if the model cannot be captured without weights."""
    try:
        return inspect(skeleton, inputs)
    except CaptureError as error:
        raise CaptureError(
            f"{pass_.name} cannot be planned after {', '.join(done)}",
            why=f"without its weights the model cannot be captured: {error.why or error.what}",
            remedy=f"apply {', '.join(done)} first, then plan {pass_.name}",
            code="not-captured",
        ) from error


def skeleton_flops(skeleton: nn.Module, inputs: dict[str, Any], dense: Cost, run_counts: bool) -> int | None:
    """Return the FLOPs per token of a model without weights; None if it does not run.

    They are counted in a run if for the dense model that gave the FLOPs of its graph (`run_counts`), and otherwise from its graph.
    """
    if run_counts:
        with suppress(Exception):  # of any type, from the model's own code without values; a capture may still replay them
            return round(flops_of_run(skeleton, named_inputs(skeleton, inputs)) / dense.tokens)
    try:
        return flops_per_token(capture(skeleton, named_inputs(skeleton, inputs)))
    except RetrofitError:
        return None


def runs_as_captured(skeleton: nn.Module, inputs: dict[str, Any], dense: Cost) -> bool:
    """Return whether a run of the dense model's skeleton counts the FLOPs that its graph has."""
    try:
        return flops_of_run(skeleton, named_inputs(skeleton, inputs)) == dense.flops
    except Exception:  # of any type, from the model's own code without values
        return False


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ── Shared with `apply` ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_passes(passes: Sequence[AnyPass | str]) -> Recipe:
    """Return the passes, given as passes or specs. Raises `SpecError` if there is none."""
    if not passes:
        raise SpecError(
            "no pass given", remedy="pass at least pass_, e.g. retrofit.apply(model, AltUp(k=2))", option="passes", code="empty"
        )
    return tuple(as_pass(pass_) for pass_ in passes)


def prepare_model(
    model: nn.Module, example_inputs: Any, emit: str, progress: Progress
) -> tuple[nn.Module, dict[str, Any], Program]:
    """Return the model that passes rewrite, its inputs and its program: a graph module if `emit` or the layers require one."""
    if emit not in ("module", "graph"):
        raise SpecError(
            f"emit={emit!r} is neither module nor graph", remedy="use emit='module' or emit='graph'", option="emit", code="choice"
        )
    inputs = distinct_lengths(model, named_inputs(model, example_inputs))
    progress("capturing the dense model")
    program = capture(model, inputs)
    if emit == "module" and (transformers_bookkeeping.is_transformers(model) or not has_layers_in_code(model, program)):
        return model, inputs, program
    progress("building its graph module")
    model = graph_module(model, inputs)
    inputs = named_inputs(model)
    return model, inputs, capture(model, inputs)


def has_layers_in_code(model: nn.Module, program: Program) -> bool:
    """Return whether some layer is not a module but part of a larger module's code."""
    return any(not layer.name for layer in read_anatomy(model, program).layers)


def unseen_refusal(pass_: AnyPass, unseen: Sequence[str]) -> DoesNotFitError:
    """Return the refusal of a pass that may be wrong for arguments missing from the inferred inputs."""
    return DoesNotFitError(
        f"the derived example inputs lack {', '.join(unseen)}",
        by=pass_.name,
        why="features computed from them may join the stream, which the captured graph does not show",
        remedy=(pass_.way_around, SEE_EVERYTHING),
        in_any_form=True,
        code="no-inputs",
    )


def fits_as_graph(model: nn.Module, passes: Recipe, inputs: dict[str, Any]) -> bool:
    """Return whether every pass fits the model's graph and the result can be captured."""
    try:
        with preserve_random_state():
            graph = graph_module(model, inputs)
            given = named_inputs(graph)
            program = capture(graph, given)
            skeleton = without_weights(graph)
            run_passes(skeleton, passes, given, Edit(skeleton), lambda stage: None, program)
            capture(skeleton, given)
    except Exception:  # a refusal, or any error of the model's own code: no fix is offered
        return False
    return True
