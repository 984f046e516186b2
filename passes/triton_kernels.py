"""The Triton kernels of `indexed_rows` and of sparse-ffn's `unit_choice`; importing this file needs Triton.

A program keeps one sum for each element of its tile and reduces them once, at the end: the amount that it reads at a time limits
its speed. Sums are float32, or float64 for float64 operands.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_products(  # type: ignore[no-untyped-def]
    x,
    indices,
    rows,
    bias,
    z,
    blocks,
    width,
    BIASED: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute z[t, b] = Σ_c x[t, c] rows[i, c] + bias[i], i = indices[t, b], for one token t and a tile of blocks b."""
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    valid = block < blocks
    row = tl.load(indices + token * blocks + block, mask=valid, other=0)
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=wide)
    for start in range(0, width, TILE_COLUMNS):
        column = start + tl.arange(0, TILE_COLUMNS)
        inside = column < width
        values = tl.load(x + token * width + column, mask=inside, other=0.0).to(wide)
        tile = tl.load(rows + row[:, None] * width + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        sums += tile.to(wide) * values[None, :]
    total = tl.sum(sums, axis=1)
    if BIASED:
        total += tl.load(bias + row, mask=valid, other=0.0).to(wide)
    tl.store(z + token * blocks + block, total.to(z.dtype.element_ty), mask=valid)


@triton.jit
def tile_sums(  # type: ignore[no-untyped-def]
    h,
    indices,
    rows,
    y,
    least,
    blocks,
    width,
    tokens,
    each,
    INDEXED: tl.constexpr,
    MASKED: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute y[p, t, c] = Σ_b h[t, b] rows[i, c] over the blocks b of part p, for a tile of columns c; i = indices[t, b] or b.

    MASKED: only over blocks with |h[t, b]| ≥ `least`; no other rows are read.
    """
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < width
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=wide)
    for start in range(part * each, part * each + each, TILE_ROWS):
        block = start + tl.arange(0, TILE_ROWS)
        valid = block < blocks
        row = tl.load(indices + token * blocks + block, mask=valid, other=0) if INDEXED else block.to(tl.int64)
        weight = tl.load(h + token * blocks + block, mask=valid, other=0.0).to(wide)
        if MASKED:
            is_small = tl.abs(weight) < tl.load(least).to(wide)
            valid, weight = valid & ~is_small, tl.where(is_small, 0.0, weight)
        tile = tl.load(rows + row[:, None] * width + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        sums += tile.to(wide) * weight[:, None]
    tl.store(y + (part * tokens + token) * width + column, tl.sum(sums, axis=0), mask=inside)


@triton.jit
def tile_totals(  # type: ignore[no-untyped-def]
    parts,
    bias,
    y,
    count,
    tokens,
    width,
    BIASED: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute y[t, c] = Σ_p parts[p, t, c] + bias[c] over `count` parts, for one token t and a tile of columns c."""
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < width
    sums = tl.zeros((TILE_PARTS, TILE_COLUMNS), dtype=wide)
    for start in range(0, count, TILE_PARTS):
        part = start + tl.arange(0, TILE_PARTS)
        place = (part[:, None] * tokens + token) * width + column[None, :]
        sums += tl.load(parts + place, mask=(part < count)[:, None] & inside[None, :], other=0.0)
    total = tl.sum(sums, axis=0)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(wide)
    tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=inside)


# ── The units of sparse-ffn ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def tile_choice(  # type: ignore[no-untyped-def]
    low,
    c2,
    bias,
    out,
    rank,
    blocks,
    n,
    GIVEN: tl.constexpr,
    MASK: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_RANK: tl.constexpr,
):
    """Choose the K largest of the n logits in each block of a tile for one token t, largest first, the first of equal ones.

    The logits are Σ_r low[t, r] c2[r, u] + bias[u], or low[t, u] if they are given. `out` receives their indices u, K a block, or 1
    at them and 0 elsewhere. NaN counts as the largest. PADDED is a power of two, at least n.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE_BLOCKS * PADDED)
    block = tl.program_id(1) * TILE_BLOCKS + place // PADDED
    unit = block * n + place % PADDED
    valid = (block < blocks) & (place % PADDED < n)
    if GIVEN:
        logits = tl.load(low + token * blocks * n + unit, mask=valid, other=0.0).to(tl.float32)
    else:
        sums = tl.zeros((TILE_RANK, TILE_BLOCKS * PADDED), dtype=tl.float32)
        for start in range(0, rank, TILE_RANK):
            row = start + tl.arange(0, TILE_RANK)
            inside = row < rank
            value = tl.load(low + token * rank + row, mask=inside, other=0.0)
            tile = tl.load(
                c2 + row[:, None].to(tl.int64) * (blocks * n) + unit[None, :], mask=inside[:, None] & valid[None, :], other=0.0
            )
            sums += tile.to(tl.float32) * value[:, None]
        logits = tl.sum(sums, axis=0) + tl.load(bias + unit, mask=valid, other=0.0).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    value = tl.reshape(tl.where(valid, logits, float("-inf")), (TILE_BLOCKS, PADDED))
    among = tl.arange(0, PADDED)
    if K == 1:
        order = tl.where(among[None, :] == tl.argmax(value, axis=1)[:, None], 0, 1)
    else:
        before = (value[:, None, :] > value[:, :, None]) | (
            (value[:, None, :] == value[:, :, None]) & (among[None, None, :] < among[None, :, None])
        )
        order = tl.sum(before.to(tl.int32), axis=2)
    order = tl.reshape(order, (TILE_BLOCKS * PADDED,))
    if MASK:
        tl.store(out + token * blocks * n + unit, (order < K).to(tl.float32).to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(out + (token * blocks + block) * K + order, unit.to(tl.int64), mask=valid & (order < K))


# ── The mask in training ──────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# A program reads (TILE_BLOCKS, PADDED) logits. Noise comes from a generator that counts (Philox), four draws a count: of a unit it
# depends on the seed and the unit's place in the tile alone, so the backward pass draws it again.


@triton.jit
def places(blocks, n, PADDED: tl.constexpr, TILE_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the units of a program's tile, and which of them exist."""
    block = tl.program_id(0).to(tl.int64) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)[:, None]
    among = tl.arange(0, PADDED)[None, :]
    return block * n + among, (block < blocks) & (among < n)


