"""What chance may do to random starts is no fault, and what it does not do is one."""

from __future__ import annotations

import pytest
import torch

from retrofit.pipeline.method_reference import may_be_chance


@pytest.mark.parametrize("count", [24, 48, 1000, 100_000])
def test_the_spread_of_normal_numbers_is_within_what_chance_does(count: int) -> None:
    draws = max(200, min(100_000, 20_000_000 // count))
    spreads = torch.randn(draws, count, generator=torch.Generator().manual_seed(count)).std(1)
    assert all(may_be_chance(one, count) for one in (float(spreads.min()), float(spreads.max())))
    assert not may_be_chance(2.0, count) and not may_be_chance(0.1, count)


def test_many_numbers_show_a_spread_that_is_a_tenth_too_large() -> None:
    assert may_be_chance(1.1, 1000) and not may_be_chance(1.1, 2000) and not may_be_chance(1.06, 10**6)
