"""The contents of the table and the drawing: repeated layers folded, and the modules around the stacks in order.

A stack is the shortest sequence of repeated, possibly nested, groups of layers. Every parameter is counted once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from retrofit.anatomy.parts import Findings, Layer, Part, Stack


@dataclasses.dataclass(frozen=True)
class Fold:
    """`times` repetitions of `body`, or of one layer if `body` is empty, from position `start` on."""

    start: int
    times: int
    body: tuple[Fold, ...] = ()

    @property
    def period(self) -> int:
        """Return the number of layers in one repetition."""
        return sum(fold.span for fold in self.body) if self.body else 1

    @property
    def span(self) -> int:
        """Return the number of layers that the fold covers."""
        return self.times * self.period


def fold_layers(layers: Sequence[Layer]) -> tuple[Fold, ...]:
    """Return the layers in order, consecutive equal layers and equal groups of layers folded."""
    return fold_sequence([structure(layer) for layer in layers])


def fold_sequence(items: Sequence[Hashable]) -> tuple[Fold, ...]:
    """Return the folds that describe `items` with the fewest rows, then with the fewest folds."""
    letters = {item: letter for letter, item in enumerate(dict.fromkeys(items))}
    return shortest(tuple(letters[item] for item in items))


@functools.lru_cache(maxsize=4096)
def shortest(word: tuple[int, ...]) -> tuple[Fold, ...]:
    """Return the folds of a word, shortest first by rows, then by folds, then with the longest first fold."""
    best: list[tuple[tuple[int, int], tuple[Fold, ...]]] = [((0, 0), ())]  # of the suffixes, from the end of the word
    for start in range(len(word) - 1, -1, -1):
        options = []
        for fold in folds_at(word, start):
            (rows, count), rest = best[len(word) - start - fold.span]
            options.append(((rows + height(fold), count + size(fold)), -fold.span, (fold, *rest)))
        cost, _, folds = min(options, key=lambda option: option[:2])
        best.append((cost, folds))
    return best[-1][1]


def folds_at(word: tuple[int, ...], start: int) -> Iterator[Fold]:
    """Yield every fold that can begin at `start`: one layer, or a repeated group that is not itself a repetition."""
    yield Fold(start, 1)
    for period in range(1, (len(word) - start) // 2 + 1):
        unit = word[start : start + period]
        if word[start + period : start + 2 * period] != unit or not is_primitive(unit):
            continue
        body = tuple(shifted(fold, start) for fold in shortest(unit)) if period > 1 else ()
        times = 1
        while word[start + times * period : start + (times + 1) * period] == unit:
            times += 1
            yield Fold(start, times, body)


def is_primitive(word: tuple[int, ...]) -> bool:
    """Return whether the word is not a repetition of a shorter one."""
    return not any(len(word) % period == 0 and word == word[:period] * (len(word) // period) for period in range(1, len(word)))


def shifted(fold: Fold, by: int) -> Fold:
    return Fold(fold.start + by, fold.times, tuple(shifted(inner, by) for inner in fold.body))


def height(fold: Fold) -> int:
    """Return the number of rows of a fold: one for each layer that is written."""
    return sum(height(inner) for inner in fold.body) if fold.body else 1


def size(fold: Fold) -> int:
    """Return the number of folds in a fold, including itself."""
    return 1 + sum(size(inner) for inner in fold.body)


def leaves(folds: Sequence[Fold], offsets: Sequence[int] = (0,)) -> Iterator[tuple[Fold, tuple[int, ...]]]:
    """Yield each fold that is one layer written once, with the positions of all layers it covers."""
    for fold in folds:
        repeated = [offset + turn * fold.period for offset in offsets for turn in range(fold.times)]
        if fold.body:
            yield from leaves(fold.body, repeated)
        else:
            yield fold, tuple(sorted(fold.start + offset for offset in repeated))


def structure(layer: Layer) -> Hashable:
    """Return the properties that layers of one description share: roles, shapes, counts, and names up to their numbers."""
    branches = tuple(
        (
            branch.role,
            branch.heads,
            branch.gated,
            branch.parameters,
            numberless(relative(branch.name, layer.name)),
            tuple((projection.role, projection.in_features, projection.out_features) for projection in branch.projections),
        )
        for branch in layer.branches
    )
    norms = tuple(numberless(relative(norm, layer.name)) for norm in layer.norms)
    return branches, norms, layer.parameters


def numberless(name: str) -> str:
    """Return the name with `*` for each number."""
    return re.sub(r"\d+", "*", name)


def common_name(names: Sequence[str]) -> str:
    """Return one name for all of `names`: `*` for each part that differs, first and last if their depths differ."""
    parts = [name.split(".") for name in dict.fromkeys(names)]
    if len({len(part) for part in parts}) > 1:
        return f"{names[0]} … {names[-1]}"
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*parts, strict=True))


def relative(name: str, owner: str) -> str:
    """Return `name` relative to the module `owner`, as in `.mlp`; unchanged if `owner` does not contain it."""
    return name[len(owner) :] if owner and name.startswith(owner + ".") else name


@dataclasses.dataclass(frozen=True)
class Piece:
    """A module, or a weight of several modules, before or after the layers."""

    names: tuple[str, ...]
    kind: str  # the module's class, "" if it is not one module
    part: Part | None  # the embedding or the head, if it is one
    parameters: int | None  # those that no earlier piece counts, None if unknown
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
    """Return the pieces around the stacks of `anatomy`."""
    counted: set[int | str] = set()
    parts = dict.fromkeys((*filter(None, [anatomy.embedding]), *anatomy.embeddings))
    tables = {part.parameter: [other for other in parts if other.parameter == part.parameter] for part in parts}
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
    """Return one weight with all its names and the small parameters of its module (a bias)."""
    part = parts[0]
    homes = tuple(dict.fromkeys(anatomy.flow.call_of(anatomy.node(part.node)).path or part.name for part in parts))
    owner = lookup(anatomy.model, homes[0], "get_submodule") if len(homes) == 1 else None
    weight = lookup(anatomy.model, part.parameter, "get_parameter")
    own = list(owner.parameters(recurse=False)) if owner is not None else []
    if any(parameter is weight for parameter in own):
        size = count(own, counted)
    else:
        size = count_named(anatomy, {part.parameter: math.prod(part.shape)}, counted)
    return Piece(homes, type(owner).__name__ if owner is not None else "", part, size, tuple(part.node for part in parts))


def module_piece(anatomy: Findings, name: str, counted: set[int | str]) -> Piece:
    module = lookup(anatomy.model, name, "get_submodule")
    if module is None:
        return Piece((name,), "", None, None, ())
    return Piece((name,), type(module).__name__, None, count(module.parameters(), counted), ())


def stack_size(anatomy: Findings, stack: Stack, counted: set[int | str]) -> int:
    """Return the number of parameters in the layers of a stack, shared ones counted once."""
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
    """Return the submodule or parameter of that name, None if there is none."""
    try:
        return getattr(model, getter)(name) if name else None
    except AttributeError:
        return None


def count(parameters: Iterable[Any], counted: set[int | str]) -> int:
    """Return the number of elements of the parameters not yet in `counted`, and add them to it."""
    total = 0
    for parameter in parameters:
        if id(parameter) not in counted:
            counted.add(id(parameter))
            total += parameter.numel()
    return total


def count_named(anatomy: Findings, sizes: Mapping[str, int], counted: set[int | str]) -> int:
    """Return the count of parameters by their names in the graph, which the model may lack."""
    total = 0
    for name, size in sizes.items():
        parameter = lookup(anatomy.model, name, "get_parameter")
        first = next((group[0] for group in anatomy.tied if name in group), name)
        key = first if parameter is None else id(parameter)
        total += 0 if key in counted else size
        counted.add(key)
    return total


def is_tied(anatomy: Findings) -> bool:
    """Return whether the head's weight is the token embedding's."""
    if anatomy.head is None or anatomy.embedding is None:
        return False
    names = {anatomy.head.parameter, anatomy.embedding.parameter}
    return len(names) == 1 or any(names <= set(group) for group in anatomy.tied)
