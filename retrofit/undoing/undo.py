"""`undo`: a rewritten model is the dense model again, where that computes the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrofit.checks.activations import Activations, record_activations
from retrofit.checks.divergence import first_divergence
from retrofit.emitted.dense_graph import dense_graph
from retrofit.errors import CheckpointError, VerificationError
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import preserve_modes, preserve_random_state, preserve_state, same_bits
from retrofit.inputs.probes import Inputs, extent_of, logits_of, resized, run
from retrofit.inputs.usable_models import (
    holds_adapters,
    require_in_memory,
    require_module,
    require_no_prompt,
    require_uncompiled,
    require_values,
)
from retrofit.numerics.agreement import Arithmetic, Comparison
from retrofit.passbase import recipe_storage, replaying
from retrofit.passbase.replaying import recipe, rewrites, rewritten_part
from retrofit.process import serialized
from retrofit.storage.architecture import describe_architecture, empty_model, find_class
from retrofit.storage.filling import fill_model, fill_transformers
from retrofit.undoing.dense_parameters import DenseForm, dense_form, first_that_matters
from retrofit.undoing.dense_skeleton import RECIPE, without_recipe

KEEP = "keep the retrofitted model, or take the dense one that it was made from"


@serialized
def undo(model: nn.Module, *, example_inputs: Any = None) -> nn.Module:
    """Return the dense model that computes what the rewritten `model` does, which is left as it was; nothing is shared by the two.

    Parameters that the passes kept have the values that they have now. Raises `VerificationError` where no dense model of that
    class computes the same, and names the place: a dense parameter that is gone, an output, a trained parameter that takes part.
    """
    require_module(model)
    require_no_prompt(model)
    require_uncompiled(model)
    require_in_memory(model, "undone")
    require_values(model, "undone", "load its weights first")
    if holds_adapters(model):
        raise CheckpointError(
            f"{type(model).__name__} has adapters, which are no part of the dense model",
            why="it computes what both do together",
            remedy="merge them into the model first: retrofit.merge_adapters, or retrofit merge",
            code="adapters",
        )
    part = rewritten_part(model)
    if not recipe_storage.stored_recipe(part):
        raise CheckpointError(
            f"{type(part).__name__} is a dense model", why="it holds no recipe", remedy="take it as it is", code="not-rewritten"
        )
    form = dense_form(part)
    lost = form.lost()
    if lost:
        name, why = next(iter(lost.items()))
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise VerificationError(
            f"{described(part)} cannot be undone: the dense parameter {name} is gone{more}",
            why=why,
            remedy=KEEP,
            code="gone",
            site=name,
        )
    dense = filled(part, form)
    with preserve_modes(part), preserve_random_state(), preserve_state(part):
        part.eval()
        require_equal(part, dense, form, named_inputs(part, example_inputs))
    return dense.train(part.training)


def filled(part: nn.Module, form: DenseForm) -> nn.Module:
    """Return the dense model with the values that were found."""
    wanted = form.skeleton.state_dict()
    state = {name: value_of(form, name) for name in wanted}
    dense = dense_model(part, state)
    trained = {name: one.requires_grad for name, one in part.named_parameters(remove_duplicate=False)}
    for name, buffer in dict(dense.named_buffers(remove_duplicate=False)).items():
        now = form.unsaved.get(name, buffer)
        if now.shape == buffer.shape and not same_bits(now.cpu(), buffer.cpu()):  # rounded in memory, say
            owner, _, leaf = name.rpartition(".")
            dense.get_submodule(owner)._buffers[leaf] = now.to(buffer.device, copy=True)
    for name, parameter in dense.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trained.get(form.tensors[name].place, True))
    return dense


def dense_model(part: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Return the model that `part` was rewritten from, with these weights."""
    graph = dense_graph(part)
    if graph is not None:
        return fill_model(graph.empty(), (), state, None)
    architecture, config = describe_architecture(part)
    kind, config_kind = find_class(architecture, imports=True)
    if not issubclass(kind, PreTrainedModel):
        return fill_model(empty_model(kind, config_kind, config), (), state, None)
    dense: Any = fill_transformers(kind, without_recipe(config), (), state, None, Path(part.config.name_or_path))  # type: ignore[union-attr,arg-type]
    if hasattr(dense.config, RECIPE) and recipe_storage.is_recipe(getattr(dense.config, RECIPE)):
        recipe_storage.remove_from_config(dense)
    return dense


