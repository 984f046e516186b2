"""Run passes over a model, one after the other; refuse early if options or weight sizes already rule a pass out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit.anatomy import Anatomy
from retrofit.anatomy.inspection import inspect, read_anatomy
from retrofit.errors import CheckpointError, DoesNotFitError, first_few
from retrofit.files.headers import extents_of
from retrofit.passbase.options import depth_ranges, format_value
from retrofit.passbase.protocol import AnyPass, AppliedTo, Plan, Recipe, Rewrite
from retrofit.program.cost import flops_per_token
from retrofit.program.program import Program
from retrofit.progress import Progress, reported_to
from retrofit.surgery import Edit
from retrofit.surgery.dequantization import is_quantized
from retrofit.surgery.transformers_bookkeeping import shared_names
from retrofit.surgery.user_hooks import HookWatch


def run_passes(
    model: nn.Module,
    passes: Recipe,
    inputs: dict[str, Any],
    edit: Edit,
    progress: Progress,
    program: Program | None = None,
    anatomy: Anatomy | None = None,
) -> tuple[tuple[Rewrite, ...], int]:
    """Apply the passes one after the other; return their accounts and the FLOPs before the first.

    `program` is the model's, if it was already captured, and `anatomy` the one already read from it.
    """
    rewrites: list[Rewrite] = []
    dense_flops = 0
    for method in passes:
        progress(f"inspecting for {method.name}")
        if rewrites or anatomy is None:
            anatomy = inspect(model, inputs) if program is None or rewrites else read_anatomy(model, program)
        dense_flops = dense_flops or flops_per_token(anatomy.program)
        progress(f"rewriting with {method.spec()}")
        before, lost = parameter_sizes(model), dropped_elements(edit)
        names, modules = (dict(every(remove_duplicate=False)) for every in (model.named_parameters, model.named_modules))
        hooks = HookWatch(model)
        try:
            with torch.no_grad(), reported_to(progress):
                account = method.rewrite(anatomy, edit)
        except DoesNotFitError as refusal:
            hooks.explain(refusal)
            raise
        edit.plans.clear()  # made for the model before this pass
        hooks.require_kept(model, method.name)
        after = parameter_sizes(model)
        rewrites = list(with_current_names(rewrites, names, modules, edit))
        gone = {key: size for key, size in before.items() if key not in after and key not in edit.replaced}
        superseded = sum(gone.values()) - (dropped_elements(edit) - lost)
        found = applied_to(anatomy, account, shared_names(iter(names.items())))
        rewrites.append(dataclasses.replace(account, superseded=superseded, applied_to=found, added=new_names(edit, before)))
    return tuple(rewrites), dense_flops


def applied_to(anatomy: Anatomy, account: Rewrite, ties: Iterable[Iterable[str]]) -> AppliedTo:
    """Return the description of the model, with this anatomy, that the pass of `account` was applied to."""
    stacks = []
    for stack in anatomy.stacks:
        heads = next((branch.heads for layer in stack.layers for branch in layer.attentions), None)  # of its first attention
        stacks.append((stack.kind, len(stack.layers), stack.width, heads))
    return AppliedTo(tuple(site.name for site in account.sites), tuple(map(tuple, ties)), tuple(stacks))


def new_names(edit: Edit, before: Mapping[int, int]) -> tuple[str, ...]:
    """Return the names of the parameters not in `before` (identities) that replace no earlier parameter."""
    known = {*before, *(id(parameter) for parameter in edit.replaced.values())}
    return tuple(name for name, parameter in edit.model.named_parameters() if id(parameter) not in known)


def require_place(model: nn.Module, method: AnyPass, anatomy: Anatomy) -> Plan:
    """Return the plan of the first pass. Raises `DoesNotFitError`, naming any hooks that prevent it, if it has no site."""
    try:
        plan: Plan = method.fitting_plan(anatomy)
    except DoesNotFitError as refusal:
        HookWatch(model).explain(refusal)
        raise
    return plan


def with_current_names(
    rewrites: Iterable[Rewrite], parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module], edit: Edit
) -> tuple[Rewrite, ...]:
    """Return the accounts of earlier passes with current names; `parameters` and `modules` are given by their old names."""
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
            rewrite,
            second_step=tuple(map(parameter_name, rewrite.second_step)),
            unreached=tuple(map(parameter_name, rewrite.unreached)),
            added=tuple(map(parameter_name, rewrite.added)),
            sites=tuple(dataclasses.replace(site, name=site_name(site.name)) for site in rewrite.sites),
        )
        for rewrite in rewrites
    )


def parameter_sizes(model: nn.Module) -> dict[int, int]:
    """Return the number of elements of each parameter of the model, by identity."""
    return {id(parameter): parameter.numel() for parameter in model.parameters()}


def dropped_elements(edit: Edit) -> int:
    """Return how many elements of the dense model have been dropped so far."""
    lost = {id(edit.dense[name]): edit.dense[name].numel() for name, fate in edit.account().items() if fate.kind == "dropped"}
    return sum(lost.values())


SHOWN = 8  # sizes listed in a refusal
NEAREST = 3  # values suggested by a fix
SEE_SIZES = "retrofit inspect shows the sizes of the model's matrices"


def refuse_early(model: nn.Module, passes: Recipe) -> None:
    """Raises `RetrofitError` if the options, earlier passes or the sizes of the weights rule a pass out."""
    require_consistent(passes)
    if not is_quantized(model):
        refuse_sizes(passes, WeightSizes.of(model))


def refuse_sizes(passes: Recipe, sizes: WeightSizes | None) -> None:
    """Raises `DoesNotFitError` if no weight has a size that an option needs."""
    added: frozenset[int] | None = frozenset()  # extents that earlier passes may have added
    for method in passes:
        if sizes is None or added is None:
            return
        require_sizes(method, sizes, added)
        more = method.added_sizes(sizes.all | added)
        added = None if more is None else added | (more - {0})


def require_consistent(passes: Recipe) -> None:
    """Raises `DoesNotFitError` if a pass repeats an earlier equal one at the same sites, `SpecError` if `layers` is malformed."""
    for number, method in enumerate(passes):
        for field in dataclasses.fields(method):
            text = getattr(method, field.name)
            if field.metadata.get("depths") and text not in ("all", field.default):
                depth_ranges(text, method.name)
        if any(leaves_nothing(earlier, method) for earlier in passes[:number]):
            raise DoesNotFitError(
                "given twice",
                by=method.name,
                why=f"{method.already} the second time, at the same sites{chosen_by(method)}",
                remedy="give it once",
                in_any_form=True,
                code="twice",
            )


def leaves_nothing(earlier: AnyPass, later: AnyPass) -> bool:
    """Return whether the options that select the sites are the same in both passes."""
    if type(earlier) is not type(later) or later.places_by is None:
        return False
    covers_all = {
        field.name
        for field in dataclasses.fields(later)
        if field.metadata.get("depths") or "all" in field.metadata.get("choices", ())
    }
    pairs = ((name, getattr(earlier, name), getattr(later, name)) for name in later.places_by)
    return all(before == after or (before == "all" and name in covers_all) for name, before, after in pairs)


def chosen_by(method: AnyPass) -> str:
    """Return the options that select the sites of a pass, with their values, as the end of a sentence."""
    options = ", ".join(f"{name}={format_value(getattr(method, name))}" for name in method.places_by or ())
    return f": {options}" if options else ""


@dataclasses.dataclass(frozen=True)
class WeightSizes:
    """The extents of the model's weights: those of its matrices, and all, with embedding tables."""

    matrices: frozenset[int]
    all: frozenset[int]

    @staticmethod
    def of(model: nn.Module) -> WeightSizes | None:
        """Return the sizes of the model's weights; None if they are packed."""
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        tables |= {id(weight) for weight in [getattr(output_embeddings(model), "weight", None)] if weight is not None}
        matrices, every = set[int](), set[int]()
        for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
            if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
                return None
            if tensor.dim() < 2 or tensor.dtype == torch.long:
                continue
            every.update(tensor.shape)
            if id(tensor) not in tables:
                matrices.update(tensor.shape)
        return WeightSizes(frozenset(matrices), frozenset(every)) if matrices else None

    @staticmethod
    def on_disk(folder: Path) -> WeightSizes | None:
        """Return the sizes in the headers of a directory's safetensors files, with tables among the matrices; None if unknown."""
        try:
            extents = [extent for extent in extents_of(folder).values() if len(extent.shape) > 1 and extent.dtype != torch.long]
        except CheckpointError:  # reading the model raises it again, and knows more
            return None
        if not extents or not all(extent.dtype.is_floating_point for extent in extents):
            return None
        every = frozenset(size for extent in extents for size in extent.shape)
        return WeightSizes(every, every)


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the head of a transformers model, if it has one."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator, no-any-return]
    except (AttributeError, NotImplementedError):
        return None


