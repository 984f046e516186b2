"""Run passes over a model, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.inspection import inspect, read_anatomy
from retrofit.errors import DoesNotFitError
from retrofit.pipeline.applied_to import AppliedTo
from retrofit.pipeline.protocol import AnyPass, Plan, Recipe, Rewrite
from retrofit.program.cost import flops_per_token
from retrofit.program.program import Program
from retrofit.runtime.counted_work import reported_to
from retrofit.surgery.edit import Edit
from retrofit.surgery.transformers_bookkeeping import shared_names
from retrofit.surgery.user_hooks import HookWatch

Progress = Callable[[str], None]


def run_passes(
    model: nn.Module,
    passes: Recipe,
    inputs: dict[str, Any],
    edit: Edit,
    say: Progress,
    program: Program | None = None,
    anatomy: Anatomy | None = None,
) -> tuple[tuple[Rewrite, ...], int]:
    """Each pass rewrites the result of the one before it; returns their accounts and the FLOPs before the first.

    `program` is the model's, where it is captured already, and `anatomy` what was read in it.
    """
    rewrites: list[Rewrite] = []
    dense_flops = 0
    for one in passes:
        say(f"inspecting for {one.name}")
        if rewrites or anatomy is None:
            anatomy = inspect(model, inputs) if program is None or rewrites else read_anatomy(model, program)
        dense_flops = dense_flops or flops_per_token(anatomy.program)
        say(f"rewriting with {one.spec()}")
        before, lost = parameter_sizes(model), dropped_elements(edit)
        names, modules = (dict(every(remove_duplicate=False)) for every in (model.named_parameters, model.named_modules))
        hooks = HookWatch(model)
        try:
            with torch.no_grad(), reported_to(say):
                account = one.rewrite(anatomy, edit)
        except DoesNotFitError as refusal:
            hooks.explain(refusal)
            raise
        edit.plans.clear()  # the model is another one now
        hooks.require_kept(model, one.name)
        after = parameter_sizes(model)
        rewrites = list(with_current_names(rewrites, names, modules, edit))
        gone = {key: size for key, size in before.items() if key not in after and key not in edit.replaced}
        superseded = sum(gone.values()) - (dropped_elements(edit) - lost)
        found = AppliedTo.found(anatomy, [site.name for site in account.sites], shared_names(iter(names.items())))
        rewrites.append(dataclasses.replace(account, superseded=superseded, applied_to=found))
    return tuple(rewrites), dense_flops


def require_place(model: nn.Module, one: AnyPass, anatomy: Anatomy) -> Plan:
    """The plan of the first pass; raises `DoesNotFitError` where it has no site, and names the hooks that have a part in that."""
    try:
        plan: Plan = one.fitting_plan(anatomy)
    except DoesNotFitError as refusal:
        HookWatch(model).explain(refusal)
        raise
    return plan


def with_current_names(
    rewrites: Iterable[Rewrite], parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module], edit: Edit
) -> tuple[Rewrite, ...]:
    """The accounts of earlier passes with current names of parameters and sites; by their old names, what these were is given."""
    names = {id(parameter): name for name, parameter in edit.model.named_parameters()}
    places: dict[int, list[str]] = {}
    for path, module in edit.model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(path)

    def parameter_name(name: str) -> str:
        old = parameters.get(name)
        return name if old is None else names.get(id(edit.replaced.get(id(old), old)), name)

    def site_name(name: str) -> str:
        paths = places.get(id(modules.get(name)), [name])
        return name if name in paths else paths[0]

    return tuple(
        dataclasses.replace(
            one,
            second_step=tuple(map(parameter_name, one.second_step)),
            unreached=tuple(map(parameter_name, one.unreached)),
            sites=tuple(dataclasses.replace(site, name=site_name(site.name)) for site in one.sites),
        )
        for one in rewrites
    )


def parameter_sizes(model: nn.Module) -> dict[int, int]:
    """The elements of each of the model's parameters, by identity."""
    return {id(parameter): parameter.numel() for parameter in model.parameters()}


def dropped_elements(edit: Edit) -> int:
    """How many elements of the dense model have been dropped so far."""
    lost = {id(edit.dense[name]): edit.dense[name].numel() for name, fate in edit.account().items() if fate.kind == "dropped"}
    return sum(lost.values())
