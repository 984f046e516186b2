"""Products with rows given by index, and the choice of units, against loops.

The Triton kernels run in its interpreter and are built for absent GPUs.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrofit.passes.sparse_ffn import indexed_rows, unit_choice

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def random_operands(
    tokens: int, blocks: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + 10 * blocks + 1000 * width)
    x, h = torch.randn(tokens, width, generator=generator), torch.randn(tokens, blocks, generator=generator)
    rows, indices = (
        torch.randn(2 * blocks, width, generator=generator),
        torch.randint(2 * blocks, (tokens, blocks), generator=generator),
    )
    return x.to(dtype), h.to(dtype), rows.to(dtype), indices


def products(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    found = [[float(x[t].double() @ rows[p].double()) for p in row] for t, row in enumerate(indices.tolist())]
    return torch.tensor(found, dtype=torch.float64)


def sums(h: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    y = torch.zeros(len(h), rows.shape[1], dtype=torch.float64)
    for t, row in enumerate(indices.tolist()):
        for b, p in enumerate(row):
            y[t] += h[t, b].double() * rows[p].double()
    return y


@given(
    tokens=st.integers(1, 4), blocks=st.integers(1, 40), width=st.integers(1, 70), copied=st.sampled_from([0, indexed_rows.SMALL])
)
@settings(deadline=None)
def test_torch_operations_compute_the_formulas(tokens: int, blocks: int, width: int, copied: int) -> None:
    x, h, rows, indices = random_operands(tokens, blocks, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_rows, "SMALL", copied)
        z = indexed_rows.indexed_products(x, indices, rows)
    torch.testing.assert_close(z, products(x, indices, rows).float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(indexed_rows.indexed_sums(h, indices, rows), sums(h, indices, rows).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [2048, 2050, 3072, 5120])
def test_long_rows_are_summed_in_pieces(width: int) -> None:
    _, h, rows, indices = random_operands(1, 5, width)
    torch.testing.assert_close(indexed_rows.indexed_sums(h, indices, rows), sums(h, indices, rows).float(), atol=1e-5, rtol=1e-5)


def test_no_kernel_chooses_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose comparisons are exact: a choice by float32 logits would be another one now and then."""
    monkeypatch.setattr(unit_choice, "reads_tiles", lambda *operands: True)
    x = torch.randn(1, 4)
    assert unit_choice.chooses_in_kernel(8, 4, x) and not unit_choice.chooses_in_kernel(8, 4, x.double())
    assert unit_choice.chooses_in_kernel(100, 1, x) and not unit_choice.chooses_in_kernel(100, 2, x)  # it compares each with each


