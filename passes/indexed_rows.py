"""Products with rows of a matrix given by index: z[t, b] = x[t] · rows[i[t, b]] and y[t] = Σ_b h[t, b] rows[i[t, b]].

On CUDA also the sums over all rows b for which |h[t, b]| is not below a threshold: no index is computed, and no other row is read.

A bias may be added; z has the biases of its rows. Without gradients rows are read in place. On a CPU the sum of rows is an
embedding bag, and the products are the weight gradient of such a bag; for a single token they are faster on a copy of its rows, if
the copy is small (`benchmarks/sparse_ffn.py --products`). On CUDA, where torch would read the rows one by one, Triton kernels read
tiles of them (`triton_kernels.py`). The few tokens of a decoding step would occupy few multiprocessors, so the sum over b is split
into parts that are added at the end. Of a packed matrix only the rows that are read are unpacked.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.sdk.modules import has_rows_apart, is_exporting, is_packed_tensor, rows_at

SMALL = 3 << 20  # bytes: smaller sets of a token's rows a CPU copies faster than it reads them one by one
PIECE = 1024  # columns of a row that a CPU thread sums at a time, for one token
SUM = 0  # the mode of a bag that sums its rows
PRODUCTS, SUMS = (2, 1024, 4), (64, 128, 4)  # rows and columns that a Triton program reads at a time, and its warps
TOTALS = (16, 128)  # parts and columns that a Triton program reads at a time
PROGRAMS = 512  # Triton programs that keep a GPU busy
HAS_TRITON = importlib.util.find_spec("triton") is not None


def indexed_products(x: Tensor, indices: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return z[t, b] = x[t] · rows[indices[t, b]] + bias[indices[t, b]]: (tokens, blocks)."""
    if reads_tiles(x, rows, bias):
        return tiled_products(x, indices, rows, bias)
    z = products(x, indices, rows)
    return z if bias is None else z + bias[indices].to(z.dtype)


