"""Layers that repeat, written once: a stack as the shortest sequence of repeated, possibly nested, groups."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable, Iterator, Sequence

from retrofit.anatomy.parts import Layer


@dataclasses.dataclass(frozen=True)
class Fold:
    """`times` repetitions of `body`, or of one layer where `body` is empty, from position `start` on."""

    start: int
    times: int
    body: tuple[Fold, ...] = ()

    @property
    def period(self) -> int:
        """How many layers one repetition holds."""
        return sum(fold.span for fold in self.body) if self.body else 1

    @property
    def span(self) -> int:
        """How many layers the fold covers."""
        return self.times * self.period


def fold_layers(layers: Sequence[Layer]) -> tuple[Fold, ...]:
    """The layers in order, consecutive equal layers and equal groups of layers folded."""
    return fold_sequence([structure(layer) for layer in layers])


def fold_sequence(items: Sequence[Hashable]) -> tuple[Fold, ...]:
    """The folds that write `items` down with the fewest rows, then with the fewest folds."""
    letters = {item: letter for letter, item in enumerate(dict.fromkeys(items))}
    return shortest(tuple(letters[item] for item in items))


@functools.lru_cache(maxsize=4096)
def shortest(word: tuple[int, ...]) -> tuple[Fold, ...]:
    """The folds of a word, shortest first by rows, then by folds, then with the longest first fold."""
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
    """Every fold that can begin at `start`: one layer, or a group that is repeated and is no repetition itself."""
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
    """Whether no shorter word, repeated, gives this one."""
    return not any(len(word) % period == 0 and word == word[:period] * (len(word) // period) for period in range(1, len(word)))


def shifted(fold: Fold, by: int) -> Fold:
    return Fold(fold.start + by, fold.times, tuple(shifted(inner, by) for inner in fold.body))


def height(fold: Fold) -> int:
    """How many rows a fold takes: one for each layer that is written down."""
    return sum(height(inner) for inner in fold.body) if fold.body else 1


def size(fold: Fold) -> int:
    """How many folds a fold holds, itself included."""
    return 1 + sum(size(inner) for inner in fold.body)


def leaves(folds: Sequence[Fold], offsets: Sequence[int] = (0,)) -> Iterator[tuple[Fold, tuple[int, ...]]]:
    """Each fold that is one layer written once, with the positions of all layers it covers."""
    for fold in folds:
        repeated = [offset + turn * fold.period for offset in offsets for turn in range(fold.times)]
        if fold.body:
            yield from leaves(fold.body, repeated)
        else:
            yield fold, tuple(sorted(fold.start + offset for offset in repeated))


def structure(layer: Layer) -> Hashable:
    """What is equal in two layers that one description fits: roles, shapes, counts, and names up to their numbers."""
    branches = tuple(
        (
            branch.role,
            branch.heads,
            branch.gated,
            branch.parameters,
            numberless(relative(branch.name, layer.name)),
            tuple((one.role, one.in_features, one.out_features) for one in branch.projections),
        )
        for branch in layer.branches
    )
    norms = tuple(numberless(relative(norm, layer.name)) for norm in layer.norms)
    return branches, norms, layer.parameters


def numberless(name: str) -> str:
    """The name with `*` for each number."""
    return re.sub(r"\d+", "*", name)


def common_name(names: Sequence[str]) -> str:
    """One name for all of `names`: `*` for each part they differ in, first and last where they are of different depth."""
    parts = [name.split(".") for name in dict.fromkeys(names)]
    if len({len(part) for part in parts}) > 1:
        return f"{names[0]} … {names[-1]}"
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*parts, strict=True))


def relative(name: str, owner: str) -> str:
    """`name` relative to the module `owner`, as in `.mlp`; unchanged where `owner` does not contain it."""
    return name[len(owner) :] if owner and name.startswith(owner + ".") else name
