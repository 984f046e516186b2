"""The choice of sites, held against every choice there is; the prediction of joint errors, against vectors that are added."""

from __future__ import annotations

import ctypes
import itertools
import math
import subprocess
import sys
from typing import Any

import numpy
import pytest
import scipy.optimize
from support.command_server import CommandServer

from retrofit.planning.choosing import Problem, choose, cliques_of, least_cost, linear_choice
from retrofit.planning.costs import error_of_median
from retrofit.planning.prediction import JointError, MeasuredTogether, cosines_of, joint_cost

SLOTS, SETTINGS = 5, 3


def random_problem(seed: int, *, joint: bool) -> Problem:
    """Five places with three settings each, of which each saves time and bytes and loses something."""
    draws = numpy.random.default_rng(seed)
    count = SLOTS * SETTINGS
    alone = draws.lognormal(-3, 1, count)
    cosines = cosines_of(list(draws.normal(0.5, 1, (count, 6)))) if joint else numpy.eye(count)
    costs = {"decode": -draws.uniform(0.01, 0.1, count), "memory": draws.uniform(-0.08, 0.03, count)}
    paths = [(f"layers.{place}.mlp",) for place in range(SLOTS) for _ in range(SETTINGS)]
    return Problem(JointError.of(alone, cosines).matrix, costs, cliques_of(paths))


def every_choice() -> list[list[int]]:
    options = [[None, *range(place * SETTINGS, (place + 1) * SETTINGS)] for place in range(SLOTS)]
    return [[one for one in choice if one is not None] for choice in itertools.product(*options)]


def least_loss(problem: Problem, limits: dict[str, float]) -> float:
    """Of all choices, by arithmetic of its own."""
    best = math.inf
    for chosen in every_choice():
        if all(sum(problem.costs[name][one] for one in chosen) <= most for name, most in limits.items()):
            best = min(best, sum(problem.matrix[one, other] for one in chosen for other in chosen))
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limits", [{"decode": -0.15}, {"decode": -0.1, "memory": -0.05}])
def test_the_choice_is_the_best_of_all_where_errors_add_up(seed: int, limits: dict[str, float]) -> None:
    problem = random_problem(seed, joint=False)
    found = choose(problem, limits)
    assert found is not None and problem.is_allowed(found, limits)
    assert problem.loss(found) == pytest.approx(least_loss(problem, limits), rel=1e-6)


def test_a_choice_in_no_time_is_made_of_one_linear_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[float] = []
    solve = scipy.optimize.milp

    def counted(*given: Any, **named: Any) -> Any:
        solved.append(named["options"]["time_limit"])
        return solve(*given, **named)

    monkeypatch.setattr(scipy.optimize, "milp", counted)
    problem, limits = random_problem(0, joint=True), {"decode": -0.15}
    hurried = choose(problem, limits, seconds=0.0)
    assert len(solved) == 1 and hurried is not None and problem.is_allowed(hurried, limits)
    best = choose(problem, limits)
    assert len(solved) > 5 and best is not None and problem.loss(best) <= problem.loss(hurried)
    assert problem.loss(choose(problem, limits, [best], seconds=0.0) or []) == problem.loss(best)


@pytest.mark.long
def test_the_choice_is_nearly_always_the_best_where_errors_depend_on_each_other() -> None:
    ratios = []
    for seed in range(8):
        problem = random_problem(seed, joint=True)
        limits = {"decode": -0.15 - 0.02 * seed}
        found = choose(problem, limits)
        assert found is not None and problem.is_allowed(found, limits)
        ratios.append(problem.loss(found) / least_loss(problem, limits))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratio < 1 + 1e-6 for ratio in ratios) >= 7
    assert max(ratios) < 1.3


def test_what_no_choice_reaches_is_none_and_the_least_is_known() -> None:
    problem = random_problem(0, joint=True)
    least = min(sum(problem.costs["decode"][one] for one in chosen) for chosen in every_choice())
    assert choose(problem, {"decode": least - 1e-3}) is None
    found = least_cost(problem, "decode", {})
    assert found is not None and problem.cost("decode", found) == pytest.approx(least)
    assert choose(problem, {"decode": least + 1e-9}) is not None


