"""Products with rows of a matrix given by index: z[t, b] = x[t] · rows[i[t, b]] and y[t] = Σ_b h[t, b] rows[i[t, b]].

A bias may be added, z's of the same rows. Where no gradient is needed, rows are read in place. On a CPU the sum of rows is a bag of
embeddings, and the products are what the backward pass of such a bag computes for its weights; the products of a single token are
faster on a copy of its rows, while that is small (`benchmarks/sparse_ffn.py --products`). On CUDA, where torch would read the rows
one after the other, Triton kernels read tiles of them (`triton_kernels.py`). With the few tokens of a decoder, y would keep few of
the processors busy there, so the sum over b is split into parts, which are added at the end. Of a packed matrix only rows that are
read are unpacked.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.sdk import is_exporting, is_packed_tensor, rows_at

SMALL = 3 << 20  # bytes of the rows of one token that a CPU copies faster than it reads them one by one
PIECE = 1024  # columns of a row that a CPU thread sums at a time where there is one token
SUM = 0  # the mode of a bag that is the sum of its rows
PRODUCTS, SUMS = (2, 1024, 4), (64, 128, 4)  # rows and columns that a Triton program reads at a time, and its warps
TOTALS = (16, 128)  # parts and columns, likewise
PROGRAMS = 512  # that keep a GPU busy
HAS_TRITON = importlib.util.find_spec("triton") is not None


def indexed_products(x: Tensor, indices: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """z[t, b] = x[t] · rows[indices[t, b]] + bias[indices[t, b]]: (tokens, blocks)."""
    if reads_tiles(x, rows, bias):
        return tiled_products(x, indices, rows, bias)
    z = products(x, indices, rows)
    return z if bias is None else z + bias[indices].to(z.dtype)


def products(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """`indexed_products` without a bias, by torch's operations."""
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
    """y[t] = Σ_b h[t, b] rows[indices[t, b]] + bias: (tokens, d)."""
    if reads_tiles(h, rows, bias):
        return added_parts(tiled_sums(h, indices, rows), bias, h.dtype)
    y = sums(h, indices, rows)
    return y if bias is None else y + bias.to(y.dtype)


def sums(h: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """`indexed_sums` without a bias, by torch's operations."""
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
    """Whether the Triton kernels run: on CUDA, with ordinary tensors that are not empty, where nothing has to be recorded."""
    if not x.is_cuda or not HAS_TRITON or not x.numel():
        return False
    given = [x, *(one for one in operands if one is not None)]
    return not is_recorded(*given) and not any(map(is_packed_tensor, given))


def is_recorded(*operands: Tensor) -> bool:
    """Whether autograd or an exporter records the computation: then only operations that these support are used."""
    exported = is_exporting() or torch.jit.is_tracing()
    return exported or (torch.is_grad_enabled() and any(one.requires_grad for one in operands))


def products_by_bag(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """`indexed_products` as a gradient: that of the weights h in y = Σ_b h[t, b] rows[i[t, b]], where the gradient of y is x."""
    tokens, blocks = indices.shape
    starts = torch.arange(0, tokens * blocks, blocks)
    token = torch.arange(tokens).repeat_interleave(blocks)
    z = torch.ops.aten._embedding_bag_per_sample_weights_backward(x.to(rows.dtype), rows, indices.flatten(), starts, token, SUM)
    return z.view(tokens, blocks).to(x.dtype)  # type: ignore[no-any-return]


def tiled_products(x: Tensor, indices: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """`indexed_products` by a kernel: a program computes a few of the products of one token."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_products

    x, indices, rows = x.contiguous(), indices.contiguous(), rows.contiguous()
    (tokens, blocks), width = indices.shape, rows.shape[1]
    height, columns, warps = PRODUCTS
    z = torch.empty(tokens, blocks, dtype=x.dtype, device=x.device)
    tile_products[tokens, -(-blocks // height)](
        x,
        indices,
        rows,
        rows if bias is None else bias,
        z,
        blocks,
        width,
        bias is not None,
        is_double(x),
        height,
        columns,
        num_warps=warps,
    )
    return z


def tiled_sums(h: Tensor, indices: Tensor | None, rows: Tensor) -> Tensor:
    """The parts of `indexed_sums` by a kernel, (parts, tokens, d), each of some rows; without indices, of all rows in order."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_sums

    h, rows = h.contiguous(), rows.contiguous()
    (tokens, blocks), width = h.shape, rows.shape[1]
    height, columns, warps = SUMS
    across = -(-width // columns)
    parts = max(1, min(-(-blocks // height), PROGRAMS // (tokens * across)))
    each = -(-blocks // (parts * height)) * height  # rows a part, whole tiles
    parts = -(-blocks // each)
    y = torch.empty(parts, tokens, width, dtype=torch.float64 if is_double(h) else torch.float32, device=h.device)
    places = h if indices is None else indices.contiguous()
    given = h, places, rows, y, blocks, width, tokens, each, indices is not None, is_double(h), height, columns
    tile_sums[tokens, across, parts](*given, num_warps=warps)
    return y


def added_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ_p parts[p] + bias by a kernel: (parts, tokens, d) to (tokens, d)."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_totals

    count, tokens, width = parts.shape
    height, columns = TOTALS
    y = torch.empty(tokens, width, dtype=dtype, device=parts.device)
    given = parts, parts if bias is None else bias, y, count, tokens, width, bias is not None, is_double(parts), height, columns
    tile_totals[tokens, -(-width // columns)](*given)
    return y


def is_double(x: Tensor) -> bool:
    return x.dtype == torch.float64
