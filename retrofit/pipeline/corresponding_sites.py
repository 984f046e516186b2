"""Which module of the dense model each rewritten site of a retrofitted model replaces.

The recipe is replayed on a copy of the dense model without weights, pass by pass, so that a module is followed through every
wrapper that later passes put around it or around what it lies in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from retrofit.errors import RetrofitError, TrainingError
from retrofit.pipeline import recipe_storage
from retrofit.pipeline.protocol import AnyPass, Dial
from retrofit.pipeline.registry import parse_recipe
from retrofit.pipeline.replaying import replayed_inputs, rewritten_part
from retrofit.pipeline.running import run_passes
from retrofit.runtime.offloading import value_of
from retrofit.runtime.skeletons import without_weights
from retrofit.surgery.edit import Edit, Fate


@dataclasses.dataclass(frozen=True)
class CorrespondingSite:
    """A module of the dense model, and the one that computes its part in the rewritten model: the same call, another function."""

    dense: str  # paths
    rewritten: str
    method: str  # the name of the pass
    dial: Dial | None = None  # by which the pass turns it from dense to rewritten

    def __str__(self) -> str:
        return self.rewritten if self.dense == self.rewritten else f"{self.rewritten} (of the dense model: {self.dense})"


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """What of a dense model became what of the model that was made from it."""

    sites: tuple[CorrespondingSite, ...]  # that approximate passes rewrote, in the order of the model
    fates: Mapping[str, Fate]  # of the dense parameters
    places: Mapping[str, str]  # dense module → the same module in the rewritten model, where it is still there; paths

    def write_dense(self, model: nn.Module, dense: nn.Module, site: str) -> None:
        """The parameters at `site`, a path in `model`, that were the dense model's have its values again."""
        named, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
        for name, fate in self.fates.items():
            if not fate.name.startswith(f"{site}.") or fate.name not in named:
                continue
            if fate.layout is not None:
                value = value_of(dense, name).to(named[fate.name])
                fate.layout.put(value, named[fate.name], buffers.get(fate.layout.order))
            elif fate.kind in ("kept", "moved"):
                named[fate.name].detach().copy_(value_of(dense, name))


def corresponding_sites(model: nn.Module, dense: nn.Module) -> tuple[CorrespondingSite, ...]:
    """The sites that approximate passes rewrote, in the order of the model; none where every pass was exact."""
    return correspondence(model, dense).sites


def correspondence(model: nn.Module, dense: nn.Module) -> Correspondence:
    """What of `dense` became what of `model`; raises `TrainingError` where it is not the model that `model` was made from."""
    model, dense = rewritten_part(model), rewritten_part(dense)
    specs = recipe_storage.stored_recipe(model)
    if not specs:
        raise TrainingError(
            "the model is a dense one",
            why="no pass has rewritten it",
            remedy="rewrite it with retrofit apply, or leave out the teacher",
        )
    if recipe_storage.stored_recipe(dense):
        raise TrainingError(
            "the teacher is a retrofitted model itself",
            why=f"its recipe is {', '.join(recipe_storage.stored_recipe(dense))}",
            remedy="name the dense model that was rewritten",
        )
    skeleton = without_weights(dense)
    modules = dict(skeleton.named_modules())  # keeps them alive, so that identities stay theirs
    origin = {id(module): path for path, module in modules.items()}
    found: dict[str, tuple[nn.Module, AnyPass]] = {}  # by path in the dense model: what computes its part now, and the pass
    edit = Edit(skeleton)
    try:
        inputs = replayed_inputs(skeleton, recipe_storage.stored_inputs(model))
        for one in parse_recipe(specs):
            before = dict(skeleton.named_modules())
            (account,), _ = run_passes(skeleton, (one,), inputs, edit, lambda stage: None)
            for site in account.sites:
                path = origin.get(id(before.get(site.name)))
                if path is None:
                    continue
                now = skeleton.get_submodule(site.name)
                origin[id(now)] = path
                if not account.exact:
                    found[path] = now, one
    except RetrofitError as error:
        raise other_architecture(f"its recipe does not fit the teacher: {error.why or error.what}") from error
    require_equal_shapes(skeleton, model)
    names = {id(module): path for path, module in skeleton.named_modules()}
    order = {path: place for place, path in enumerate(modules)}
    sites = (
        CorrespondingSite(path, names[id(now)], one.name, one.recovery.dial)
        for path, (now, one) in found.items()
        if id(now) in names
    )
    places = {path: names[id(module)] for path, module in modules.items() if id(module) in names}
    return Correspondence(tuple(sorted(sites, key=lambda site: order[site.dense])), edit.account(), places)


def require_equal_shapes(replayed: nn.Module, model: nn.Module) -> None:
    """Raises `TrainingError` where the parameters of the two do not have the same names and shapes."""
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
        "the teacher is not the dense model that the model was made from", why=why, remedy="name the dense model that was rewritten"
    )
