"""Replay a saved recipe on a model without weights; find which module of the dense model each rewritten site replaces.

To find it, the recipe is replayed pass by pass on a copy of the dense model, and each module is followed through every wrapper that
later passes put around it or around a module that contains it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrofit.errors import CheckpointError, RetrofitError, TrainingError
from retrofit.files.memory import require_memory
from retrofit.inputs.example_inputs import device_of, named_inputs
from retrofit.inputs.model_memory import value_of, without_weights
from retrofit.inputs.usable_models import require_torch_module, transformers_models
from retrofit.passbase import recipe_storage
from retrofit.passbase.calibration import SAVED, using_tokenizer
from retrofit.passbase.protocol import AnyPass, Dial, Recipe, Rewrite, parse_recipe
from retrofit.passbase.recipe_storage import passes_of, tie_as
from retrofit.passbase.running import run_passes, with_current_names
from retrofit.process import serialized
from retrofit.program.program import Program
from retrofit.provenance import describe_inputs, provenance_of
from retrofit.surgery import Edit, Fate


@serialized
def replay(
    model: nn.Module,
    specs: Sequence[str],
    record: Mapping[str, Any] | None = None,
    *,
    same_model: bool = True,
    program: Program | None = None,
) -> tuple[Rewrite, ...]:
    """Apply the recipe to `model`, dense and without weights; return the accounts of the passes.

    `record` describes the model that the recipe was applied to (`applied_to`): parameters are tied as they were then. `program` is
    that of an equal model with weights, used instead of a capture if the inputs are the same. Raises `RetrofitError`, with the
    model unchanged, if a pass does not fit, or finds other sites although it is the `same_model`.
    """
    passes, recorded = parse_recipe(specs), passes_of(record)
    if recorded:
        tie_as(model, recorded[0].ties)
    edit = Edit(model)
    accounts: tuple[Rewrite, ...] = ()
    try:
        inputs = replayed_inputs(model, recipe_storage.stored_inputs(model))
        if program is not None and describe_inputs(program.examples) == describe_inputs(inputs):
            program = dataclasses.replace(program, examples=inputs)
        else:
            program = None
        for method, then in itertools.zip_longest(passes, recorded[: len(passes)]):
            if then is not None:
                tie_as(model, then.ties)
            names, modules = (dict(every(remove_duplicate=False)) for every in (model.named_parameters, model.named_modules))
            with using_tokenizer(SAVED):
                (account,), _ = run_passes(model, (method,), inputs, edit, lambda stage: None, None if accounts else program)
            if then is not None and account.applied_to is not None and same_model:
                then.require_same(account.applied_to, method.spec())
            accounts = (*with_current_names(accounts, names, modules, edit), account)
        edit.record_provenance(rewrites=accounts, rearranged=rearranged(edit), added=added(edit))
        recipe_storage.store_recipe(model, specs, record)
    except RetrofitError:
        edit.undo()
        raise
    return accounts


def replayed_inputs(model: nn.Module, descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with the recorded types and shapes of a recipe's inputs; a capture depends on no values."""
    if not descriptions:
        return named_inputs(model)
    try:
        inputs = {name: input_from_description(note, device_of(model)) for name, note in descriptions.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            "the recorded inputs of the recipe are malformed",
            why=f"{type(error).__name__}: {error}",
            remedy="save the model again with retrofit.save",
            code="unreadable",
        ) from error
    return named_inputs(model, inputs)


def input_from_description(note: Any, device: torch.device) -> Any:
    """Return an input with the type and shape in `note`, a description by `describe_inputs`."""
    if isinstance(note, Mapping):
        if "entries" in note:
            return {key: input_from_description(inner, device) for key, inner in note["entries"].items()}
        return tuple(input_from_description(inner, device) for inner in note["items"])
    dtype, shape = getattr(torch, note[0]), note[1]
    require_memory(math.prod(shape) * dtype.itemsize, "an input that the recipe was applied with")
    return torch.ones(shape, dtype=dtype, device=device)


def rearranged(edit: Edit) -> dict[str, Fate]:
    """Return the dense parameters that are stored in another layout; names and shapes do not show it."""
    return {name: fate for name, fate in edit.account().items() if fate.kind == "rearranged"}


def added(edit: Edit) -> frozenset[str]:
    """Return the names of the parameters that this rewrite or an earlier one added: those that hold no dense parameter."""
    earlier = provenance_of(edit.model).added or frozenset()
    named = dict(edit.model.named_parameters(remove_duplicate=False))
    dense = {id(named[fate.name]) for name, fate in edit.account().items() if name not in earlier and fate.name in named}
    return frozenset(name for name, parameter in named.items() if id(parameter) not in dense)


def recipe(model: nn.Module) -> Recipe | None:
    """Return the passes applied to `model` so far, in order; None for a dense model."""
    require_torch_module(model)
    specs = recipe_storage.stored_recipe(rewritten_part(model))
    return parse_recipe(specs) if specs else None


