"""The Triton kernels of `indexed_rows`; importing this file needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_products(x, indices, rows, z, blocks, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """z[t, b] = Σ_c x[t, c] rows[indices[t, b], c] for one token t and one tile of b, given by the program's ids."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    valid = block < blocks
    row = tl.load(indices + token * blocks + block, mask=valid, other=0)
    total = tl.zeros((TILE_ROWS,), dtype=tl.float32)
    for start in range(0, width, TILE_COLUMNS):
        column = start + tl.arange(0, TILE_COLUMNS)
        inside = column < width
        values = tl.load(x + token * width + column, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(rows + row[:, None] * width + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
    tl.store(z + token * blocks + block, total.to(z.dtype.element_ty), mask=valid)


@triton.jit
def tile_sums(  # type: ignore[no-untyped-def]
    h, indices, rows, y, blocks, width, tokens, each, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """y[p, t, c] = Σ_b h[t, b] rows[indices[t, b], c] over the `each` blocks b of part p, for a tile of columns c."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < width
    total = tl.zeros((TILE_COLUMNS,), dtype=tl.float32)
    for start in range(part * each, part * each + each, TILE_ROWS):
        block = start + tl.arange(0, TILE_ROWS)
        valid = block < blocks
        row = tl.load(indices + token * blocks + block, mask=valid, other=0)
        weight = tl.load(h + token * blocks + block, mask=valid, other=0.0).to(tl.float32)
        tile = tl.load(rows + row[:, None] * width + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32) * weight[:, None], axis=0)
    tl.store(y + (part * tokens + token) * width + column, total, mask=inside)
