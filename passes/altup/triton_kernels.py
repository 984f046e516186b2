"""The Triton kernels of `stream_kernel.py`: AltUp's predict and correct in one pass over the stream; importing this needs Triton.

    out^r = Σ_c a[r,c] x^c + b[r] y        a = W (P − g p_jᵀ) E, b = W g

W [R, K] moves or combines the K blocks: out^r is block r + SHIFT, or, if COMBINED, the combination by row r of `rows`. E is the
identity, or a column of ones if the stream enters d wide (EXPAND). C blocks enter and R leave. Sums are float32, or float64 for
float64 operands, in a fixed order, y last: coefficients 0, 1 and −1 give exact results.

Sums over tokens have two stages: each program of `stream_gradient` writes its part, `stream_totals` adds the parts and converts the
gradients of a and b to those of P and g. There are no atomic additions: the same operands give the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factor(p, g, i, c, J: tl.constexpr, K: tl.constexpr, EXPAND: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (P − g p_jᵀ)[i, c]; with EXPAND the sum of row i."""
    weight = tl.load(g + i).to(wide)
    if EXPAND:
        total = tl.load(p + i * K).to(wide) - weight * tl.load(p + J * K).to(wide)
        for m in tl.static_range(1, K):
            total += tl.load(p + i * K + m).to(wide) - weight * tl.load(p + J * K + m).to(wide)
    else:
        total = tl.load(p + i * K + c).to(wide) - weight * tl.load(p + J * K + c).to(wide)
    return total


@triton.jit
def coefficient(  # type: ignore[no-untyped-def]
    p,
    g,
    rows,
    r,
    c,
    J: tl.constexpr,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    COMBINED: tl.constexpr,
    EXPAND: tl.constexpr,
    wide: tl.constexpr,
):
    """Return a[r, c]."""
    if COMBINED:
        total = tl.load(rows + r * K).to(wide) * factor(p, g, 0, c, J, K, EXPAND, wide)
        for i in tl.static_range(1, K):
            total += tl.load(rows + r * K + i).to(wide) * factor(p, g, i, c, J, K, EXPAND, wide)
    else:
        total = factor(p, g, (r + SHIFT) % K, c, J, K, EXPAND, wide)
    return total


