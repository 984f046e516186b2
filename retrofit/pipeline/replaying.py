"""Replay a saved recipe on a model without weights; the recipe and the accounts of a rewritten model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrofit.errors import CheckpointError, RetrofitError
from retrofit.pipeline import recipe_storage
from retrofit.pipeline.applied_to import passes_of, tie_as
from retrofit.pipeline.protocol import Recipe, Rewrite
from retrofit.pipeline.registry import parse_recipe
from retrofit.pipeline.running import run_passes, with_current_names
from retrofit.runtime.example_inputs import device_of, named_inputs
from retrofit.runtime.memory_limit import require_memory
from retrofit.runtime.one_at_a_time import one_at_a_time
from retrofit.runtime.usable_models import require_torch_module
from retrofit.runtime.wrapped_models import transformers_models
from retrofit.surgery.edit import Edit, Fate


@one_at_a_time
def replay(
    model: nn.Module, specs: Sequence[str], record: Mapping[str, Any] | None = None, *, same_model: bool = True
) -> tuple[Rewrite, ...]:
    """Give `model`, dense and without its weights, the structure that the recipe leads to; return the accounts of the passes.

    `record` is what the recipe was applied to (`applied_to`): its parameters are tied as they were then, whatever is tied now.
    Raises `RetrofitError`, the model being what it was, where a pass does not fit, and where it finds other sites in the
    `same_model`.
    """
    passes, recorded = parse_recipe(specs), passes_of(record)
    if recorded:
        tie_as(model, recorded[0].ties)
    edit = Edit(model)
    accounts: tuple[Rewrite, ...] = ()
    try:
        inputs = replayed_inputs(model, recipe_storage.stored_inputs(model))
        for one, then in itertools.zip_longest(passes, recorded[: len(passes)]):
            if then is not None:
                tie_as(model, then.ties)
            names, modules = (dict(every(remove_duplicate=False)) for every in (model.named_parameters, model.named_modules))
            (account,), _ = run_passes(model, (one,), inputs, edit, lambda stage: None)
            if then is not None and account.applied_to is not None and same_model:
                then.require_same(account.applied_to, one.spec())
            accounts = (*with_current_names(accounts, names, modules, edit), account)
        edit.set_attribute(model, "retrofit_rewrites", accounts)
        edit.set_attribute(model, "retrofit_rearranged", rearranged(edit))
        edit.set_attribute(model, "retrofit_added", added(edit))
        recipe_storage.store_recipe(model, specs, record)
    except RetrofitError:
        edit.undo()
        raise
    return accounts


def replayed_inputs(model: nn.Module, descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs like those that a recipe was first applied with, as described; only types and shapes matter to a capture."""
    if not descriptions:
        return named_inputs(model)
    try:
        inputs = {name: input_from_description(one, device_of(model)) for name, one in descriptions.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            "the inputs that the recipe was applied with are not told as they should be",
            why=f"{type(error).__name__}: {error}",
            remedy="save the model again with retrofit.save",
        ) from error
    return named_inputs(model, inputs)


def input_from_description(note: Any, device: torch.device) -> Any:
    """An input of the types and shapes that `note` tells, as `recipe_storage.input_notes` writes it."""
    if isinstance(note, Mapping):
        if "entries" in note:
            return {key: input_from_description(one, device) for key, one in note["entries"].items()}
        return tuple(input_from_description(one, device) for one in note["items"])
    dtype, shape = getattr(torch, note[0]), note[1]
    require_memory(math.prod(shape) * dtype.itemsize, "an input that the recipe was applied with")
    return torch.ones(shape, dtype=dtype, device=device)


def rearranged(edit: Edit) -> dict[str, Fate]:
    """The dense parameters that are stored in another layout, which their names and shapes do not show."""
    return {name: fate for name, fate in edit.account().items() if fate.kind == "rearranged"}


def added(edit: Edit) -> frozenset[str]:
    """The names of the parameters that this rewrite or an earlier one added: none of the dense model's is there."""
    earlier: frozenset[str] = getattr(edit.model, "retrofit_added", frozenset())
    named = dict(edit.model.named_parameters(remove_duplicate=False))
    dense = {id(named[fate.name]) for name, fate in edit.account().items() if name not in earlier and fate.name in named}
    return frozenset(name for name, parameter in named.items() if id(parameter) not in dense)


def recipe(model: nn.Module) -> Recipe | None:
    """The passes applied to `model` so far, in order; None for a dense model."""
    require_torch_module(model)
    specs = recipe_storage.stored_recipe(rewritten_part(model))
    return parse_recipe(specs) if specs else None


def rewrites(model: nn.Module) -> tuple[Rewrite, ...] | None:
    """The accounts of the passes applied to `model`, or replayed when it was loaded; None for a dense model."""
    return getattr(rewritten_part(model), "retrofit_rewrites", None)


def added_parameters(model: nn.Module) -> list[nn.Parameter] | None:
    """The parameters that the passes added to `model`; None where that is not known, as in a dense model."""
    part = rewritten_part(model)
    names = getattr(part, "retrofit_added", None)
    return None if names is None else [parameter for name, parameter in part.named_parameters() if name in names]


def rewritten_part(model: nn.Module) -> nn.Module:
    """`model`, or the one transformers model inside it that carries a recipe where `model` carries none."""
    if recipe_storage.stored_recipe(model):
        return model
    inside = [one for one in transformers_models(model) if recipe_storage.stored_recipe(one)]
    return inside[0] if len(inside) == 1 else model