def require_sizes(method: AnyPass, sizes: WeightSizes, added: frozenset[int]) -> None:
    """Raises `DoesNotFitError` if an option of the pass allows no extent of a weight, existing or `added`."""
    idle = {name for names in method.idle_options().values() for name in names}
    for field in dataclasses.fields(method):
        rule, value = field.metadata.get("weights"), getattr(method, field.name)
        if rule is None or value is None or field.name in idle:
            continue
        divides = rule == "divides"
        fits = any(size % value == 0 for size in sizes.matrices | added) if divides else value <= max(sizes.all | added)
        if fits:
            continue
        shown = first_few(sorted(sizes.matrices if divides else sizes.all), SHOWN)
        raise DoesNotFitError(
            f"option {field.name}={value} {'divides no' if divides else 'is above every'} size of the weights",
            by=method.name,
            why=f"it is {field.metadata['doc']}; the sizes are {shown}",
            remedy=remedy(field.name, value, sizes.matrices) if divides else f"use at most {max(sizes.all)}; {SEE_SIZES}",
            in_any_form=True,
            option=field.name,
            code="range",
        )


def remedy(name: str, value: int, sizes: frozenset[int]) -> str:
    """Return the allowed values nearest to the given one, in words."""
    common = math.gcd(*sizes)
    return f"use {name}={nearest_divisors(common, value)}; {SEE_SIZES}" if common > 1 else SEE_SIZES


def nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of a number nearest to `wanted`, in words."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return " or ".join(map(str, sorted(sorted(divisors, key=lambda size: abs(math.log(size / wanted)))[:NEAREST])))