@triton.jit
def precedes(value, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 where unit v is before unit u, of equal ones the first: (blocks, u, v)."""
    among = tl.arange(0, PADDED)
    earlier = among[None, None, :] < among[None, :, None]
    larger, equal = value[:, None, :] > value[:, :, None], value[:, None, :] == value[:, :, None]
    return (larger | (equal & earlier)).to(tl.float32)


@triton.jit
def drawn_indicator(value, seed, noise, K: tl.constexpr, PADDED: tl.constexpr, TILE_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 at the K largest of value + noise · g of each block, with Gumbel noise g, else 0."""
    if noise > 0:
        count = tl.program_id(0).to(tl.int64) * (TILE_BLOCKS * PADDED // 4) + tl.arange(0, TILE_BLOCKS * PADDED // 4)
        a, b, c, d = tl.randint4x(seed, count)
        bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (TILE_BLOCKS, PADDED))
        uniform = ((bits.to(tl.uint32) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # between 0 and 1, which it never is
        value -= noise * tl.log(-tl.log(uniform))
    if K == 1:
        chosen = tl.arange(0, PADDED)[None, :] == tl.argmax(value, axis=1)[:, None]
    else:
        chosen = tl.sum(precedes(value, PADDED), axis=2) < K
    return chosen.to(tl.float32)


@triton.jit
def relaxation(value, K: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 at the units that are fully active in the relaxed indicator, a softmax over the others, and its factor."""
    full = tl.zeros_like(value)
    if K > 1:
        before = precedes(value, PADDED)
        rank = tl.sum(before, axis=2)
        kth = tl.sum(tl.where(rank == K - 1, value, 0.0), axis=1)[:, None]
        weight = tl.exp(tl.minimum(value - kth, 30.0))  # `unit_choice.HIGHEST`
        rest = tl.sum((1.0 - before) * weight[:, None, :], axis=2)  # of a unit and those after it
        exceeds = ((rank < K - 1) & ((K - rank) * weight > rest)).to(tl.float32)
        full = tl.where((exceeds > 0) & (tl.sum(before * exceeds[:, None, :], axis=2) == rank), 1.0, 0.0)
    value = tl.where(full > 0, float("-inf"), value)
    weight = tl.exp(value - tl.max(value, axis=1)[:, None])
    return full, weight / tl.sum(weight, axis=1)[:, None], K - tl.sum(full, axis=1)[:, None]


@triton.jit
def tile_masked(  # type: ignore[no-untyped-def]
    h,
    logits,
    seed,
    y,
    blocks,
    n,
    noise,
    hard,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Compute y = h ⊙ mask: drawn with noise if the seed's lowest bits, as a number below 1, are less than `hard`, else relaxed."""
    unit, valid = places(blocks, n, PADDED, TILE_BLOCKS)
    value = tl.load(logits + unit, mask=valid, other=0.0).to(tl.float32)
    value = tl.where(tl.arange(0, PADDED)[None, :] < n, value, float("-inf"))
    number = tl.load(seed)
    if (number & 0xFFFFFF) < hard * 16777216.0:
        mask = drawn_indicator(value, number, noise, K, PADDED, TILE_BLOCKS)
    else:
        full, soft, factor = relaxation(value, K, PADDED)
        mask = full + factor * soft
    own = tl.load(h + unit, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + unit, (own * mask).to(y.dtype.element_ty), mask=valid)


@triton.jit
def tile_masked_gradients(  # type: ignore[no-untyped-def]
    grad,
    h,
    logits,
    seed,
    grad_h,
    grad_logits,
    blocks,
    n,
    noise,
    hard,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Compute grad ⊙ mask, and the gradient of the relaxed indicator's logits for that of the mask, grad ⊙ h."""
    unit, valid = places(blocks, n, PADDED, TILE_BLOCKS)
    value = tl.load(logits + unit, mask=valid, other=0.0).to(tl.float32)
    value = tl.where(tl.arange(0, PADDED)[None, :] < n, value, float("-inf"))
    number = tl.load(seed)
    full, soft, factor = relaxation(value, K, PADDED)
    mask = full + factor * soft
    if (number & 0xFFFFFF) < hard * 16777216.0:
        mask = drawn_indicator(value, number, noise, K, PADDED, TILE_BLOCKS)
    of_y = tl.load(grad + unit, mask=valid, other=0.0).to(tl.float32)
    of_mask = of_y * tl.load(h + unit, mask=valid, other=0.0).to(tl.float32)
    of_logits = factor * soft * (of_mask - tl.sum(soft * of_mask, axis=1)[:, None])
    tl.store(grad_h + unit, (of_y * mask).to(grad_h.dtype.element_ty), mask=valid)
    tl.store(grad_logits + unit, of_logits.to(grad_logits.dtype.element_ty), mask=valid)
