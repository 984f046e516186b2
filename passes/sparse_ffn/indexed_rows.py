"""Products with rows of a matrix given by index: z[t, b] = x[t] · rows[i[t, b]] and y[t] = Σ_b h[t, b] rows[i[t, b]].

Where no gradient is needed, rows are read in place. On a CPU the sum of rows is a bag of embeddings, and the products are what the
backward pass of such a bag computes for its weights; the products of a single token are faster on a copy of its rows, while that is
small (`benchmarks/sparse_ffn.py --products`). On CUDA, where torch would read the rows one after the other, two Triton
kernels read tiles of them (`triton_kernels.py`). With the few tokens of a decoder, y would keep few of the processors busy there,
so the sum over b is split into parts, which are added at the end. Of a packed matrix only rows that are read are unpacked.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.sdk import is_packed_tensor, rows_at

SMALL = 3 << 20  # bytes of the rows of one token that a CPU copies faster than it reads them one by one
PIECE = 1024  # columns of a row that a CPU thread sums at a time where there is one token
TILE_ROWS, TILE_COLUMNS = 16, 256  # of the indexed rows that a Triton program reads at a time
SUM = 0  # the mode of a bag that is the sum of its rows
PROGRAMS = 256  # that keep a GPU busy: about two a processor
HAS_TRITON = importlib.util.find_spec("triton") is not None


def indexed_products(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """z[t, b] = x[t] · rows[indices[t, b]]: (tokens, blocks)."""
    if is_packed_tensor(rows):
        copies = rows_at(rows, indices.flatten()).view(*indices.shape, -1)
        return torch.bmm(copies.to(x.dtype), x.unsqueeze(2)).squeeze(2)
    if not is_recorded(x, rows):
        if x.is_cuda and HAS_TRITON:
            return tiled_products(x, indices, rows)
        if x.device.type == "cpu" and len(x) == 1 and indices.shape[1] * rows[0].nbytes <= SMALL:
            return F.linear(x.to(rows.dtype), rows.index_select(0, indices[0])).to(x.dtype)
        if x.device.type == "cpu":
            return products_by_bag(x, indices, rows)
    copies = rows.index_select(0, indices.flatten()).view(*indices.shape, -1)
    return torch.bmm(copies, x.unsqueeze(2)).squeeze(2)


def indexed_sums(h: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """y[t] = Σ_b h[t, b] rows[indices[t, b]]: (tokens, d)."""
    if is_packed_tensor(rows):
        return torch.bmm(h.unsqueeze(1), rows_at(rows, indices.flatten()).view(*indices.shape, -1).to(h.dtype)).squeeze(1)
    if torch.compiler.is_exporting():  # ONNX has no bags
        return torch.bmm(h.unsqueeze(1), F.embedding(indices, rows).to(h.dtype)).squeeze(1)
    if h.is_cuda and HAS_TRITON and not is_recorded(h, rows):
        return tiled_sums(h, indices, rows)
    (tokens, blocks), width = indices.shape, rows.shape[1]
    pieces = math.gcd(width, width // PIECE) if tokens == 1 and width >= 2 * PIECE else 1
    if pieces > 1:  # a bag for each piece of the row: threads fill them at the same time
        indices = indices * pieces + torch.arange(pieces, device=indices.device).unsqueeze(1)
        h, rows = h.expand(pieces, blocks).contiguous(), rows.view(-1, width // pieces)
    return F.embedding_bag(indices, rows, mode="sum", per_sample_weights=h.to(rows.dtype)).to(h.dtype).view(tokens, width)


def is_recorded(*operands: Tensor) -> bool:
    """Whether autograd or an exporter records the computation: then only operations that these support are used."""
    exported = torch.compiler.is_exporting() or torch.jit.is_tracing()
    return exported or (torch.is_grad_enabled() and any(one.requires_grad for one in operands))


def products_by_bag(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """`indexed_products` as a gradient: that of the weights h in y = Σ_b h[t, b] rows[i[t, b]], where the gradient of y is x."""
    tokens, blocks = indices.shape
    starts = torch.arange(0, tokens * blocks, blocks)
    token = torch.arange(tokens).repeat_interleave(blocks)
    z = torch.ops.aten._embedding_bag_per_sample_weights_backward(x.to(rows.dtype), rows, indices.flatten(), starts, token, SUM)
    return z.view(tokens, blocks).to(x.dtype)  # type: ignore[no-any-return]


def tiled_products(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """`indexed_products` by a kernel: a program computes `TILE_ROWS` of the products of one token."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_products

    x, indices, rows = x.contiguous(), indices.contiguous(), rows.contiguous()
    (tokens, blocks), width = indices.shape, rows.shape[1]
    z = torch.empty(tokens, blocks, dtype=x.dtype, device=x.device)
    tile_products[tokens, -(-blocks // TILE_ROWS)](x, indices, rows, z, blocks, width, TILE_ROWS, TILE_COLUMNS)
    return z


def tiled_sums(h: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """`indexed_sums` by a kernel: a program adds a part of the rows, `TILE_COLUMNS` wide, of one token."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_sums

    h, indices, rows = h.contiguous(), indices.contiguous(), rows.contiguous()
    (tokens, blocks), width = indices.shape, rows.shape[1]
    across = -(-width // TILE_COLUMNS)
    parts = max(1, min(-(-blocks // TILE_ROWS), PROGRAMS // (tokens * across)))
    each = -(-blocks // (parts * TILE_ROWS)) * TILE_ROWS  # rows a part, whole tiles
    y = torch.empty(parts, tokens, width, dtype=torch.float32, device=h.device)
    tile_sums[tokens, across, parts](h, indices, rows, y, blocks, width, tokens, each, TILE_ROWS, TILE_COLUMNS)
    return y.sum(0).to(h.dtype)
