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
    counts=st.tuples(st.integers(1, 11), st.integers(1, 3)),
    threads=st.sampled_from([1, 2, 5]),
    has_bias=st.booleans(),
)
def test_products_of_some_of_the_matrices(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    counts: tuple[int, int],
    threads: int,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    (outputs, inputs), (tokens, each) = sizes, counts
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(5, outputs, inputs, generator=draw).to(dtype)
    bias = torch.randn(5, outputs, generator=draw).to(dtype) if has_bias else None
    chosen = torch.randint(5, (tokens, each), generator=draw)
    x = torch.randn(tokens, each, 2 * inputs, generator=draw).to(dtype)[:, :, ::2]
    gates = torch.randn(tokens, each, generator=draw)
    expected = torch.einsum("tkoi,tki->tko", weight[chosen].double(), x.double())
    expected = expected if bias is None else expected + bias[chosen].double()
    close = {"rtol": CLOSE[dtype]["rtol"], "atol": CLOSE[dtype]["atol"] * 10}
    summed = products_of_matrices(x.flatten(0, 1), weight, bias, chosen, gates)
    torch.testing.assert_close(summed, (expected * gates.unsqueeze(-1)).sum(1).to(dtype), **close)
    of_first = torch.einsum("tkoi,ti->tko", weight[chosen].double(), x[:, 0].double())
    of_first = of_first if bias is None else of_first + bias[chosen].double()
    found = products_of_matrices(x[:, 0], weight, bias, chosen)
    torch.testing.assert_close(found, of_first.flatten(0, 1).to(dtype), **close)
