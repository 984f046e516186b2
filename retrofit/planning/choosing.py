"""The choice of replacements with the least loss within limits on its costs.

    min q(x) = xᵀ M x      x_i ∈ {0, 1},  Σ_i c_mi x_i ≤ C_m for each cost m,  x_i + x_j ≤ 1 where i and j exclude each other

If M is diagonal this is a knapsack, which HiGHS solves exactly. With off-diagonal terms, it solves the problem with q linearized
around the best choice so far, from several starts, and exchanges of one or two replacements improve the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from time import monotonic

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]

ROUNDS = 6  # of linear problems from one start
STARTS = 6  # at random
SLACK = 1e-9
TIME, BRIEF = 2.0, 0.3  # seconds for a linear problem: for the first, and for each that may improve on it
GAP = 1e-6
TRIED = 200  # pairs of moves, from the best on


@dataclasses.dataclass(frozen=True)
class Problem:
    """Replacements to choose from: their joint loss, the costs of each, the pairs that exclude each other."""

    matrix: Array  # M, (n, n)
    costs: Mapping[str, Array]  # for each cost, its increase by each replacement, (n); negative if it saves
    cliques: tuple[tuple[int, ...], ...]  # at most one of each may be chosen

    @property
    def count(self) -> int:
        return len(self.matrix)

    def cost(self, name: str, chosen: Collection[int]) -> float:
        return float(self.costs[name][list(chosen)].sum())

    def shares(self, chosen: Collection[int]) -> dict[str, float]:
        """Return each cost of a choice as a share of the dense model's."""
        return {name: 1.0 + self.cost(name, chosen) for name in self.costs}

    def loss(self, chosen: Collection[int]) -> float:
        index = sorted(chosen)
        return float(self.matrix[numpy.ix_(index, index)].sum())

    def is_allowed(self, chosen: Collection[int], limits: Mapping[str, float]) -> bool:
        """Return whether the choice keeps the limits and contains no two replacements that exclude each other."""
        within = all(self.cost(name, chosen) <= most + SLACK for name, most in limits.items())
        return within and all(len(set(clique) & set(chosen)) <= 1 for clique in self.cliques)


