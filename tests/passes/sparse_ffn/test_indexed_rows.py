"""Products with rows given by index against loops; the Triton kernels run in its interpreter and are built for absent GPUs."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrofit.passes.sparse_ffn import indexed_rows

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
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
    return torch.tensor([[float(x[t].double() @ rows[p].double()) for p in row] for t, row in enumerate(indices.tolist())])


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
    torch.testing.assert_close(z, products(x, indices, rows), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(indexed_rows.indexed_sums(h, indices, rows), sums(h, indices, rows).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [2048, 2050, 3072, 5120])
def test_long_rows_are_summed_in_pieces(width: int) -> None:
    _, h, rows, indices = random_operands(1, 5, width)
    torch.testing.assert_close(indexed_rows.indexed_sums(h, indices, rows), sums(h, indices, rows).float(), atol=1e-5, rtol=1e-5)


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
    for (tokens, blocks, width), (dtype, near) in itertools.product([(1, 7, 40), (3, 33, 300), (2, 64, 513)], DTYPES.items()):
        x, h, rows, indices = random_operands(tokens, blocks, width, dtype)
        z, y = indexed_rows.tiled_products(x, indices, rows), indexed_rows.tiled_sums(h, indices, rows)
        assert z.dtype == y.dtype == dtype
        expected = products(x, indices, rows)
        torch.testing.assert_close(z.float(), expected, atol=near * float(expected.abs().max()), rtol=0)
        total = sums(h, indices, rows).float()
        torch.testing.assert_close(y.float(), total, atol=near * float(total.abs().max()), rtol=0)


def built(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from retrofit.passes.sparse_ffn.triton_kernels import tile_products, tile_sums

    constants = {"TILE_ROWS": indexed_rows.TILE_ROWS, "TILE_COLUMNS": indexed_rows.TILE_COLUMNS}
    for kernel, kind in itertools.product((tile_products, tile_sums), ("*fp32", "*bf16", "*fp16")):
        pointers = {"x": kind, "h": kind, "rows": kind, "z": kind, "y": "*fp32", "indices": "*i64"}
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    built(int(sys.argv[2])) if sys.argv[1] == "built" else interpreted()
    print("all as they should be")