@triton.jit
def weight_of_y(g, rows, r, K: tl.constexpr, SHIFT: tl.constexpr, COMBINED: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return b[r]."""
    if COMBINED:
        total = tl.load(rows + r * K).to(wide) * tl.load(g).to(wide)
        for i in tl.static_range(1, K):
            total += tl.load(rows + r * K + i).to(wide) * tl.load(g + i).to(wide)
    else:
        total = tl.load(g + (r + SHIFT) % K).to(wide)
    return total


@triton.jit
def stream_forward(  # type: ignore[no-untyped-def]
    x,
    y,
    p,
    g,
    rows,
    out,
    tokens,
    width,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    SHIFT: tl.constexpr,
    EXPAND: tl.constexpr,
    COMBINED: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute out[t, r] = Σ_c a[r, c] x[t, c] + b[r] y[t] for a tile of tokens t and of the columns of each block."""
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = (tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    inside = (token < tokens) & (column < width)
    own = tl.load(y + token * width + column, mask=inside, other=0.0).to(wide)
    for r in tl.static_range(R):
        block = tl.load(x + token * (C * width) + column, mask=inside, other=0.0).to(wide)
        total = block * coefficient(p, g, rows, r, 0, J, K, SHIFT, COMBINED, EXPAND, wide)
        for c in tl.static_range(1, C):
            block = tl.load(x + token * (C * width) + c * width + column, mask=inside, other=0.0).to(wide)
            total += block * coefficient(p, g, rows, r, c, J, K, SHIFT, COMBINED, EXPAND, wide)
        total += own * weight_of_y(g, rows, r, K, SHIFT, COMBINED, wide)
        tl.store(out + token * (R * width) + r * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def stream_gradient(  # type: ignore[no-untyped-def]
    grad,
    x,
    y,
    p,
    g,
    rows,
    grad_x,
    grad_y,
    parts,
    tokens,
    width,
    each,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    SHIFT: tl.constexpr,
    EXPAND: tl.constexpr,
    COMBINED: tl.constexpr,
    DOUBLE: tl.constexpr,
    SUMS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Compute the gradients of x and y for `each` tokens and a tile of columns, and with SUMS their part of the sums over tokens.

    parts[q, r (C + 1) + c] = Σ grad[t, r] x[t, c] and parts[q, r (C + 1) + C] = Σ grad[t, r] y[t]; q is the program's number.
    """
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    first = tl.program_id(0) * each
    column = (tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    entry = tl.arange(0, PADDED)
    sums = tl.zeros((PADDED,), dtype=wide)
    for start in range(first, first + each, TILE_TOKENS):
        token = (start + tl.arange(0, TILE_TOKENS)).to(tl.int64)[:, None]
        inside = (token < tokens) & (column < width)
        for c in tl.static_range(C):
            total = tl.zeros((TILE_TOKENS, TILE_COLUMNS), dtype=wide)
            for r in tl.static_range(R):
                of_out = tl.load(grad + token * (R * width) + r * width + column, mask=inside, other=0.0).to(wide)
                total += of_out * coefficient(p, g, rows, r, c, J, K, SHIFT, COMBINED, EXPAND, wide)
                if SUMS:
                    block = tl.load(x + token * (C * width) + c * width + column, mask=inside, other=0.0).to(wide)
                    sums += tl.where(entry == r * (C + 1) + c, tl.sum(of_out * block), 0.0)
            tl.store(grad_x + token * (C * width) + c * width + column, total.to(grad_x.dtype.element_ty), mask=inside)
        total = tl.zeros((TILE_TOKENS, TILE_COLUMNS), dtype=wide)
        for r in tl.static_range(R):
            of_out = tl.load(grad + token * (R * width) + r * width + column, mask=inside, other=0.0).to(wide)
            total += of_out * weight_of_y(g, rows, r, K, SHIFT, COMBINED, wide)
            if SUMS:
                own = tl.load(y + token * width + column, mask=inside, other=0.0).to(wide)
                sums += tl.where(entry == r * (C + 1) + C, tl.sum(of_out * own), 0.0)
        tl.store(grad_y + token * width + column, total.to(grad_y.dtype.element_ty), mask=inside)
    if SUMS:
        place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(parts + place * PADDED + entry, sums)


@triton.jit
def stream_totals(  # type: ignore[no-untyped-def]
    parts,
    p,
    g,
    rows,
    grad_p,
    grad_g,
    count,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    SHIFT: tl.constexpr,
    EXPAND: tl.constexpr,
    COMBINED: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Compute the gradients of P and g from `count` parts. SIDE is a power of two ≥ K + 1."""
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    side = tl.arange(0, SIDE)
    row, entry = side[:, None], side[None, :]
    known = (row < R) & (entry < C + 1)
    sums = tl.zeros((SIDE, SIDE), dtype=wide)  # (R, C + 1)
    for start in range(0, count, TILE_PARTS):
        part = start + tl.arange(0, TILE_PARTS)[:, None, None]
        place = part * PADDED + (row * (C + 1) + entry)[None, :, :]
        sums += tl.sum(tl.load(parts + place, mask=(part < count) & known[None, :, :], other=0.0), axis=0)
    # W' sums: of (P − g p_jᵀ) E and of g, (K, C + 1)
    if COMBINED:
        placed = tl.load(rows + row * K + entry, mask=(row < R) & (entry < K), other=0.0).to(wide)  # (R, K)
    else:
        placed = tl.where((row < R) & ((row + SHIFT) % K == entry), 1.0, 0.0).to(wide)
    inner = tl.sum(placed[:, :, None] * sums[:, None, :], axis=0)
    of_y = tl.sum(tl.where(entry == C, inner, 0.0), axis=1)  # (K)
    if EXPAND:  # one block for all
        inner = tl.sum(tl.where(entry == 0, inner, 0.0), axis=1)[:, None] + tl.zeros((SIDE, SIDE), dtype=wide)
    of_block = tl.where((row < K) & (entry < K), inner, 0.0)
    weight = tl.load(g + side, mask=side < K, other=0.0).to(wide)
    active = tl.load(p + J * K + side, mask=side < K, other=0.0).to(wide)
    through = tl.sum(weight[:, None] * of_block, axis=0)  # the part of p_j's gradient from g p_jᵀ
    of_p = of_block - tl.where(row == J, through[None, :], 0.0)
    of_g = of_y - tl.sum(of_block * active[None, :], axis=1)
    tl.store(grad_p + row * K + entry, of_p.to(grad_p.dtype.element_ty), mask=(row < K) & (entry < K))
    tl.store(grad_g + side, of_g.to(grad_g.dtype.element_ty), mask=side < K)