def test_what_replaces_a_whole_layer_excludes_what_replaces_a_part_of_it() -> None:
    paths = [("l.0.mlp",), ("l.0.attn",), ("l.0",), ("l.0.mlp", "l.0.attn"), ("l.1.mlp",), ("",), ("l.01",)]
    cliques = cliques_of(paths)
    together = {frozenset(pair) for clique in cliques for pair in itertools.combinations(clique, 2)}
    expected = {(0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0, 5), (1, 5), (2, 5), (3, 5), (4, 5), (5, 6)}
    assert together == {frozenset(pair) for pair in expected}


def test_the_joint_error_is_half_the_square_of_the_sum() -> None:
    vectors = numpy.random.default_rng(1).normal(size=(6, 40))
    alone = 0.5 * (vectors**2).sum(1)
    joint = JointError.of(alone, cosines_of(list(vectors)))
    for chosen in ((0,), (1, 4), (0, 2, 3, 5)):
        expected = 0.5 * float((vectors[list(chosen)].sum(0) ** 2).sum())
        assert joint.distance(chosen) == pytest.approx(expected, rel=1e-5)


def test_the_prediction_follows_what_was_measured_together() -> None:
    vectors = numpy.random.default_rng(2).normal(size=(8, 30))
    joint = JointError.of(0.5 * (vectors**2).sum(1), cosines_of(list(vectors)))

    def truth(chosen: tuple[int, ...]) -> float:
        return 1.5 * joint.together(chosen) ** 1.2

    measured = [MeasuredTogether(chosen, truth(chosen), 0.8 * truth(chosen)) for chosen in itertools.combinations(range(8), 5)]
    fitted = joint.fitted(measured, near=truth((0, 1, 2, 3, 4)))
    for chosen in ((0, 1, 2, 3), (2, 3, 4, 6, 7)):
        assert fitted.distance(chosen) == pytest.approx(truth(chosen), rel=0.05)
        assert fitted.added_loss(truth(chosen)) == pytest.approx(0.8 * truth(chosen))
    assert joint.fitted([], near=1.0).distance((0, 1)) == joint.distance((0, 1))


def test_how_much_errors_add_up_is_what_candidates_were_measured_to_do() -> None:
    """Three candidates, whose errors add up as the cosines say, by a quarter of that, and not at all."""
    vectors = numpy.random.default_rng(4).normal(0.03, 0.05, size=(30, 60))
    alone = 0.5 * (vectors**2).sum(1)
    joint = JointError.of(alone, cosines_of(list(vectors)))
    places = {share: tuple(10 * number + index for index in range(10)) for number, share in enumerate((1.0, 0.25, 0.0))}

    def truth(chosen: tuple[int, ...], share: float) -> float:
        return float(share * joint.together(chosen) + (1 - share) * alone[list(chosen)].sum())

    candidates = [number for number in range(3) for _ in range(10)]
    everywhere = [MeasuredTogether(chosen, truth(chosen, share), None) for share, chosen in places.items()]
    counted = joint.counted(candidates, everywhere)
    for share, chosen in places.items():
        for some in (chosen, chosen[2:7]):
            assert counted.together(some) == pytest.approx(truth(some, share), rel=1e-4)

    def between(one: JointError) -> float:
        return one.together((0, 10)) - one.together((0,)) - one.together((10,))

    assert between(counted) == pytest.approx(0.5 * between(joint), rel=1e-4)
    # What two candidates do together is learnt from choices of both.
    mixed = (*places[1.0][:6], *places[0.0][:6])
    found = MeasuredTogether(mixed, 1.2 * joint.together(mixed), None)
    assert counted.together(mixed) < 0.8 * found.distance
    learnt = joint.counted(candidates, [*everywhere, found])
    assert learnt.together(mixed) == pytest.approx(found.distance, rel=0.08)
    other = (*places[1.0][3:9], *places[0.0][3:9])
    assert learnt.together(other) > 1.1 * counted.together(other)
    beyond = joint.counted(candidates, [MeasuredTogether(places[0.0], 1e-6, None)])  # less than the sum
    assert beyond.together(places[0.0]) == pytest.approx(alone[20:].sum())
    assert joint.counted(candidates, []).together((1, 2)) == joint.together((1, 2))