def value_of(form: DenseForm, name: str) -> Tensor:
    """Return the value of a dense tensor, in memory of its own."""
    value = form.tensors[name].value
    assert value is not None
    return value.clone(memory_format=torch.contiguous_format)


def require_equal(part: nn.Module, dense: nn.Module, form: DenseForm, inputs: Inputs) -> None:
    """Both compute the same, whatever the parameters hold that the passes added; else `VerificationError`."""
    shapes = list(shapes_to_compare(part, dense, inputs))
    for given in shapes:
        found = compared(part, dense, given)
        if not found.agrees:
            raise VerificationError(
                f"{described(part)} cannot be undone: without its passes it computes something else",
                why=f"{found.measured} apart; {where(part, dense, form, given, found.limit)}",
                remedy=KEEP,
                code="differs",
            )
    moved = moved_parameters(part, dense, form)
    name = first_that_matters(part, moved, shapes[-1]) if moved else ""
    if name:
        raise VerificationError(
            f"{described(part)} cannot be undone: {name} is no longer as the passes made it, and takes part",
            why="on the inputs that were tried both compute the same, and with other values in it the model would not",
            remedy=KEEP,
            code="changed",
            site=name,
        )


def shapes_to_compare(part: nn.Module, dense: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """Inputs of several lengths; where a pass is exact up to one, a longer one too, if the dense model takes that."""
    batch, length = extent_of(inputs)
    yield dict(inputs)
    if length:
        sizes = itertools.product((batch + 1, batch), (2 * length + 1, length))  # the model may have a fixed one, or a largest
        others = (resized(part, inputs, *size, seed=1) for size in sizes)
        yield next((other for other in others if runs(dense, other)), dict(inputs))
        for limit in sorted({one.exact_up_to for one in recipe(part) or () if one.exact_up_to is not None}):
            longer = resized(part, inputs, 1, 2 * limit + 1, seed=2)
            if runs(dense, longer):
                yield longer


def runs(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether the model takes the inputs: its tables may end before."""
    try:
        run(model, inputs)
    except Exception:  # whatever the model's own code raises
        return False
    return True


def moved_parameters(part: nn.Module, dense: nn.Module, form: DenseForm) -> dict[str, Tensor]:
    """Return the parameters that the recipe would begin with otherwise, and which of their elements are not of the dense model.

    What begins at random is among them.
    """
    again = copy.deepcopy(dense)
    replaying.replay(again, recipe_storage.stored_recipe(part))
    starts = dict(again.named_parameters())
    named = part.named_parameters()
    moved = {name: ~form.covered(part, name) for name, one in named if not same_bits(one.cpu(), starts[name].cpu())}
    return {name: free for name, free in moved.items() if bool(free.any())}


def compared(part: nn.Module, dense: nn.Module, inputs: Inputs) -> Comparison:
    """Return whether the two models compute the same."""
    return Arithmetic(dense, inputs).compare(lambda: (logits_of(run(part, inputs)), logits_of(run(dense, inputs))))


def where(part: nn.Module, dense: nn.Module, form: DenseForm, inputs: Inputs, limit: float) -> str:
    """Return the first module that returns something else than in the dense model, and the site of the recipe it lies in."""
    found: list[Activations] = []
    sites = sorted({site.name for rewrite in rewrites(part) or () for site in rewrite.sites}, key=len, reverse=True)
    for model in (part, dense):
        with Arithmetic(dense, inputs).computing(), record_activations(model, also=sites) as activations:
            run(model, inputs)
        found.append(activations)
    ours, theirs = ({path: [value.shape for value in values] for path, values in one.items()} for one in found)
    places = ((path, path if path in sites else place_of(form, path)) for path in theirs)
    names = {path: now for path, now in places if now is not None and ours.get(now) == theirs[path]}  # others are of another width
    divergence = first_divergence(found[0], found[1], max(limit, 1e-5), names)

    def place(name: str) -> str:
        site = next((one for one in sites if name == one or name.startswith(f"{one}.")), "")
        return f"{name} (of the site {site})" if site and site != name else name

    return divergence.describe(place)


def place_of(form: DenseForm, path: str) -> str | None:
    """Return the module of the rewritten model that has a dense module's parameters; None if they are in several or cut up."""
    owned = {tensor.place.rpartition(".")[0] for name, tensor in form.tensors.items() if name.rpartition(".")[0] == path}
    return owned.pop() if len(owned) == 1 else None


def described(part: nn.Module) -> str:
    """Return the class of a model and its recipe."""
    return f"{type(part).__name__} with {', '.join(one.name for one in recipe(part) or ())}"