def products(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return `indexed_products` without a bias, by torch's operations."""
    if is_packed_tensor(rows):
        copies = rows_at(rows, indices.flatten()).view(*indices.shape, -1)
        return torch.bmm(copies.to(x.dtype), x.unsqueeze(2)).squeeze(2)
    if not is_recorded(x, rows):
        if x.device.type == "cpu" and len(x) == 1 and indices.shape[1] * rows.shape[1] * rows.itemsize <= SMALL:
            return F.linear(x.to(rows.dtype), rows.index_select(0, indices[0])).to(x.dtype)
        if x.device.type == "cpu":
            return products_by_bag(x, indices, rows)
    copies = rows.index_select(0, indices.flatten()).view(*indices.shape, -1)
    return torch.bmm(copies, x.unsqueeze(2)).squeeze(2)


def indexed_sums(h: Tensor, indices: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y[t] = Σ_b h[t, b] rows[indices[t, b]] + bias: (tokens, d)."""
    if reads_tiles(h, rows, bias):
        return added_parts(tiled_sums(h, indices, rows), bias, h.dtype)
    y = sums(h, indices, rows)
    return y if bias is None else y + bias.to(y.dtype)


def sums(h: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return `indexed_sums` without a bias, by torch's operations."""
    if is_packed_tensor(rows):
        return torch.bmm(h.unsqueeze(1), rows_at(rows, indices.flatten()).view(*indices.shape, -1).to(h.dtype)).squeeze(1)
    if is_exporting():  # ONNX has no bags
        return torch.bmm(h.unsqueeze(1), F.embedding(indices, rows).to(h.dtype)).squeeze(1)
    (tokens, blocks), width = indices.shape, rows.shape[1]
    pieces = math.gcd(width, width // PIECE) if tokens == 1 and width >= 2 * PIECE else 1
    if pieces > 1:  # a bag for each piece of the row: threads fill them at the same time
        indices = indices * pieces + torch.arange(pieces, device=indices.device).unsqueeze(1)
        h, rows = h.expand(pieces, blocks).contiguous(), rows.view(-1, width // pieces)
    return F.embedding_bag(indices, rows, mode="sum", per_sample_weights=h.to(rows.dtype)).to(h.dtype).view(tokens, width)


def reads_tiles(x: Tensor, *operands: Tensor | None) -> bool:
    """Return whether the Triton kernels run: on CUDA, with unpacked, non-empty tensors, without autograd or export."""
    if not x.is_cuda or not HAS_TRITON or not x.numel():
        return False
    given = [x, *(operand for operand in operands if operand is not None)]
    return not is_recorded(*given) and not any(map(is_packed_tensor, given))


def is_recorded(*operands: Tensor) -> bool:
    """Return whether autograd or an exporter records the computation; then only operations that both support are used."""
    exported = is_exporting() or torch.jit.is_tracing()
    return exported or (torch.is_grad_enabled() and any(operand.requires_grad for operand in operands))


def products_by_bag(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return `indexed_products` as a gradient: of h in y[t] = Σ_b h[t, b] rows[i[t, b]], if x is the gradient of y."""
    tokens, blocks = indices.shape
    starts = torch.arange(0, tokens * blocks, blocks)
    token = torch.arange(tokens).repeat_interleave(blocks)
    z = torch.ops.aten._embedding_bag_per_sample_weights_backward(x.to(rows.dtype), rows, indices.flatten(), starts, token, SUM)
    return z.view(tokens, blocks).to(x.dtype)  # type: ignore[no-any-return]


def tiled_products(x: Tensor, indices: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `indexed_products`, computed by a kernel; a program computes a few products of one token."""
    from retrofit.passes.triton_kernels import tile_products

    x, indices, rows = x.contiguous(), indices.contiguous(), rows.contiguous()
    (tokens, blocks), width = indices.shape, rows.shape[1]
    height, columns, warps = PRODUCTS
    z = torch.empty(tokens, blocks, dtype=x.dtype, device=x.device)
    operands = x, indices, rows, rows if bias is None else bias, z, blocks, width
    tile_products[tokens, -(-blocks // height)](*operands, bias is not None, is_double(x), height, columns, num_warps=warps)
    return z


def tiled_sums(h: Tensor, indices: Tensor | None, rows: Tensor, least: Tensor | None = None) -> Tensor:
    """Return the parts of `indexed_sums`, (parts, tokens, d), each the sum over some b; without indices, i[t, b] is b.

    With `least`, a tensor with one number, only over b for which |h[t, b]| is not below it.
    """
    from retrofit.passes.triton_kernels import tile_sums

    h, rows = h.contiguous(), rows.contiguous()
    (tokens, blocks), width = h.shape, rows.shape[1]
    height, columns, warps = SUMS
    across = -(-width // columns)
    parts = max(1, min(-(-blocks // height), PROGRAMS // (tokens * across)))
    each = -(-blocks // (parts * height)) * height  # rows of a part: whole tiles
    parts = -(-blocks // each)
    y = torch.empty(parts, tokens, width, dtype=torch.float64 if is_double(h) else torch.float32, device=h.device)
    places = h if indices is None else indices.contiguous()
    pointers = h, places, rows, y, h if least is None else least
    given = *pointers, blocks, width, tokens, each, indices is not None, least is not None, is_double(h), height, columns
    tile_sums[tokens, across, parts](*given, num_warps=warps)
    return y


def thresholded_sums(x: Tensor, rows: Tensor, least: Tensor) -> Tensor:
    """Return Σ_b x[t, b] rows[b] over the b for which |x[t, b]| is not below `least`: (tokens, blocks) to (tokens, d), on CUDA.

    Tokens whose sums are computed side by side read a row that several of them need from the cache.
    """
    return added_parts(tiled_sums(x, None, rows, least), None, x.dtype)


def added_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ_p parts[p] + bias, computed by a kernel: (parts, tokens, d) to (tokens, d)."""
    from retrofit.passes.triton_kernels import tile_totals

    count, tokens, width = parts.shape
    height, columns = TOTALS
    y = torch.empty(tokens, width, dtype=dtype, device=parts.device)
    given = parts, parts if bias is None else bias, y, count, tokens, width, bias is not None, is_double(parts), height, columns
    tile_totals[tokens, -(-width // columns)](*given)
    return y


def is_double(x: Tensor) -> bool:
    return x.dtype == torch.float64


# When reading the active units' rows is faster than all rows and a mask. The time for reading rows is proportional to tokens and
# active units; products with all rows take hardly longer for a few tokens than for one, and less than half as long in half
# precision. Rows that are not read in place are copied for each token.

FEW = 4  # up to N / (k FEW) tokens it is faster to copy the active rows than to use all
# For rows that a CPU reads in place, by whether numbers take less than four bytes (benchmarks/sparse_ffn.py --crossover):
ALWAYS = {False: 16, True: 32}  # N / k from which rows are faster for any number of tokens
PART = {False: 2, True: 8}  # with a smaller N / k rows are faster for up to (N / k)² / PART tokens, and for one
CACHED = 32 << 20  # bytes of a matrix in 4-byte or larger numbers up to which half of `ALWAYS` suffices


def prefers_rows(x: Tensor, width: int, share: int, weights: Sequence[Tensor]) -> bool | torch.SymBool:
    """Return whether reading rows is faster for x, (…, width), if one of `share` units is active; W_out is the first weight."""
    if any(weight.device != x.device for weight in weights):  # offloaded: on the device only while their own module computes
        return False
    packed = [weight for weight in weights if is_packed_tensor(weight)]
    if packed:  # the whole matrix would be unpacked to be multiplied by
        return x.numel() <= share * width and all(map(has_rows_apart, packed))
    if reads_tiles(x, *weights):  # benchmarks/results/gpu.csv
        return x.numel() <= share * width
    if x.device.type != "cpu" or is_recorded(x, *weights):
        return x.numel() <= share // FEW * width
    half = weights[0].itemsize < 4
    always = ALWAYS[half] // 2 if not half and weights[0].nbytes <= CACHED else ALWAYS[half]
    return share >= always or x.numel() <= max(1, share * share // PART[half]) * width