def cliques_of(paths: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each innermost replaced module, the replacements of it or of a module around it."""
    modules = set(itertools.chain.from_iterable(paths))
    innermost = [path for path in modules if not any(other != path and is_inside(other, path) for other in modules)]
    found = {
        tuple(index for index, outers in enumerate(paths) if any(is_inside(path, outer) for outer in outers)) for path in innermost
    }
    return tuple(sorted(clique for clique in found if len(clique) > 1))


def is_inside(path: str, outer: str) -> bool:
    """Return whether the module at `path` is the one at `outer` or lies in it."""
    return path == outer or not outer or path.startswith(f"{outer}.")


def choose(
    problem: Problem, limits: Mapping[str, float], starts: Sequence[Collection[int]] = (), seconds: float = math.inf
) -> frozenset[int] | None:
    """Return the best choice found within the limits; None if no choice keeps them. `limits` are the upper bounds of each cost.

    After `seconds` it returns the best so far, from at least one linear problem and the `starts`.
    """
    until = monotonic() + seconds
    diagonal = numpy.maximum(problem.matrix.diagonal(), 0.0)
    first = linear_choice(problem, diagonal, limits)
    if first is None:
        return None
    found = [improved(problem, follow(problem, first, limits, until), limits, until)]
    draws = numpy.random.default_rng(0)
    around = [diagonal * draws.lognormal(sigma=0.5, size=problem.count) for _ in range(STARTS)]
    for weights in (numpy.sqrt(diagonal), numpy.maximum(problem.matrix.sum(1), 0.0), *around):
        if monotonic() > until:
            break
        another = linear_choice(problem, weights, limits, BRIEF)
        if another is not None:
            found.append(improved(problem, follow(problem, another, limits, until), limits, until))
    found += [improved(problem, frozenset(start), limits, until) for start in starts if problem.is_allowed(start, limits)]
    return min(found, key=problem.loss)


def follow(problem: Problem, start: frozenset[int], limits: Mapping[str, float], until: float) -> frozenset[int]:
    """Return the best of the choices reached from `start` through successive linear problems."""
    best = current = start
    for _ in range(ROUNDS):
        if monotonic() > until:
            break
        x = numpy.zeros(problem.count)
        x[list(current)] = 1.0
        interaction = problem.matrix @ x - problem.matrix.diagonal() * x
        following = linear_choice(problem, problem.matrix.diagonal() + 2 * interaction, limits, BRIEF)
        if following is None or following == current:
            break
        current = following
        best = min(best, current, key=problem.loss)
    return best


def linear_choice(problem: Problem, weights: Array, limits: Mapping[str, float], seconds: float = TIME) -> frozenset[int] | None:
    """Return the choice with the least sum of weights within the limits; None if none is found."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows = [problem.costs[name] for name in limits]
    most = list(limits.values())
    for clique in problem.cliques:
        row = numpy.zeros(problem.count)
        row[list(clique)] = 1.0
        rows.append(row)
        most.append(1.0)
    scales = [numpy.abs(row).max() or 1.0 for row in rows]
    constraints = [
        LinearConstraint(row[None] / scale, -numpy.inf, limit / scale) for row, limit, scale in zip(rows, most, scales, strict=True)
    ]
    size = float(numpy.abs(weights).max()) or 1.0
    with c_output_suppressed():
        solved = milp(
            weights / size,
            constraints=constraints,
            integrality=numpy.ones(problem.count),
            bounds=Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
    if solved.x is None:
        return None
    chosen = frozenset(int(index) for index in numpy.flatnonzero(solved.x > 0.5))
    return chosen if problem.is_allowed(chosen, limits) else trimmed(problem, chosen, limits)


def trimmed(problem: Problem, chosen: frozenset[int], limits: Mapping[str, float]) -> frozenset[int] | None:
    """Return `chosen`, which misses a limit by a rounding error, with one more replacement that cures it; None if none does."""
    larger = (chosen | {index} for index in range(problem.count) if index not in chosen)
    allowed = [choice for choice in larger if problem.is_allowed(choice, limits)]
    return min(allowed, key=problem.loss, default=None)


def improved(problem: Problem, chosen: frozenset[int], limits: Mapping[str, float], until: float) -> frozenset[int]:
    """Return the choice after exchanges of one or two replacements, until none improves it or the time is over."""
    rivals = rivals_of(problem)
    while monotonic() <= until:
        moves = single_moves(problem, chosen, rivals)
        better = best_of(problem, chosen, moves, limits)
        if better is None:
            better = best_pair(problem, chosen, moves, limits)
        if better is None:
            break
        chosen = better
    return chosen


Move = tuple[frozenset[int], int | None]  # what is removed, what is added


def rivals_of(problem: Problem) -> list[set[int]]:
    """Return for each replacement those that it excludes."""
    rivals: list[set[int]] = [set() for _ in range(problem.count)]
    for clique in problem.cliques:
        for first, other in itertools.permutations(clique, 2):
            rivals[first].add(other)
    return rivals


def single_moves(problem: Problem, chosen: frozenset[int], rivals: Sequence[set[int]]) -> list[Move]:
    """Return the moves that remove a replacement, or add one and remove those that it excludes."""
    leaving: list[Move] = [(frozenset({index}), None) for index in chosen]
    return leaving + [(frozenset(rivals[index] & chosen), index) for index in range(problem.count) if index not in chosen]


def moved(chosen: frozenset[int], *moves: Move) -> frozenset[int]:
    removed = frozenset().union(*(move[0] for move in moves))
    return (chosen - removed) | {move[1] for move in moves if move[1] is not None}


def best_of(problem: Problem, chosen: frozenset[int], moves: Sequence[Move], limits: Mapping[str, float]) -> frozenset[int] | None:
    """Return the best choice that one move leads to; None if none is better."""
    before = problem.loss(chosen)
    after = [
        choice for choice in (moved(chosen, move) for move in moves) if problem.loss(choice) < before - SLACK * max(1.0, before)
    ]
    return min((choice for choice in after if problem.is_allowed(choice, limits)), key=problem.loss, default=None)


def best_pair(
    problem: Problem, chosen: frozenset[int], moves: Sequence[Move], limits: Mapping[str, float]
) -> frozenset[int] | None:
    """Return the best choice that two moves lead to; None if none is better.

    All pairs are ranked by the difference they make; pairs that exclude each other are skipped.
    """
    if not moves:
        return None
    steps = numpy.zeros((len(moves), problem.count))
    for row, (removed, added) in enumerate(moves):
        steps[row, list(removed)] = -1.0
        if added is not None:
            steps[row, added] = 1.0
    x = numpy.zeros(problem.count)
    x[list(chosen)] = 1.0
    products = steps @ problem.matrix
    alone = 2 * products @ x + (products * steps).sum(1)
    change = alone[:, None] + alone[None] + 2 * products @ steps.T
    least = -SLACK * max(1.0, problem.loss(chosen))
    allowed = change < least
    for name, most in limits.items():
        saved = steps @ problem.costs[name]
        allowed &= problem.cost(name, chosen) + saved[:, None] + saved[None] <= most + SLACK
    numpy.fill_diagonal(allowed, False)
    rows, columns = numpy.nonzero(numpy.triu(allowed))
    for place in change[rows, columns].argsort()[:TRIED]:
        after = moved(chosen, moves[rows[place]], moves[columns[place]])
        if problem.is_allowed(after, limits) and problem.loss(after) < problem.loss(chosen) + least:
            return after
    return None


def least_cost(problem: Problem, name: str, limits: Mapping[str, float]) -> frozenset[int] | None:
    """Return the choice with the least of one cost within the limits on the others, whatever its loss."""
    return linear_choice(problem, problem.costs[name], {other: most for other, most in limits.items() if other != name})


STDOUT = 1


@contextlib.contextmanager
def c_output_suppressed() -> Iterator[None]:
    """Within this context C's output to stdout is discarded, and Python's goes to stderr.

    HiGHS, run by scipy's `milp`, prints a line for some solutions whatever its options; C buffers such lines, so they could appear
    anywhere in Python's output, or after the JSON of `--json`.
    """
    try:
        sys.stdout.flush()
        flush = ctypes.CDLL(None).fflush
        kept = os.dup(STDOUT)
    except (OSError, TypeError, ValueError, AttributeError):  # stdout is closed, or this is no POSIX system
        yield
        return
    try:
        flush(None)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), STDOUT)
        with contextlib.redirect_stdout(sys.stderr):  # another thread may print
            yield
    finally:
        flush(None)
        os.dup2(kept, STDOUT)
        os.close(kept)
