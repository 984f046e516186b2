"""Run passes over a model, and run a saved recipe over an empty skeleton; which passes a model has been through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrofit import hub
from retrofit.capture import Program
from retrofit.cost import flops_per_token
from retrofit.edit import Edit, Fate
from retrofit.errors import RetrofitError
from retrofit.inputs import device_of, named_inputs
from retrofit.inspection import inspect, read_anatomy
from retrofit.protocol import Recipe, Rewrite, parse_recipe

Progress = Callable[[str], None]


def run_passes(
    model: nn.Module, passes: Recipe, inputs: dict[str, Any], edit: Edit, say: Progress, program: Program | None = None
) -> tuple[tuple[Rewrite, ...], int]:
    """Each pass has rewritten what the one before it left; returns their accounts and the FLOPs before the first.

    `program` is the model as it is, where that is captured already.
    """
    rewrites: list[Rewrite] = []
    dense_flops = 0
    for one in passes:
        say(f"inspecting for {one.name}")
        anatomy = inspect(model, inputs) if program is None or rewrites else read_anatomy(model, program)
        dense_flops = dense_flops or flops_per_token(anatomy.program)
        say(f"rewriting with {one.spec()}")
        before, left, names = held(model), dropped(edit), dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            made = one.rewrite(anatomy, edit)
        after = held(model)
        rewrites = list(called_now(rewrites, names, edit))
        gone = {key: size for key, size in before.items() if key not in after and key not in edit.replaced}
        rewrites.append(dataclasses.replace(made, superseded=sum(gone.values()) - (dropped(edit) - left)))
    return tuple(rewrites), dense_flops


def called_now(rewrites: Iterable[Rewrite], before: Mapping[str, nn.Parameter], edit: Edit) -> tuple[Rewrite, ...]:
    """The accounts of earlier passes, with the parameters they name, `before`, by the names that these have by now."""
    names = {id(parameter): name for name, parameter in edit.model.named_parameters()}

    def now(name: str) -> str:
        old = before.get(name)
        return name if old is None else names.get(id(edit.replaced.get(id(old), old)), name)

    return tuple(dataclasses.replace(one, second_step=tuple(map(now, one.second_step))) for one in rewrites)


def held(model: nn.Module) -> dict[int, int]:
    """The elements of each of the model's parameters, by identity."""
    return {id(parameter): parameter.numel() for parameter in model.parameters()}


def dropped(edit: Edit) -> int:
    """How many elements of the dense model have been dropped so far."""
    lost = {id(edit.dense[name]): edit.dense[name].numel() for name, fate in edit.account().items() if fate.kind == "dropped"}
    return sum(lost.values())


def replay(model: nn.Module, specs: Sequence[str]) -> None:
    """`model`, a dense skeleton with the right structure but no weights yet, has the structure that the recipe gives it."""
    edit = Edit(model)
    passes = parse_recipe(specs)
    try:
        made, _ = run_passes(model, passes, replayed_inputs(model), edit, lambda stage: None)
        edit.set_attribute(model, "retrofit_rewrites", made)
        edit.set_attribute(model, "retrofit_rearranged", rearranged(edit))
        hub.remember(model, specs)
    except RetrofitError:
        edit.undo()
        raise


def replayed_inputs(model: nn.Module) -> dict[str, Any]:
    """Inputs like those the recipe was first applied with; only their types and shapes matter to a capture."""
    noted = hub.noted_inputs(model)
    if not noted:
        return named_inputs(model)
    return named_inputs(model, {name: as_noted(note, device_of(model)) for name, note in noted.items()})


def as_noted(note: Any, device: torch.device) -> Any:
    """An input of the types and shapes that `note` tells, as `hub.input_notes` writes it."""
    if isinstance(note, Mapping):
        if "entries" in note:
            return {key: as_noted(one, device) for key, one in note["entries"].items()}
        return tuple(as_noted(one, device) for one in note["items"])
    dtype, shape = note
    return torch.ones(shape, dtype=getattr(torch, dtype), device=device)


def rearranged(edit: Edit) -> dict[str, Fate]:
    """The dense parameters whose values lie elsewhere in another layout, which nobody could find by looking."""
    return {name: fate for name, fate in edit.account().items() if fate.kind == "rearranged"}


def recipe(model: nn.Module) -> Recipe | None:
    """The passes applied to `model` so far, in order; None for a dense model."""
    specs = hub.recalled(model)
    return parse_recipe(specs) if specs else None


def rewrites(model: nn.Module) -> tuple[Rewrite, ...] | None:
    """The accounts of the passes applied to `model`, or replayed when it was loaded; None for a dense model."""
    return getattr(model, "retrofit_rewrites", None)
