"""Numbers in fixed point, against Python's own whole numbers and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retrofit.passes.reversible.reversible_layer import (
    LARGEST,
    following,
    low_bits,
    not_a_number_where,
    preceding,
    to_fixed,
    to_float,
    unpacked,
)

whole = st.integers(-(2**60), 2**60)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9))
def test_a_number_is_the_nearest_whole_number_of_steps(values: list[float]) -> None:
    fixed = to_fixed(torch.tensor(values))
    assert fixed.tolist() == [round(Fraction(value) * 2**32) for value in values]
    assert [Fraction(one) for one in to_float(fixed, torch.float64).tolist()] == [Fraction(one, 2**32) for one in fixed.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_a_type_come_back_where_its_digits_are_no_finer_than_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x[x.abs() > 2**-6]
    assert torch.equal(to_float(to_fixed(x), dtype), x)


def test_what_cannot_be_represented_is_no_number_afterwards() -> None:
    x = torch.tensor([1.0, math.inf, -math.inf, math.nan, 2 * LARGEST, LARGEST])
    found = not_a_number_where(x, to_float(to_fixed(x), torch.float32))
    assert found.isnan().tolist() == [False, True, True, True, True, False]
    assert float(found[-1]) == LARGEST


@given(st.lists(whole, min_size=1, max_size=20), st.integers(1, 16))
def test_low_bits_are_packed_and_unpacked(values: list[int], bits: int) -> None:
    x = torch.tensor(values).view(1, -1)
    packed = low_bits(x, bits)
    assert packed.shape == (bits, -(-len(values) // 8)) and packed.dtype == torch.uint8
    assert unpacked(packed, x).flatten().tolist() == [value % 2**bits for value in values]


def step(previous: int, current: int, y: int, sign: int, bits: int) -> int:
    return y + sign * ((y - 2 * current) // 2**bits + previous // 2**bits)


@given(st.tuples(whole, whole, whole), st.sampled_from([-1, 1]), st.integers(1, 16))
def test_a_step_is_undone_exactly(numbers: tuple[int, int, int], sign: int, bits: int) -> None:
    previous, current, y = (torch.tensor([[one]]) for one in numbers)
    signs = torch.tensor([[sign]])
    after = following(y, current, previous, signs, bits)
    assert [int(after)] == [step(*numbers[:2], numbers[2], sign, bits)]
    low = unpacked(low_bits(previous, bits), previous)
    back: Tensor = preceding(after, y, current, signs, bits, low)
    assert torch.equal(back, previous)
