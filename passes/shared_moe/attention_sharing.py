"""The layers of a group share the attention matrices of the first one; norms, positions and caches stay each layer's own."""

from __future__ import annotations

import dataclasses
import itertools

from torch import nn

from retrofit.passes.shared_moe.grouping import Group
from retrofit.sdk import Anatomy, Branch, DoesNotFitError, Edit, Layer, NearMiss, Stack, collect_near_miss


@dataclasses.dataclass(frozen=True)
class SharedAttention:
    """An attention whose matrices and biases are replaced by those of another layer."""

    name: str
    first: str  # the layer that they are taken from
    replacements: dict[str, str]  # parameter name: the name of the one that replaces it


def plan_sharing(group: Group, stack: Stack, anatomy: Anatomy, near_misses: list[NearMiss]) -> list[SharedAttention]:
    """The attentions of a group that share the matrices of the group's first layer."""
    shared: list[SharedAttention] = []
    layers = layers_of(group, stack)
    if not layers:
        near_misses.append(NearMiss(group.name, "no module owns its layers, whose attentions could be told apart"))
        return []
    first = layers[0]
    for other in layers[1:]:
        for ours, theirs in itertools.zip_longest(first.attentions, other.attentions):
            with collect_near_miss(theirs.name if theirs else other.name, near_misses):
                replacements = pair_parameters(first, ours, other, theirs, anatomy)
                if theirs is not None and replacements:
                    shared.append(SharedAttention(theirs.name, first.name, replacements))
    return shared


def layers_of(group: Group, stack: Stack) -> list[Layer]:
    """The layers of the stack that the feed-forwards of the group belong to."""
    paths = [f"{site.path}." for site in group.sites]
    return [layer for layer in stack.layers if layer.name and any(path.startswith(f"{layer.name}.") for path in paths)]


def pair_parameters(first: Layer, ours: Branch | None, other: Layer, theirs: Branch | None, anatomy: Anatomy) -> dict[str, str]:
    """The parameters of the attention `theirs`, each with the one of `ours` that replaces it; raises where they differ."""
    if ours is None or theirs is None or ours.role != theirs.role:
        raise differ(other, f"{first.name} has not the same attentions, which it would share")
    common = parameter_names(ours, anatomy) & parameter_names(theirs, anatomy)
    here, there = own_matrices(ours, first, common, anatomy), own_matrices(theirs, other, common, anatomy)
    if {name: one.shape for name, one in here.items()} != {name: one.shape for name, one in there.items()}:
        raise differ(other, f"its matrices are not those of {first.name} in name and size, which it would share")
    return {f"{other.name}.{name}": f"{first.name}.{name}" for name in there}


def differ(layer: Layer, why: str) -> DoesNotFitError:
    return DoesNotFitError(f"the attention of {layer.name} cannot be shared", why=why)


def parameter_names(branch: Branch, anatomy: Anatomy) -> set[str]:
    """The names of the parameters that a branch reads."""
    return set(anatomy.flow.parameters_of(anatomy.flow.between(anatomy.node(branch.source), anatomy.node(branch.output))))


def own_matrices(branch: Branch, layer: Layer, common: set[str], anatomy: Anatomy) -> dict[str, nn.Parameter]:
    """The matrices of an attention and their biases, by name inside the layer, except those that are common already."""
    prefix = f"{layer.name}."
    names = (name for name in parameter_names(branch, anatomy) - common if name.startswith(prefix))
    parameters = {name: anatomy.model.get_parameter(name) for name in names}
    owners = {name.rpartition(".")[0] for name, parameter in parameters.items() if parameter.dim() > 1}
    return {name.removeprefix(prefix): one for name, one in parameters.items() if name.rpartition(".")[0] in owners}


def share(attention: SharedAttention, edit: Edit) -> None:
    """The parameters are replaced wherever the model holds them."""
    for own, other in attention.replacements.items():
        old, new = edit.model.get_parameter(own), edit.model.get_parameter(other)
        for module in list(edit.model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is old:
                    edit.set_item(module._parameters, name, new)
        edit.drop_parameter(old, f"its layer shares the attention of {attention.first}")
