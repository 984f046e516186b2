"""The Triton kernels of `chosen_rows`; importing this file needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_products(x, places, rows, z, blocks, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """z[t, b] = Σ_c x[t, c] rows[places[t, b], c] for the token t and a tile of b that the program's place in the grid says."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    there = block < blocks
    row = tl.load(places + token * blocks + block, mask=there, other=0)
    total = tl.zeros((TILE_ROWS,), dtype=tl.float32)
    for start in range(0, width, TILE_COLUMNS):
        column = start + tl.arange(0, TILE_COLUMNS)
        inside = column < width
        values = tl.load(x + token * width + column, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(rows + row[:, None] * width + column[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
    tl.store(z + token * blocks + block, total.to(z.dtype.element_ty), mask=there)


@triton.jit
def tile_sums(  # type: ignore[no-untyped-def]
    h, places, rows, y, blocks, width, tokens, each, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """y[p, t, c] = Σ_b h[t, b] rows[places[t, b], c] over the `each` blocks b of part p, for a tile of columns c."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < width
    total = tl.zeros((TILE_COLUMNS,), dtype=tl.float32)
    for start in range(part * each, part * each + each, TILE_ROWS):
        block = start + tl.arange(0, TILE_ROWS)
        there = block < blocks
        row = tl.load(places + token * blocks + block, mask=there, other=0)
        weight = tl.load(h + token * blocks + block, mask=there, other=0.0).to(tl.float32)
        tile = tl.load(rows + row[:, None] * width + column[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32) * weight[:, None], axis=0)
    tl.store(y + (part * tokens + token) * width + column, total, mask=inside)