def rewrites(model: nn.Module) -> tuple[Rewrite, ...] | None:
    """Return the accounts of the passes applied to `model` or replayed on loading; None for a dense model."""
    return provenance_of(rewritten_part(model)).rewrites


def added_parameters(model: nn.Module) -> list[nn.Parameter] | None:
    """Return the parameters that passes added to `model`; None if unknown, as for a dense model."""
    part = rewritten_part(model)
    names = provenance_of(part).added
    return None if names is None else [parameter for name, parameter in part.named_parameters() if name in names]


def rewritten_part(model: nn.Module) -> nn.Module:
    """Return `model`, or, if it has no recipe, the one transformers model inside it that has one."""
    if recipe_storage.stored_recipe(model):
        return model
    inside = [part for part in transformers_models(model) if recipe_storage.stored_recipe(part)]
    return inside[0] if len(inside) == 1 else model


@dataclasses.dataclass(frozen=True)
class CorrespondingSite:
    """A module of the dense model and the module that replaces it in the rewritten model: the same call, another function."""

    dense: str  # paths
    rewritten: str
    method: str  # the name of the pass
    dial: Dial | None = None  # of the pass, from the dense function to the rewritten one

    def __str__(self) -> str:
        return self.rewritten if self.dense == self.rewritten else f"{self.rewritten} (of the dense model: {self.dense})"


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """The correspondence between a dense model and the model made from it."""

    sites: tuple[CorrespondingSite, ...]  # of approximate passes, in the order of the model
    fates: Mapping[str, Fate]  # of the dense parameters
    places: Mapping[str, str]  # dense module → the same module in the rewritten model, if it is still there; paths

    def write_dense(self, model: nn.Module, dense: nn.Module, site: str) -> None:
        """Set the parameters at `site`, a path in `model`, that come from the dense model to their dense values."""
        named, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
        for name, fate in self.fates.items():
            if not fate.name.startswith(f"{site}.") or fate.name not in named:
                continue
            if fate.layout is not None:
                value = value_of(dense, name).to(named[fate.name])
                fate.layout.put(value, named[fate.name], buffers.get(fate.layout.order))
            elif fate.kind in ("kept", "moved"):
                named[fate.name].detach().copy_(value_of(dense, name))


def correspondence(model: nn.Module, dense: nn.Module) -> Correspondence:
    """Return the correspondence of `dense` and `model`. Raises `TrainingError` if `model` was not made from `dense`."""
    model, dense = rewritten_part(model), rewritten_part(dense)
    specs = recipe_storage.stored_recipe(model)
    if not specs:
        raise TrainingError(
            "the model is dense",
            why="no pass has rewritten it",
            remedy="rewrite it with retrofit apply, or drop the teacher",
            code="not-rewritten",
        )
    if recipe_storage.stored_recipe(dense):
        raise TrainingError(
            "the teacher is itself retrofitted",
            why=f"its recipe is {', '.join(recipe_storage.stored_recipe(dense))}",
            remedy="name the dense model that was rewritten",
            code="rewritten",
            option="teacher",
        )
    skeleton = without_weights(dense)
    modules = dict(skeleton.named_modules())  # a reference to each module, so that no identity is reused
    origin = {id(module): path for path, module in modules.items()}
    found: dict[str, tuple[nn.Module, AnyPass]] = {}  # by path in the dense model: the module that now replaces it, and the pass
    edit = Edit(skeleton)
    try:
        inputs = replayed_inputs(skeleton, recipe_storage.stored_inputs(model))
        for method in parse_recipe(specs):
            before = dict(skeleton.named_modules())
            (account,), _ = run_passes(skeleton, (method,), inputs, edit, lambda stage: None)
            for site in account.sites:
                path = origin.get(id(before.get(site.name)))
                if path is None:
                    continue
                now = skeleton.get_submodule(site.name)
                origin[id(now)] = path
                if not account.exact:
                    found[path] = now, method
    except RetrofitError as error:
        raise other_architecture(f"its recipe does not fit the teacher: {error.why or error.what}") from error
    require_equal_shapes(skeleton, model)
    names = {id(module): path for path, module in skeleton.named_modules()}
    order = {path: place for place, path in enumerate(modules)}
    sites = (
        CorrespondingSite(path, names[id(now)], method.name, method.recovery.dial)
        for path, (now, method) in found.items()
        if id(now) in names
    )
    places = {path: names[id(module)] for path, module in modules.items() if id(module) in names}
    return Correspondence(tuple(sorted(sites, key=lambda site: order[site.dense])), edit.account(), places)


def require_equal_shapes(replayed: nn.Module, model: nn.Module) -> None:
    """Raises `TrainingError` if the names or shapes of the two models' parameters differ."""
    theirs, ours = shapes_of(replayed), shapes_of(model)
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise other_architecture(f"{name} would be {described(theirs.get(name))}, and is {described(ours.get(name))}")


def shapes_of(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def described(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "a number"


def other_architecture(why: str) -> TrainingError:
    return TrainingError(
        "the model was not made from this teacher",
        why=why,
        remedy="name the dense model that was rewritten",
        code="other-model",
        option="teacher",
    )
