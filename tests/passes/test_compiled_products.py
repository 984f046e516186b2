"""Compiled products of few tokens against those in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrofit.passes.compiled_products import products_of_matrices, sums_of_columns

CLOSE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
DTYPES = pytest.mark.parametrize("dtype", list(CLOSE), ids=["float32", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sums_of_columns_of_any_width_in_any_number_of_threads(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that are no multiples of the columns, or numbers, that are added at a time, and an input that is a part of another."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for count, width, outputs in ((1, 77, 99), (2, 16, 3), (3, 8, 16), (4, 41, 65)):
        x = torch.randn(count, 2 * width).to(dtype)[:, ::2]
        columns, threshold = torch.randn(width, outputs).to(dtype), torch.tensor(0.7, dtype=dtype)
        expected = x.double().masked_fill(x.abs() < threshold, 0.0) @ columns.double()
        torch.testing.assert_close(sums_of_columns(x, columns, threshold), expected.to(dtype), **CLOSE[dtype])


@DTYPES
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    matrices=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    threads=st.sampled_from([1, 2, 5]),
    has_bias=st.booleans(),
    is_one_row=st.booleans(),
    has_gates=st.booleans(),
)
def test_products_of_some_of_the_matrices(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    matrices: list[int],
    threads: int,
    has_bias: bool,
    is_one_row: bool,
    has_gates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    outputs, inputs = sizes
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(5, outputs, inputs, generator=draw).to(dtype)
    bias = torch.randn(5, outputs, generator=draw).to(dtype) if has_bias else None
    rows = torch.randn(len(matrices), 2 * inputs, generator=draw).to(dtype)[:, ::2]
    gates = torch.rand(len(matrices), generator=draw).tolist() if has_gates else None
    given_rows = rows[0] if is_one_row else rows
    expected = torch.stack([weight[e].double() @ rows[0 if is_one_row else k].double() for k, e in enumerate(matrices)])
    expected = expected if bias is None else expected + bias.double()[matrices]
    expected = expected if gates is None else torch.tensor(gates).double() @ expected
    found = products_of_matrices(given_rows, weight, bias, matrices, gates)
    assert found is not None
    torch.testing.assert_close(found, expected.to(dtype), **{**CLOSE[dtype], "atol": 10 * CLOSE[dtype]["atol"]})
