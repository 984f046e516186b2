"""Where each parameter of the dense model is in a rewritten one, and its value: read back pass by pass, the last one first.

Whether parameters take part in what a model computes is tried: they get other values, and its outputs stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from retrofit.errors import CheckpointError, RetrofitError, first_few
from retrofit.inputs.probes import Inputs, logits_of, run
from retrofit.numerics.agreement import Arithmetic
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import parse_recipe
from retrofit.passbase.replaying import replayed_inputs, rewritten_part
from retrofit.passbase.running import run_passes
from retrofit.surgery.edit import Edit, Fate
from retrofit.undoing.dense_skeleton import dense_skeleton


def first_that_matters(model: nn.Module, elements: Mapping[str, Tensor], inputs: Inputs) -> str:
    """Return the first parameter on whose `elements`, booleans of its shape, the model's outputs depend; "" without one."""
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
    """Within this context the elements hold noise: as large as the parameter's values, or of a tenth where these are zero."""
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
    """A tensor of the dense model: its value, and where it lies; or why it is lost."""

    value: Tensor | None
    place: str = ""  # its name in the rewritten model
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one pass did with the tensors it found."""

    method: str
    fates: Mapping[str, Fate]  # of the parameters
    buffers: Mapping[str, str]  # names before, of those that are still there, and after


@dataclasses.dataclass(frozen=True)
class DenseForm:
    """The dense model that a rewritten one was made from, as far as that still holds it."""

    skeleton: nn.Module  # without weights
    tensors: Mapping[str, Recovered]  # its parameters and persistent buffers, by all their names
    added: frozenset[str]  # the parameters of the rewritten model that hold nothing of the dense one
    steps: tuple[Step, ...]
    unsaved: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # the buffers that no file holds, where they are known

    def lost(self) -> dict[str, str]:
        """Return the dense parameters that are not there any more, and why."""
        return {name: tensor.why for name, tensor in self.tensors.items() if tensor.value is None}

    def covered(self, model: nn.Module, name: str) -> Tensor:
        """Return which elements of the parameter `name` of the rewritten model are of the dense model: booleans of its shape."""
        shape = model.get_parameter(name).shape
        places = torch.arange(1, shape.numel() + 1).view(shape)  # numbers that are carried back as values are
        found = {one: Recovered(buffer.detach().cpu(), one) for one, buffer in model.named_buffers(remove_duplicate=False)}
        found |= {one: Recovered(places, name) for one in names_of(model, name)}
        for step in reversed(self.steps):
            found = before_step(step, found, scaled=False)
        held = torch.zeros(shape.numel() + 1, dtype=torch.bool)
        for dense, _ in self.skeleton.named_parameters(remove_duplicate=False):
            carried = found[dense].value if dense in found else None
            if carried is not None:
                held[carried.flatten()] = True
        return held[1:].view(shape)


def dense_form(model: nn.Module) -> DenseForm:
    """Return the dense form of `model`; of a dense model itself that is the model, with nothing added.

    Raises `CheckpointError` where the dense model cannot be built again, or the recipe does not lead from it to this one.
    """
    part = rewritten_part(model)
    skeleton = dense_skeleton(part)
    rewritten = dense_skeleton(part)
    steps = list(replayed_steps(rewritten, part))
    require_same_shapes(rewritten, part)
    values = {name: Recovered(one.detach(), name) for name, one in tensors_of(part).items()}
    for step in reversed(steps):
        values = before_step(step, values)
    wanted = tensors_of(skeleton)
    saved = {*skeleton.state_dict(), *(name for name, _ in skeleton.named_parameters(remove_duplicate=False))}
    found = {name: values.get(name, Recovered(None, why="nothing of it is left")) for name in wanted if name in saved}
    places = {one.place for one in found.values()}
    named = dict(part.named_parameters(remove_duplicate=False))
    held = {id(named[place]) for place in places if place in named}
    added = frozenset(name for name, parameter in part.named_parameters() if id(parameter) not in held)
    unsaved = {name: one.value for name in wanted if name not in saved and (one := values.get(name)) and one.value is not None}
    return DenseForm(skeleton, found, added, tuple(steps), unsaved)


def names_of(model: nn.Module, name: str) -> list[str]:
    """Return all names of a parameter."""
    wanted = model.get_parameter(name)
    return [one for one, parameter in model.named_parameters(remove_duplicate=False) if parameter is wanted]


def replayed_steps(skeleton: nn.Module, model: nn.Module) -> list[Step]:
    """Return what each pass of the recipe of `model` does, tried on `skeleton`, which has gone through all of them afterwards."""
    steps: list[Step] = []
    inputs = replayed_inputs(skeleton, recipe_storage.stored_inputs(model))
    try:
        for one in parse_recipe(recipe_storage.stored_recipe(model)):
            edit = Edit(skeleton)
            buffers = dict(skeleton.named_buffers(remove_duplicate=False))
            run_passes(skeleton, (one,), inputs, edit, lambda stage: None)
            names = {id(buffer): name for name, buffer in skeleton.named_buffers()}
            still = {name: names[id(buffer)] for name, buffer in buffers.items() if id(buffer) in names}
            steps.append(Step(one.name, edit.account(), still))
    except RetrofitError as error:
        raise CheckpointError(
            f"the recipe of {type(model).__name__} cannot be followed again",
            why=error.why or error.what,
            remedy="load the whole model that was saved, as the class that the passes were applied to",
        ) from error
    return steps


def before_step(step: Step, after: Mapping[str, Recovered], scaled: bool = True) -> dict[str, Recovered]:
    """Return the tensors as they were before a pass, from those after it; not `scaled`, numbers that are only carried along."""
    found = {name: after[now] for name, now in step.buffers.items() if now in after}
    return found | {name: before_fate(fate, step.method, after, scaled) for name, fate in step.fates.items()}


def before_fate(fate: Fate, method: str, after: Mapping[str, Recovered], scaled: bool) -> Recovered:
    """One parameter before a pass."""
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
    """Return a buffer that says how a parameter lies."""
    found = after.get(name)
    if found is None or found.value is None:
        raise CheckpointError(f"{name} is not there", why="it says how a dense parameter lies in its successor")
    return found.value


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by all their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def require_same_shapes(replayed: nn.Module, model: nn.Module) -> None:
    """Both have the same parameters, else `CheckpointError`."""
    theirs, ours = shapes_of(replayed), shapes_of(model)
    wrong = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if wrong:
        raise CheckpointError(
            f"the recipe of {type(model).__name__} does not lead to this model",
            why=f"not the same: {first_few(wrong)}",
            remedy="if modules were put into it afterwards, as adapters are, merge them first: retrofit merge",
        )


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}
