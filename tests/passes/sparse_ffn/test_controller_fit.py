"""The fit of the controller: its regression against least squares on many draws, its blocks against all partitions."""

from __future__ import annotations

import itertools

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrofit.passes.sparse_ffn.controller_fit import (
    ContributionMoments,
    Controller,
    balanced_partition,
    exchange_vertices,
    round_robin,
    weight_inside,
)

D, UNITS, N = 6, 12, 4


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_regression_goes_through_the_means(rank: int) -> None:
    """At the mean of x the logits are the units' mean contributions, less their block's, times one number."""
    generator = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(500, D, generator=generator)
    c = torch.randn(UNITS, generator=generator) + x @ torch.randn(D, UNITS, generator=generator)
    centred_x, centred_c = x - x.mean(0), c - c.mean(0)
    moments = ContributionMoments(x.mean(0), c.mean(0), centred_x.T @ centred_x / len(x), centred_x.T @ centred_c / len(x))
    logits = Controller.fit(moments, torch.arange(UNITS), N, rank)(x.mean(0, keepdim=True))[0].view(-1, N)
    means = c.mean(0).view(-1, N)
    expected = (means - means.mean(1, keepdim=True)).flatten()
    found = (logits - logits.mean(1, keepdim=True)).flatten()
    scale = float(found @ expected / (expected @ expected))
    assert scale > 0
    torch.testing.assert_close(found, scale * expected, rtol=1e-3, atol=1e-3 * float(found.abs().max()))


def graph(n: int, seed: int, rank: int = 3) -> Tensor:
    """How much n units with a few common causes fire together."""
    generator = torch.Generator().manual_seed(seed)
    fires = (torch.randn(50, rank, generator=generator) @ torch.randn(rank, n, generator=generator)).relu()
    return fires.t() @ fires


def inside(weights: Tensor, blocks: list[list[int]]) -> float:
    return sum(float(weights[u, v]) for block in blocks for u in block for v in block if u != v)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 1000))
def test_it_is_a_partition_and_no_worse_than_the_order_or_chance(size: int, count: int, seed: int) -> None:
    weights = graph(size * count, seed)
    blocks = balanced_partition(weights, size)
    assert sorted(blocks.flatten().tolist()) == list(range(size * count)) and blocks.shape == (count, size)
    assert all(block == sorted(block) for block in blocks.tolist())
    assert inside(weights, blocks.tolist()) == pytest.approx(weight_inside(weights, blocks), rel=1e-4, abs=1e-4)
    chance = torch.randperm(size * count, generator=torch.Generator().manual_seed(seed)).view(count, size)
    assert weight_inside(weights, blocks) <= 1.05 * weight_inside(weights, chance) + 1e-4
    assert torch.equal(blocks, balanced_partition(weights, size))


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_best_of_all_bisections_or_one_hardly_worse(seed: int) -> None:
    weights = graph(10, seed)
    halves = [list(half) for half in itertools.combinations(range(10), 5) if 0 in half]
    best = min(inside(weights, [half, [u for u in range(10) if u not in half]]) for half in halves)
    assert weight_inside(weights, balanced_partition(weights, 5)) <= 1.02 * best


@pytest.mark.parametrize("seed", range(3))
def test_it_is_as_good_as_networkx_on_two_blocks(seed: int) -> None:
    weights = graph(60, seed, rank=6)
    halves = networkx.community.kernighan_lin_bisection(networkx.from_numpy_array(-weights.numpy()), seed=0)
    assert weight_inside(weights, balanced_partition(weights, 30)) <= 1.01 * inside(weights, [list(half) for half in halves])


def test_groups_that_always_fire_together_are_spread() -> None:
    weights = torch.kron(torch.eye(4), torch.ones(6, 6))  # four groups of six
    blocks = balanced_partition(weights, 4)
    assert all(sorted(unit // 6 for unit in block) == [0, 1, 2, 3] for block in blocks.tolist())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 1000))
def test_an_exchange_takes_weight_away_until_no_swap_does(size: int, seed: int) -> None:
    weights = graph(2 * size, seed)
    blocks = torch.arange(2 * size).view(2, size).clone()
    before = inside(weights, blocks.tolist())
    exchange_vertices(weights, blocks, torch.tensor([0]), torch.tensor([1]))
    after = inside(weights, blocks.tolist())
    assert after <= before + 1e-3
    if after < before - 1e-3 or size == 1:
        return
    left, right = blocks.tolist()
    for i, j in itertools.product(range(size), repeat=2):  # nothing was exchanged: nothing was worth it
        swapped = [[*left[:i], right[j], *left[i + 1 :]], [*right[:j], left[i], *right[j + 1 :]]]
        assert inside(weights, swapped) >= after - 1e-2


@pytest.mark.parametrize("count", [2, 3, 8, 9])
def test_in_a_tournament_everyone_meets_everyone_once(count: int) -> None:
    met = []
    for left, right in round_robin(count, torch.device("cpu")):
        players = torch.cat([left, right]).tolist()
        assert len(set(players)) == len(players)
        met += [frozenset(pair) for pair in zip(left.tolist(), right.tolist(), strict=True)]
    assert sorted(map(sorted, met)) == [list(pair) for pair in itertools.combinations(range(count), 2)]


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="10 vertices"):
        balanced_partition(torch.ones(10, 10), 4)
