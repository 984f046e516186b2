"""`undo`: return a rewritten model to its dense form, if that computes the same function."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel, initialization
from transformers.modeling_utils import local_torch_dtype

from retrofit.checks.divergence import Activations, first_divergence, record_activations
from retrofit.emitted import dense_graph
from retrofit.errors import CheckpointError, RetrofitError, VerificationError, first_few
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import without_weights
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
from retrofit.numerics.agreement import Arithmetic
from retrofit.passbase import recipe_storage, replaying
from retrofit.passbase.protocol import parse_recipe
from retrofit.passbase.replaying import recipe, replayed_inputs, rewrites, rewritten_part
from retrofit.passbase.running import run_passes
from retrofit.process import quiet, serialized
from retrofit.storage.filling import config_class, describe_architecture, empty_model, fill_model, fill_transformers, find_class
from retrofit.surgery import Edit, Fate
from retrofit.surgery.dequantization import is_recipe, refuse_packed

RECIPE = "quantization_config"  # the entry of a config with the recipe


def dense_skeleton(model: nn.Module) -> nn.Module:
    """Return the model that `model` was rewritten from, without its weights: from its class and config, or from its stored dense
    graph.

    Raises `CheckpointError` for a graph without a stored dense graph, and for a class that is not built from a config.
    """
    kept = dense_graph(model)
    if kept is not None:
        return kept.empty()
    if isinstance(model, fx.GraphModule):
        if not recipe_storage.stored_recipe(model):
            return without_weights(model)
        raise CheckpointError(
            "a graph does not record its dense model",
            why="it has no class or config, and was not rewritten as a graph",
            remedy="use the file that the passes were applied to",
            code="no-recipe",
        )
    refuse_packed(model, "traced back to its dense model")
    architecture, config = describe_architecture(model)
    kind, config_kind = find_class(architecture, imports=True)  # the class of a live model: nothing new is imported
    with preserve_random_state(), quiet():
        if issubclass(kind, PreTrainedModel):
            return skeleton_of(kind, config_class(kind).from_dict(without_recipe(config)), model.dtype)  # type: ignore[arg-type]
        return without_weights(empty_model(kind, config_kind, config).eval())


def skeleton_of(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the transformers model of that class and config on the meta device, with tied weights in `dtype`, in eval mode."""
    default = local_torch_dtype(dtype if dtype.is_floating_point else torch.get_default_dtype())
    with default, torch.device("meta"), initialization.meta_device_safe_creation_ops():
        return kind(config).eval()


