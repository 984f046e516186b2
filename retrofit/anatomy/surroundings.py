"""Everything outside the stacks, in order for display: embeddings, stem, tail and head, every parameter counted once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrofit.anatomy.findings import Findings
from retrofit.anatomy.parts import Part, Stack


@dataclasses.dataclass(frozen=True)
class Piece:
    """A module, or a weight of several modules, before or after the layers."""

    names: tuple[str, ...]
    kind: str  # the module's class, "" where it is not one module
    part: Part | None  # the embedding or the head it is
    parameters: int | None  # those that no piece before it counts, None where they cannot be determined
    nodes: tuple[str, ...]  # graph nodes of its look-ups or products

    @property
    def name(self) -> str:
        return ", ".join(self.names)


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The pieces around the stacks of one model, in the order of the data flow."""

    embeddings: tuple[Piece, ...]
    stem: tuple[Piece, ...]  # the other modules between the inputs and the layers
    tail: tuple[Piece, ...]
    head: Piece | None
    stacks: tuple[int, ...]  # parameters of the layers of each stack
    elsewhere: int  # parameters of none of these
    tied: bool  # whether head and token embedding are one weight


def surroundings(anatomy: Findings) -> Surroundings:
    """The pieces around the stacks of `anatomy`."""
    counted: set[int | str] = set()
    parts = dict.fromkeys((*filter(None, [anatomy.embedding]), *anatomy.embeddings))
    tables = {part.parameter: [one for one in parts if one.parameter == part.parameter] for part in parts}
    embeddings = tuple(part_piece(anatomy, found, counted) for found in tables.values())
    head = part_piece(anatomy, [anatomy.head], counted) if anatomy.head is not None else None
    stacks = tuple(stack_size(anatomy, stack, counted) for stack in anatomy.stacks)
    shown = {name for piece in (*embeddings, *filter(None, [head])) for name in piece.names}
    stem = tuple(module_piece(anatomy, name, counted) for name in anatomy.stem if name not in shown)
    tail = tuple(module_piece(anatomy, name, counted) for name in anatomy.tail if name not in shown)
    sizes = [piece.parameters for piece in (*embeddings, *stem, *tail, *filter(None, [head]))]
    accounted = sum(stacks) + sum(size or 0 for size in sizes)
    elsewhere = 0 if None in sizes else max(0, anatomy.parameters - accounted)
    return Surroundings(embeddings, stem, tail, head, stacks, elsewhere, is_tied(anatomy))


def part_piece(anatomy: Findings, parts: Sequence[Part], counted: set[int | str]) -> Piece:
    """One weight under all the names it is used by, with the small parameters of its module (a bias)."""
    part = parts[0]
    homes = tuple(dict.fromkeys(anatomy.flow.call_of(anatomy.node(one.node)).path or one.name for one in parts))
    owner = lookup(anatomy.model, homes[0], "get_submodule") if len(homes) == 1 else None
    weight = lookup(anatomy.model, part.parameter, "get_parameter")
    own = list(owner.parameters(recurse=False)) if owner is not None else []
    if any(one is weight for one in own):
        size = count(own, counted)
    else:
        size = count_named(anatomy, {part.parameter: math.prod(part.shape)}, counted)
    return Piece(homes, type(owner).__name__ if owner is not None else "", part, size, tuple(one.node for one in parts))


def module_piece(anatomy: Findings, name: str, counted: set[int | str]) -> Piece:
    module = lookup(anatomy.model, name, "get_submodule")
    if module is None:
        return Piece((name,), "", None, None, ())
    return Piece((name,), type(module).__name__, None, count(module.parameters(), counted), ())


def stack_size(anatomy: Findings, stack: Stack, counted: set[int | str]) -> int:
    """How many parameters the layers of a stack have, those that several of them use counted once."""
    total = 0
    for layer in stack.layers:
        module = lookup(anatomy.model, layer.name, "get_submodule")
        if module is not None:
            total += count(module.parameters(), counted)
        elif layer.name:
            total += 0 if layer.name in counted else layer.parameters
            counted.add(layer.name)
        else:
            region = anatomy.flow.between(anatomy.node(layer.entry), anatomy.node(layer.exit))
            total += count_named(anatomy, anatomy.flow.parameters_of(region), counted)
    return total


def lookup(model: Any, name: str, getter: str) -> Any:
    """The submodule or parameter of that name, None where there is none."""
    try:
        return getattr(model, getter)(name) if name else None
    except AttributeError:
        return None


def count(parameters: Iterable[Any], counted: set[int | str]) -> int:
    """The number of elements of the parameters not yet in `counted`, which they are added to."""
    total = 0
    for parameter in parameters:
        if id(parameter) not in counted:
            counted.add(id(parameter))
            total += parameter.numel()
    return total


def count_named(anatomy: Findings, sizes: Mapping[str, int], counted: set[int | str]) -> int:
    """The same for parameters by their names in the graph, which the model may not have."""
    total = 0
    for name, size in sizes.items():
        parameter = lookup(anatomy.model, name, "get_parameter")
        first = next((group[0] for group in anatomy.tied if name in group), name)
        key = first if parameter is None else id(parameter)
        total += 0 if key in counted else size
        counted.add(key)
    return total


def is_tied(anatomy: Findings) -> bool:
    """Whether the head's weight is the token embedding's."""
    if anatomy.head is None or anatomy.embedding is None:
        return False
    names = {anatomy.head.parameter, anatomy.embedding.parameter}
    return len(names) == 1 or any(names <= set(group) for group in anatomy.tied)
