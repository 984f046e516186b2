"""Which residual additions of a stream are one layer: those of one module call, of one number, or of one cycle of roles."""

from __future__ import annotations

import dataclasses
from collections import Counter

from retrofit.anatomy.branches import owner_of
from retrofit.anatomy.parts import Branch
from retrofit.anatomy.residual_streams import Residual
from retrofit.anatomy.weight_products import nearest_products
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call


@dataclasses.dataclass
class LayerGroup:
    """The residual additions of one layer and the call that makes them, None where they are in the stack's own code."""

    call: Call | None
    residuals: list[Residual]


def layer_groups(
    chain: list[Residual], table: dict[Residual, list[Branch]], flow: Dataflow, notes: list[str]
) -> tuple[Call, list[LayerGroup]]:
    """The call whose code runs the layers, and the layers: the calls in it that contain the residual additions."""
    call = owner_of([one.add for one in chain], flow)
    remaining = chain
    while True:
        groups = group_by_call(call, remaining, flow)
        owned = [(group.call, group.residuals) for group in groups if group.call is not None]
        if not owned:
            break
        inner, most = max(owned, key=lambda pair: len(pair[1]))
        if 3 * len(most) <= 2 * len(remaining):
            break
        if left := [one.add.name for one in remaining if one not in most]:
            notes.append(f"{len(left)} residual addition(s) outside the layers of {inner.path}: {', '.join(left)}")
        call, remaining = inner, most
    roles = [branch.role for one in remaining for branch in table[one]]
    if call.path and len(set(roles)) == len(roles):  # each role once: the call is itself the only layer
        return call.parent or call, [LayerGroup(call, remaining)]
    if not any(group.call for group in groups):
        numbered = group_by_number(remaining, table)
        if numbered and (left := [one.add.name for one in remaining if not any(one in part for part in numbered)]):
            notes.append(f"{len(left)} residual addition(s) outside the layers of a list: {', '.join(left)}")
        return call, [LayerGroup(None, part) for part in numbered or group_by_cycle(remaining, table)]
    stray = [one for group in groups if group.call is None for one in group.residuals]
    if stray and len(stray) * 2 >= len(remaining):
        return call, [LayerGroup(None, part) for part in group_by_cycle(remaining, table)]
    if stray:
        names = ", ".join(one.add.name for one in stray)
        notes.append(f"{len(stray)} residual addition(s) in the code of {call.path or 'the model'} itself: {names}")
    return call, [group for group in groups if group.call is not None]


def group_by_call(call: Call, residuals: list[Residual], flow: Dataflow) -> list[LayerGroup]:
    """The residual additions, in order, by the call within `call` that contains them, and the end of some branch of them."""
    groups: list[LayerGroup] = []
    placed = [(call_inside(call, one, flow), one) for one in residuals]
    layers = {found for found, one in placed if found is not None and not only_adds(found, one, flow)}
    for found, one in placed:
        inner = found if found in layers else None
        if groups and groups[-1].call is inner:
            groups[-1].residuals.append(one)
        else:
            groups.append(LayerGroup(inner, [one]))
    return groups


def call_inside(call: Call, residual: Residual, flow: Dataflow) -> Call | None:
    """The outermost call within `call` that contains the addition."""
    path = list(flow.call_of(residual.add).chain)
    return path[path.index(call) - 1] if path[0] is not call else None


def only_adds(call: Call, residual: Residual, flow: Dataflow) -> bool:
    """Whether the call adds branches to the stream that all end before it, in products outside of it."""
    nearest = [product.node for product in nearest_products(list(residual.branches), flow)]
    products = [node for node in nearest if flow.reaches(residual.base, node)]
    return bool(products) and not any(call.encloses(flow.call_of(node)) for node in products)


def group_by_number(residuals: list[Residual], table: dict[Residual, list[Branch]]) -> list[list[Residual]]:
    """Layers without modules of their own, by the numbers in the names of their weights; none where the names have no such numbers.

    The first component in which the names differ, `….{number}.…`, is the layer's number. Where more than two thirds of the names
    agree in that component, it is the first in which those differ, and the other additions are in no layer. Weights that several
    additions share are not considered.
    """
    roles = [branch.role for one in residuals for branch in table[one]]
    paths = dict(zip(residuals, weight_path_prefixes([table[one] for one in residuals]), strict=True))
    if len(set(roles)) == len(roles) or not all(paths.values()):
        return []
    inner = residuals
    while True:
        depth = len(common_prefix([paths[one] for one in inner]))
        keys = {one: paths[one][depth] if len(paths[one]) > depth else "" for one in inner}
        counts = Counter(keys.values())
        most, count = counts.most_common(1)[0]
        if len(counts) == 1 or 3 * count <= 2 * len(inner):
            break
        inner = [one for one in inner if keys[one] == most]
    together = inner == residuals[residuals.index(inner[0]) :][: len(inner)]
    if not together or not all(key.isdigit() for key in counts):
        return []
    layers: list[list[Residual]] = []
    for one in inner:
        if not layers or keys[one] != keys[layers[-1][-1]]:
            layers.append([])
        layers[-1].append(one)
    return layers


def weight_path_prefixes(branches: list[list[Branch]]) -> list[list[str]]:
    """For each addition the common prefix of the paths of the weights that it alone uses; empty where it has none."""
    weights = [[item.name for branch in one for item in branch.projections if item.name] for one in branches]
    uses = Counter(name for names in weights for name in set(names))
    return [common_prefix([name.split(".")[:-1] for name in names if uses[name] == 1]) for names in weights]


def common_prefix(paths: list[list[str]]) -> list[str]:
    """The components that all of the paths begin with."""
    shortest = min(paths, key=len, default=[])
    differing = (at for at, part in enumerate(shortest) if any(path[at] != part for path in paths))
    return shortest[: next(differing, len(shortest))]


def group_by_cycle(residuals: list[Residual], table: dict[Residual, list[Branch]]) -> list[list[Residual]]:
    """Layers without modules of their own: a new one begins at every self-attention or other mixer."""
    layers: list[list[Residual]] = []
    for one in residuals:
        begins = any(branch.role in ("self-attention", "other mixer") for branch in table[one])
        if begins or not layers:
            layers.append([])
        layers[-1].append(one)
    return layers