def test_errors_that_no_longer_add_up_are_predicted_from_their_like() -> None:
    """Of 28 sites that add up to 20 and more nothing is left of the predictions, which are then 4 from the dense ones at most."""
    vectors = numpy.random.default_rng(3).normal(0.03, 0.05, size=(28, 60))
    joint = JointError.of(0.5 * (vectors**2).sum(1), cosines_of(list(vectors)))

    def truth(chosen: tuple[int, ...]) -> float:
        return 4.0 * (1.0 - math.exp(-joint.together(chosen) / 4.0))

    measured = [MeasuredTogether(chosen, truth(chosen), None) for chosen in (tuple(range(28)), tuple(range(20)))]
    for chosen in (tuple(range(3, 26)), tuple(range(24))):
        assert joint.together(chosen) > 3 * truth(chosen)
        near = joint.expected(chosen, measured)
        assert joint.fitted(measured, near).distance(chosen) == pytest.approx(truth(chosen), rel=0.2)
    few = (2, 9)
    assert joint.fitted(measured, joint.expected(few, measured)).distance(few) == pytest.approx(joint.together(few), rel=0.3)


# ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_time_follows_from_all_that_was_timed() -> None:
    """Of two structures, 20 and 10 in number, measured with errors; each further choice lowers the error of all."""
    draws = numpy.random.default_rng(0)
    kinds, true = ["a"] * 20 + ["b"] * 10, numpy.repeat([-0.01, -0.004], [20, 10])
    errors: list[list[float]] = []
    for _ in range(200):
        noise = draws.normal(scale=0.02, size=2)
        alone = true + numpy.repeat(noise / (20, 10), (20, 10))
        choices = [frozenset(draws.choice(30, size=15, replace=False).tolist()) for _ in range(8)]
        timed = [(one, float(true[sorted(one)].sum() + draws.normal(scale=0.02))) for one in choices]
        errors.append([float(abs((joint_cost(kinds, alone, dict(timed[:count])) - true)[:15].sum())) for count in (0, 2, 8)])
    none, some, many = numpy.mean(errors, axis=0)
    assert many < some < none and many < 0.8 * none
    exact = joint_cost(kinds, true, {frozenset(range(5, 25)): float(true[5:25].sum())})
    assert numpy.allclose(exact, true)
    assert numpy.array_equal(joint_cost(["a", "a"], [1.0, 2.0], {}), [1.0, 2.0])


def test_the_error_of_a_median_is_that_of_many_draws() -> None:
    draws = numpy.random.default_rng(1).normal(size=(400, 25))
    assert abs(numpy.mean([error_of_median(row) for row in draws]) / numpy.median(draws, axis=1).std() - 1) < 0.2


PROGRAM = """
import ctypes
from retrofit.planning.choosing import c_output_suppressed

libc = ctypes.CDLL(None)
print("before")
libc.printf(b"C before\\n")
with c_output_suppressed():
    print("Python, meanwhile")
    libc.printf(b"C, meanwhile\\n")
print("after")
"""


def test_what_c_prints_is_lost_and_what_python_prints_goes_to_stderr(server: CommandServer) -> None:
    done = server.program(PROGRAM)
    assert done.code == 0 and done.out.splitlines() == ["before", "C before", "after"]
    assert done.err == "Python, meanwhile\n"


def test_an_error_leaves_stdout_as_it_was(server: CommandServer) -> None:
    done = server.program(PROGRAM.replace('    print("Python, meanwhile")', "    raise SystemExit(3)"))
    assert done.code == 3 and done.out == "before\nC before\n"


def test_a_closed_stdout_is_no_error() -> None:
    program = "from retrofit.planning import choosing\nwith choosing.c_output_suppressed():\n    raise SystemExit(4)"
    assert subprocess.run(f"exec {sys.executable} -c '{program}' >&-", shell=True, check=False).returncode == 4


def test_what_the_solver_prints_is_lost(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    solve = scipy.optimize.milp

    def talkative(*given: Any, **options: Any) -> Any:
        ctypes.CDLL(None).puts(b"a line of HiGHS")
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talkative)
    problem = Problem(numpy.diag([1.0, 2.0]), {"decode": numpy.array([-1.0, -1.0])}, ())
    assert linear_choice(problem, numpy.array([1.0, 2.0]), {"decode": -1.0}) == {0}
    assert capfd.readouterr().out == ""