def without_recipe(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the dense model."""
    found = config.get(RECIPE)
    return {key: value for key, value in config.items() if key != RECIPE or not is_recipe(found)}


def first_that_matters(model: nn.Module, elements: Mapping[str, Tensor], inputs: Inputs) -> str:
    """Return the first parameter on whose `elements`, booleans of its shape, the model's outputs depend; "" if there is none."""
    if keeps_function(model, elements, inputs):
        return ""
    return next((name for name in elements if not keeps_function(model, {name: elements[name]}, inputs)), next(iter(elements)))


def keeps_function(model: nn.Module, elements: Mapping[str, Tensor], inputs: Inputs) -> bool:
    """Return whether the model computes the same with noise in these elements of its parameters."""

    def ways() -> tuple[Tensor, Tensor]:
        expected = logits_of(run(model, inputs))
        with noise_in(model, elements):
            return logits_of(run(model, inputs)), expected

    return Arithmetic(model, inputs).compare(ways).agrees


@contextlib.contextmanager
def noise_in(model: nn.Module, elements: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the elements are noise, scaled as the parameter's values, or 0.1 if these are zero."""
    generator = torch.Generator().manual_seed(0)
    kept = {name: model.get_parameter(name).detach().clone() for name in elements}
    try:
        for name, value in kept.items():
            spread = float(value.float().pow(2).mean().sqrt()) or 0.1
            noise = (spread * torch.randn(value.shape, generator=generator)).to(value)
            model.get_parameter(name).data.copy_(torch.where(elements[name].to(value.device), noise, value))
        yield
    finally:
        for name, value in kept.items():
            model.get_parameter(name).data.copy_(value)


FITTED = "its values were fitted to data"


@dataclasses.dataclass(frozen=True)
class Recovered:
    """A tensor of the dense model: its value and its place; or why it is lost."""

    value: Tensor | None
    place: str = ""  # its name in the rewritten model
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """The effect of one pass on the tensors before it."""

    method: str
    fates: Mapping[str, Fate]  # of the parameters
    buffers: Mapping[str, str]  # names before the pass → names after it, of those that still exist


@dataclasses.dataclass(frozen=True)
class DenseForm:
    """The dense model that a rewritten one was made from, as far as the rewritten one still contains it."""

    skeleton: nn.Module  # without weights
    tensors: Mapping[str, Recovered]  # its parameters and persistent buffers, by all their names
    added: frozenset[str]  # the parameters of the rewritten model that contain nothing of the dense one
    steps: tuple[Step, ...]
    unsaved: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # the non-persistent buffers, as far as known

    def lost(self) -> dict[str, str]:
        """Return the lost dense parameters, with the reasons."""
        return {name: tensor.why for name, tensor in self.tensors.items() if tensor.value is None}

    def covered(self, model: nn.Module, name: str) -> Tensor:
        """Return which elements of the parameter `name` of the rewritten model come from the dense model: booleans of its shape."""
        shape = model.get_parameter(name).shape
        places = torch.arange(1, shape.numel() + 1).view(shape)  # indices that are mapped back in the way of values
        found = {path: Recovered(buffer.detach().cpu(), path) for path, buffer in model.named_buffers(remove_duplicate=False)}
        found |= {alias: Recovered(places, name) for alias in names_of(model, name)}
        for step in reversed(self.steps):
            found = before_step(step, found, scaled=False)
        held = torch.zeros(shape.numel() + 1, dtype=torch.bool)
        for dense, _ in self.skeleton.named_parameters(remove_duplicate=False):
            carried = found[dense].value if dense in found else None
            if carried is not None:
                held[carried.flatten()] = True
        return held[1:].view(shape)


def dense_form(model: nn.Module) -> DenseForm:
    """Return the dense form of `model`; for a dense model this is the model itself, with nothing added.

    Raises `CheckpointError` if the dense model cannot be built again, or the recipe does not lead from it to this model.
    """
    part = rewritten_part(model)
    skeleton = dense_skeleton(part)
    rewritten = dense_skeleton(part)
    steps = list(replayed_steps(rewritten, part))
    require_same_shapes(rewritten, part)
    values = {name: Recovered(tensor.detach(), name) for name, tensor in tensors_of(part).items()}
    for step in reversed(steps):
        values = before_step(step, values)
    wanted = tensors_of(skeleton)
    saved = {*skeleton.state_dict(), *(name for name, _ in skeleton.named_parameters(remove_duplicate=False))}
    found = {name: values.get(name, Recovered(None, why="nothing of it is left")) for name in wanted if name in saved}
    places = {recovered.place for recovered in found.values()}
    named = dict(part.named_parameters(remove_duplicate=False))
    held = {id(named[place]) for place in places if place in named}
    added = frozenset(name for name, parameter in part.named_parameters() if id(parameter) not in held)
    unsaved = {
        name: value.value for name in wanted if name not in saved and (value := values.get(name)) and value.value is not None
    }
    return DenseForm(skeleton, found, added, tuple(steps), unsaved)


def names_of(model: nn.Module, name: str) -> list[str]:
    """Return all names of a parameter."""
    wanted = model.get_parameter(name)
    return [path for path, parameter in model.named_parameters(remove_duplicate=False) if parameter is wanted]


def replayed_steps(skeleton: nn.Module, model: nn.Module) -> list[Step]:
    """Return the effect of each pass in the recipe of `model`, replayed on `skeleton`, which is rewritten by all of them."""
    steps: list[Step] = []
    inputs = replayed_inputs(skeleton, recipe_storage.stored_inputs(model))
    try:
        for pass_ in parse_recipe(recipe_storage.stored_recipe(model)):
            edit = Edit(skeleton)
            buffers = dict(skeleton.named_buffers(remove_duplicate=False))
            run_passes(skeleton, (pass_,), inputs, edit, lambda stage: None)
            names = {id(buffer): name for name, buffer in skeleton.named_buffers()}
            still = {name: names[id(buffer)] for name, buffer in buffers.items() if id(buffer) in names}
            steps.append(Step(pass_.name, edit.account(), still))
    except RetrofitError as error:
        raise CheckpointError(
            f"the recipe of {type(model).__name__} cannot be replayed",
            why=error.why or error.what,
            remedy="load the whole saved model, with the class that the passes were applied to",
            code="other-model",
        ) from error
    return steps


def before_step(step: Step, after: Mapping[str, Recovered], scaled: bool = True) -> dict[str, Recovered]:
    """Return the tensors before a pass, from those after it; not `scaled` for indices, which are only mapped back."""
    found = {name: after[now] for name, now in step.buffers.items() if now in after}
    return found | {name: before_fate(fate, step.method, after, scaled) for name, fate in step.fates.items()}


def before_fate(fate: Fate, method: str, after: Mapping[str, Recovered], scaled: bool) -> Recovered:
    """Return one parameter before a pass."""
    now = after.get(fate.name)
    if fate.kind == "dropped" or now is None:
        return Recovered(None, why=f"{method} dropped it: {fate.why}")
    if now.value is None:
        return now
    if fate.kind == "widened":
        return dataclasses.replace(now, value=now.value[fate.index] / fate.scale if scaled else now.value[fate.index])
    if fate.layout is None:
        return now
    if fate.layout.fitted and bool(value_at(fate.layout.fitted, after).any()):
        return Recovered(None, why=f"{method} put it into {now.place}, and {FITTED}")
    order = value_at(fate.layout.order, after) if fate.layout.order else None
    return dataclasses.replace(now, value=fate.layout.dense(now.value, order))


def value_at(name: str, after: Mapping[str, Recovered]) -> Tensor:
    """Return a buffer that describes the layout of a parameter."""
    found = after.get(name)
    if found is None or found.value is None:
        raise CheckpointError(f"{name} is not there", why="it says how a dense parameter lies in its successor", code="missing")
    return found.value


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by all their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def require_same_shapes(replayed: nn.Module, model: nn.Module) -> None:
    """Raises `CheckpointError` unless both have the same parameters."""
    theirs, ours = shapes_of(replayed), shapes_of(model)
    wrong = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if wrong:
        raise CheckpointError(
            f"the recipe of {type(model).__name__} does not lead to this model",
            why=f"not the same: {first_few(wrong)}",
            remedy="if modules were put into it afterwards, as adapters are, merge them first: retrofit merge",
            code="other-model",
        )


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# ── Undo ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


KEEP = "keep the retrofitted model, or use the dense one that it was made from"


@serialized
def undo(model: nn.Module, *, example_inputs: Any = None) -> nn.Module:
    """Return the dense model that computes the same as the rewritten `model`, which is unchanged; the two share nothing.

    Masks of the inputs of dense weights, such as those of activation-sparsity, are removed: the comparison is with the model
    without them. Parameters that the passes kept have their current values. Raises `VerificationError`, naming the place, if no
    dense model of that class computes the same: a lost dense parameter, an output, a trained new parameter with an effect.
    """
    require_module(model)
    require_no_prompt(model)
    require_uncompiled(model)
    require_in_memory(model, "undone")
    require_values(model, "undone", "load its weights first")
    if holds_adapters(model):
        raise CheckpointError(
            f"{type(model).__name__} has adapters, which the dense model does not have",
            why="it computes both together",
            remedy="merge them first: retrofit.merge_adapters, or retrofit merge",
            code="adapters",
        )
    part = rewritten_part(model)
    if not recipe_storage.stored_recipe(part):
        raise CheckpointError(
            f"{type(part).__name__} is a dense model", why="it holds no recipe", remedy="use it as it is", code="not-rewritten"
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
        turn_masks_off(part)
        require_equal(part, dense, form, named_inputs(part, example_inputs))
    return dense.train(part.training)


def filled(part: nn.Module, form: DenseForm) -> nn.Module:
    """Return the dense model with the recovered values."""
    wanted = form.skeleton.state_dict()
    state = {name: value_of(form, name) for name in wanted}
    dense = dense_model(part, state)
    trained = {name: parameter.requires_grad for name, parameter in part.named_parameters(remove_duplicate=False)}
    for name, buffer in dict(dense.named_buffers(remove_duplicate=False)).items():
        now = form.unsaved.get(name, buffer)
        if now.shape == buffer.shape and not same_bits(now.cpu(), buffer.cpu()):  # rounded in memory, for example
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
    if hasattr(dense.config, RECIPE) and is_recipe(getattr(dense.config, RECIPE)):
        recipe_storage.remove_from_config(dense)
    return dense


def value_of(form: DenseForm, name: str) -> Tensor:
    """Return the value of a dense tensor, in memory of its own."""
    value = form.tensors[name].value
    assert value is not None
    return value.clone(memory_format=torch.contiguous_format)


def turn_masks_off(part: nn.Module) -> None:
    """Make modules that only mask the inputs of dense weights compute the dense function."""
    for pass_ in recipe(part) or ():
        if pass_.only_masks and pass_.recovery.dial is not None:
            pass_.recovery.dial.turn(part, 0.0)


def require_equal(part: nn.Module, dense: nn.Module, form: DenseForm, inputs: Inputs) -> None:
    """Raises `VerificationError` unless both compute the same, for any values of the parameters that the passes added."""
    shapes = list(shapes_to_compare(part, dense, inputs))
    for given in shapes:
        found = Arithmetic(dense, given).compare_with(part)
        if not found.agrees:
            raise VerificationError(
                f"{described(part)} cannot be undone: without its passes it computes another function",
                why=f"{found.measured} apart; {where(part, dense, form, given, found.limit)}",
                remedy=KEEP,
                code="differs",
            )
    moved = moved_parameters(part, dense, form)
    name = first_that_matters(part, moved, shapes[-1]) if moved else ""
    if name:
        raise VerificationError(
            f"{described(part)} cannot be undone: {name} has changed since the passes ran, and affects the outputs",
            why="both compute the same on these inputs, but not with other values of this parameter",
            remedy=KEEP,
            code="changed",
            site=name,
        )


def shapes_to_compare(part: nn.Module, dense: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """Yield inputs of several lengths; if a pass is exact up to a length, also longer ones, if the dense model accepts them."""
    batch, length = extent_of(inputs)
    yield dict(inputs)
    if length:
        sizes = itertools.product((batch + 1, batch), (2 * length + 1, length))  # the model may have a fixed or a largest length
        others = (resized(part, inputs, *size, seed=1) for size in sizes)
        yield next((other for other in others if runs(dense, other)), dict(inputs))
        for limit in sorted({pass_.exact_up_to for pass_ in recipe(part) or () if pass_.exact_up_to is not None}):
            longer = resized(part, inputs, 1, 2 * limit + 1, seed=2)
            if runs(dense, longer):
                yield longer


def runs(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether the model accepts the inputs: its tables may be too short."""
    try:
        run(model, inputs)
    except Exception:  # of any type, from the model's own code
        return False
    return True


def moved_parameters(part: nn.Module, dense: nn.Module, form: DenseForm) -> dict[str, Tensor]:
    """Return the parameters whose values differ from those that the recipe starts with, and their elements that are not dense.

    Parameters that start at random are included.
    """
    again = copy.deepcopy(dense)
    replaying.replay(again, recipe_storage.stored_recipe(part))
    for path, module in part.named_modules():
        if hasattr(module, "take_order"):  # an order of hidden units that was fitted to data
            getattr(again.get_submodule(path), "take_order")(module)  # noqa: B009
    starts = dict(again.named_parameters())
    named = part.named_parameters()
    moved = {name: ~form.covered(part, name) for name, parameter in named if not same_bits(parameter.cpu(), starts[name].cpu())}
    return {name: free for name, free in moved.items() if bool(free.any())}


def where(part: nn.Module, dense: nn.Module, form: DenseForm, inputs: Inputs, limit: float) -> str:
    """Return the first module whose output differs from the dense model's, with the site of the recipe that it lies in."""
    found: list[Activations] = []
    sites = sorted({site.name for rewrite in rewrites(part) or () for site in rewrite.sites}, key=len, reverse=True)
    for model in (part, dense):
        with Arithmetic(dense, inputs).computing(), record_activations(model, also=sites) as activations:
            run(model, inputs)
        found.append(activations)
    ours, theirs = ({path: [value.shape for value in values] for path, values in shapes.items()} for shapes in found)
    places = ((path, path if path in sites else place_of(form, path)) for path in theirs)
    names = {path: now for path, now in places if now is not None and ours.get(now) == theirs[path]}  # others have another width
    divergence = first_divergence(found[0], found[1], max(limit, 1e-5), names)

    def place(name: str) -> str:
        site = next((site for site in sites if name == site or name.startswith(f"{site}.")), "")
        return f"{name} (of the site {site})" if site and site != name else name

    return divergence.describe(place)


def place_of(form: DenseForm, path: str) -> str | None:
    """Return the module of the rewritten model with a dense module's parameters; None if they are in several, or split."""
    owned = {tensor.place.rpartition(".")[0] for name, tensor in form.tensors.items() if name.rpartition(".")[0] == path}
    return owned.pop() if len(owned) == 1 else None


def described(part: nn.Module) -> str:
    """Return the class of a model and its recipe."""
    return f"{type(part).__name__} with {', '.join(pass_.name for pass_ in recipe(part) or ())}"
