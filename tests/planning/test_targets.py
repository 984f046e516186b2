"""Targets: what they mean, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from retrofit.errors import PlanningError
from retrofit.planning.targets import parse_target, parse_targets


@pytest.mark.parametrize(
    ("text", "costs", "quality"),
    [
        ("decode 1.5x", {"decode": 1 / 1.5}, None),
        ("Prefill 2x", {"prefill": 0.5}, None),
        ("memory 0.7x", {"memory": 0.7}, None),
        ("train .8x", {"train": 0.8}, None),
        ("loss +0.05", {}, 0.05),
        ("loss 0.05", {}, 0.05),
        ("decode 1.25x, memory 0.9x,loss +0.1", {"decode": 0.8, "memory": 0.9}, 0.1),
    ],
)
def test_a_target_is_the_most_of_each_cost_and_the_most_that_is_lost(
    text: str, costs: dict[str, float], quality: float | None
) -> None:
    target = parse_target(text)
    assert target.costs == pytest.approx(costs)
    assert (None if target.quality is None else target.quality.value) == quality
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode 0x", "above zero"),
        ("loss -1", "above zero"),
        ("decode -2x", "above zero"),
        ("memory nanx", "above zero"),
        ("decode infx", "above zero"),
        ("decode 1x", "changes nothing"),
        ("decode 0.5x", "above 1x"),
        ("memory 1.2x", "below 1x"),
        ("speed 2x", "unknown quantity 'speed'"),
        ("decod 2x", "did you mean decode"),
        ("decode 2", "in times the dense model's"),
        ("loss +0.1x", "an added amount"),
        ("decode", "cannot read"),
        ("", "cannot read"),
        ("decode 2x, decode 3x", "limits decode twice"),
        ("loss +0.1, error +0.1", "both loss and error"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused_with_a_fix(text: str, says: str) -> None:
    with pytest.raises(PlanningError) as refused:
        parse_target(text)
    assert says in str(refused.value)
    assert refused.value.remedy


def test_no_target_is_refused_and_the_same_one_counts_once() -> None:
    with refused(PlanningError, code="missing"):
        parse_targets([])
    assert len(parse_targets(["decode 1.5x", "decode 1.50x", "loss +0.1"])) == 2


@given(st.text(max_size=20))
def test_any_text_is_a_target_or_a_planning_error(text: str) -> None:
    try:
        parse_target(text)
    except PlanningError:
        return
    assert any(word in text.lower() for word in ("decode", "prefill", "train", "memory", "loss", "error"))
