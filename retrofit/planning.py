"""`plan_of`: what passes would rewrite in a model and what they would leave alone, and what the result would cost."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.inspection import inspect, read_anatomy
from retrofit.anatomy.sites import NearMiss
from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.pipeline.protocol import AnyPass, Plan
from retrofit.program.capture import capture
from retrofit.program.cost import flops_per_token
from retrofit.program.program import Program
from retrofit.rewriting import Progress, as_rewritable, chosen_passes
from retrofit.runtime.example_inputs import named_inputs
from retrofit.surgery.edit import Edit


@dataclasses.dataclass(frozen=True)
class PlannedPass:
    """One pass of a recipe and its plan."""

    spec: str
    exact: bool
    plan: Plan

    @property
    def fits(self) -> bool:
        """Whether the pass finds anything to rewrite; `apply` refuses a pass that does not."""
        return bool(self.plan.sites)

    def lines(self) -> Iterator[str]:
        """What is to be said of it, the spec first."""
        plan = self.plan
        kind = "the same function at step 0" if self.exact else "approximate at step 0"
        yield f"{self.spec}: {f'{len(plan.sites)} sites, {kind}' if self.fits else 'fits nowhere, and apply would refuse it'}"
        yield from (f"  rewritten   {site.name or 'the model'}: {site.what}" for site in plan.sites)
        for miss in plan.near_misses:
            yield f"  left alone  {miss.name or 'the model'}: {miss.why}"
            if miss.remedy:
                yield f"              way out: {miss.remedy}"
        if self.fits:
            yield f"  parameters  {plan.new_parameters:,} new" + (f": {plan.formula}" if plan.formula else "")
        yield from (f"  note        {note}" for note in plan.notes)


@dataclasses.dataclass(frozen=True)
class RecipePlan:
    """What a sequence of passes would do to one model, and its cost before and after."""

    passes: tuple[PlannedPass, ...]
    parameters_before: int
    parameters_after: int
    flops_before: int  # a token, forward
    flops_after: int | None  # None where the result could not be captured without its weights

    @property
    def fits(self) -> bool:
        """Whether every pass finds something to rewrite."""
        return all(one.fits for one in self.passes)

    def __str__(self) -> str:
        lines = [line for one in self.passes for line in (*one.lines(), "")]
        lines.append(f"parameters       {change(self.parameters_before, self.parameters_after)}")
        after = "not known before it is done" if self.flops_after is None else change(self.flops_before, self.flops_after)
        lines.append(f"FLOPs per token  {after}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for `json`."""
        return {
            "passes": [
                {
                    "spec": one.spec,
                    "exact": one.exact,
                    "fits": one.fits,
                    "sites": [{"name": site.name, "what": site.what} for site in one.plan.sites],
                    "near_misses": [dataclasses.asdict(miss) for miss in one.plan.near_misses],
                    "new_parameters": one.plan.new_parameters,
                    "formula": one.plan.formula,
                    "notes": list(one.plan.notes),
                }
                for one in self.passes
            ],
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "flops_per_token": {"before": self.flops_before, "after": self.flops_after},
        }


def plan_of(
    model: nn.Module, *passes: AnyPass | str, example_inputs: Any = None, emit: str = "module", progress: Progress | None = None
) -> RecipePlan:
    """What `apply(model, *passes)` would rewrite and what it would leave alone and why, and what the result would cost.

    Nothing is done to `model`: after the first plan, which is made of the model itself, everything happens to a copy without
    weights. A pass that fits nowhere has a plan without sites, and the passes after it are planned as if it were not there. Raises
    `RetrofitError` where the model cannot be captured or holds no transformer, `SpecError` where a pass cannot be read.
    """
    say = progress or (lambda stage: None)
    chosen = chosen_passes(passes)
    model, inputs, program = as_rewritable(model, example_inputs, emit, say)
    skeleton = without_weights(model)
    edit = Edit(skeleton)
    planned: list[PlannedPass] = []
    rewritten = False
    for one in chosen:
        say(f"planning {one.name}")
        anatomy = inspect(skeleton, inputs) if rewritten else read_anatomy(model, program)
        plan = plan_for(one, anatomy)
        planned.append(PlannedPass(plan.spec or one.spec(), one.exact if plan.exact is None else plan.exact, plan))
        if plan.sites:
            one.carry_out(plan, edit)
            rewritten = True
    say("counting what the result would cost")
    after = captured(skeleton, inputs)
    return RecipePlan(
        tuple(planned),
        parameters_before=elements(model),
        parameters_after=elements(skeleton),
        flops_before=flops_per_token(program),
        flops_after=None if after is None else flops_per_token(after),
    )


def plan_for(one: AnyPass, anatomy: Anatomy) -> Plan:
    """The plan of a pass; where it refuses the model as a whole one without sites that says so."""
    near_misses: list[NearMiss] = []
    try:
        plan: Plan = one.plan(anatomy)
        return plan
    except DoesNotFitError as error:
        near_misses.append(NearMiss("", f"{error.what}: {error.why}" if error.why else error.what, error.remedy))
    return Plan((), tuple(near_misses))


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: parameters and buffers have shapes and no values, tied ones are tied."""
    held: dict[int, Any] = {}
    for parameter in model.parameters():
        held[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        held[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, held)


def captured(skeleton: nn.Module, inputs: dict[str, Any]) -> Program | None:
    """The program of a model without weights; None where it cannot be captured so."""
    try:
        return capture(skeleton, named_inputs(skeleton, inputs))
    except CaptureError:
        return None


def elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def change(before: int, after: int) -> str:
    """A count before and after, and by how much it grew."""
    return f"{before:,} → {after:,}" + (f" ({(after - before) / before:+.1%})" if before else "")
