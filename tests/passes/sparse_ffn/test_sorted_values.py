"""Values sorted by a network of comparisons, against torch's own sort."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrofit.passes.sparse_ffn.sorted_values import LONGEST, comparisons, descending


@pytest.mark.parametrize("n", range(1, 14))
def test_the_network_sorts_all_zeros_and_ones_and_so_everything(n: int) -> None:
    """Knuth's zero-one principle."""
    rows = torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)))
    assert torch.equal(descending(rows), rows.sort(dim=1, descending=True).values.t())


@given(st.integers(1, LONGEST["cpu"] + 3), st.integers(0, 99))
def test_it_sorts_rows_of_any_length_and_shape(n: int, seed: int) -> None:
    values = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    assert torch.equal(descending(values), values.sort(dim=-1, descending=True).values.movedim(-1, 0))
    assert torch.equal(descending(values, 0), values.sort(dim=0, descending=True).values)


def test_it_makes_as_few_comparisons_as_batcher_s_network() -> None:
    """(p² − p + 4) 2^(p−2) − 1 for n = 2^p."""
    assert [len(comparisons(2**p)) for p in range(1, 7)] == [(p * p - p + 4) * 2**p // 4 - 1 for p in range(1, 7)]