@needs_triton
def test_kernels_compute_the_formulas() -> None:
    run_apart("interpreted", {"TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_are_built_for(capability: int) -> None:
    run_apart(f"built {capability}", {})


def run_apart(what: str, environment: dict[str, str]) -> None:
    """In a process of its own: Triton reads its settings as it is imported."""
    command = [sys.executable, __file__, *what.split()]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr and "triton/runtime/interpreter.py" in done.stderr:
        pytest.skip("the interpreter of this version of Triton does not run with numpy 2.4")
    assert done.returncode == 0, done.stderr
    assert "all as they should be" in done.stdout


def interpreted() -> None:
    for (tokens, blocks, width), (dtype, near) in itertools.product(
        [(1, 7, 40), (3, 33, 300), (2, 64, 513), (1, 200, 40)], DTYPES.items()
    ):
        x, h, rows, indices = random_operands(tokens, blocks, width, dtype)
        for bias in (None, torch.randn(2 * blocks).to(dtype)):
            z = indexed_rows.tiled_products(x, indices, rows, bias)
            expected = products(x, indices, rows) + (0.0 if bias is None else bias.double()[indices])
            assert z.dtype == dtype and relative(z, expected) < near
        for places, bias in ((indices, None), (indices, torch.randn(width).to(dtype)), (None, None)):
            parts = indexed_rows.tiled_sums(h, places, rows)
            y = indexed_rows.added_parts(parts, bias, dtype)
            every = torch.arange(blocks).expand(tokens, blocks) if places is None else places
            total = sums(h, every, rows) + (0.0 if bias is None else bias.double())
            assert y.dtype == dtype and relative(y, total) < near
    assert len(parts) > 1
    for tokens, n, k in ((1, 8, 4), (3, 8, 1), (2, 6, 2), (1, 64, 1), (2, 64, 3), (1, 100, 1)):
        chosen(tokens, n, k)


def chosen(tokens: int, n: int, k: int) -> None:
    """The kernel chooses as a stable sort of the logits does: of equal ones the first, and what is not a number before all."""
    units, width, rank = 3 * n, 70, 5
    x, c1, c2, bias = (torch.randn(*size) for size in ((tokens, width), (width, rank), (rank, units), (units,)))
    logits = ((x.double() @ c1.double()) @ c2.double() + bias.double()).view(tokens, 3, n)
    same(lambda mask: unit_choice.chosen_units(x, c1, c2, bias, n, k, mask), logits, k)
    coarse = logits.float().round()  # many are equal
    coarse[0, 0, n - 1] = torch.nan
    same(lambda mask: unit_choice.chosen_of(coarse.flatten(1), n, k, mask), coarse, k)


def same(choose: Callable[[torch.dtype | None], Tensor], logits: Tensor, k: int) -> None:
    n = logits.shape[-1]
    order = logits.nan_to_num(nan=torch.inf).argsort(dim=-1, descending=True, stable=True)[..., :k]
    expected = order + torch.arange(0, 3 * n, n).unsqueeze(1)
    assert torch.equal(choose(None).view(expected.shape), expected)
    for dtype in (torch.float32, torch.bfloat16):
        mask = choose(dtype)
        assert mask.dtype == dtype
        assert torch.equal(mask.view(logits.shape).double(), torch.zeros_like(logits).scatter(-1, order, 1.0).double())


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def built(capability: int) -> None:
    """Every kernel in every dtype, with the constants of a small call of each kind."""
    from retrofit.passes.sparse_ffn import triton_kernels as kernels

    height, columns, _ = indexed_rows.PRODUCTS
    tile = {"TILE_ROWS": height, "TILE_COLUMNS": columns}
    totals = dict(zip(("TILE_PARTS", "TILE_COLUMNS"), indexed_rows.TOTALS, strict=True))
    for dtype, flag in itertools.product(("fp64", "fp32", "bf16", "fp16"), (False, True)):
        wide = {"DOUBLE": dtype == "fp64"}
        build(kernels.tile_products, dtype, {**tile, **wide, "BIASED": flag}, capability)
        build(kernels.tile_sums, dtype, {**tile, **wide, "INDEXED": flag}, capability)
        build(kernels.tile_totals, dtype, {**totals, **wide, "BIASED": flag}, capability)
        for n, k in ((8, 4), (64, 1)):
            of = {"K": k, "PADDED": n, "TILE_BLOCKS": 64 // n, "TILE_RANK": unit_choice.CHOICE[1], "GIVEN": flag, "MASK": flag}
            build(kernels.tile_choice, dtype, of, capability)


def build(kernel: Any, dtype: str, constants: dict[str, Any], capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    summed = "*fp64" if constants.get("DOUBLE") else "*fp32"
    kinds = {"indices": "*i64", "parts": summed, "low": summed}
    pointers = {**dict.fromkeys(("x", "h", "rows", "bias", "z", "c2", "out"), f"*{dtype}"), **kinds, "y": f"*{dtype}"}
    if "MASK" in constants:
        pointers |= {"out": f"*{dtype}" if constants["MASK"] else "*i64"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    built(int(sys.argv[2])) if sys.argv[1] == "built" else interpreted()
    print("all as they should be")
