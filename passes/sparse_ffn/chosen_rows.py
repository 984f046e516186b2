"""Products with chosen rows of a matrix, each read where it lies: z[t, b] = x[t] · rows[p[t, b]], y[t] = Σ_b h[t, b] rows[p[t, b]].

Where no gradient is asked for, nothing is copied. On a CPU the sum of rows is a bag of embeddings, and the products are what the
backward pass of such a bag gives for its weights. On CUDA, where torch would read the rows one after the other, two Triton kernels
read tiles of them (`tiles.py`). A decoder's few tokens would keep few of the processors busy with y there, so the sum over b is
parted, and the parts are added at the end.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor
from torch.nn import functional as F

PIECE = 1024  # columns of a row that a CPU thread sums at a time where there is one token
TILE_ROWS, TILE_COLUMNS = 16, 256  # of the chosen rows that a Triton program reads at a time
SUM = 0  # the mode of a bag that is the sum of its rows
PROGRAMS = 256  # that keep a GPU busy: about two a processor
HAS_TRITON = importlib.util.find_spec("triton") is not None


def chosen_products(x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """z[t, b] = x[t] · rows[places[t, b]]: (tokens, blocks)."""
    if not followed(x, rows):
        if x.is_cuda and HAS_TRITON:
            return tiled_products(x, places, rows)
        if x.device.type == "cpu":
            return products_in_place(x, places, rows)
    chosen = rows.index_select(0, places.flatten()).view(*places.shape, -1)
    return torch.bmm(chosen, x.unsqueeze(2)).squeeze(2)


def summed_rows(h: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """y[t] = Σ_b h[t, b] rows[places[t, b]]: (tokens, d)."""
    if torch.compiler.is_exporting():  # ONNX has no bags
        return torch.bmm(h.unsqueeze(1), F.embedding(places, rows).to(h.dtype)).squeeze(1)
    if h.is_cuda and HAS_TRITON and not followed(h, rows):
        return tiled_sums(h, places, rows)
    (tokens, blocks), width = places.shape, rows.shape[1]
    pieces = math.gcd(width, width // PIECE) if tokens == 1 and width >= 2 * PIECE else 1
    if pieces > 1:  # a bag for each piece of the row: they are filled side by side
        places = places * pieces + torch.arange(pieces, device=places.device).unsqueeze(1)
        h, rows = h.expand(pieces, blocks).contiguous(), rows.view(-1, width // pieces)
    return F.embedding_bag(places, rows, mode="sum", per_sample_weights=h.to(rows.dtype)).to(h.dtype).view(tokens, width)


def followed(*operands: Tensor) -> bool:
    """Whether a gradient or an exporter follows the computation: then it is made of operations that these know."""
    exported = torch.compiler.is_exporting() or torch.jit.is_tracing()
    return exported or (torch.is_grad_enabled() and any(one.requires_grad for one in operands))


def products_in_place(x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """`chosen_products` as the gradient of weights: that of h in y = Σ_b h[t, b] rows[p[t, b]], where the gradient of y is x."""
    tokens, blocks = places.shape
    starts = torch.arange(0, tokens * blocks, blocks)
    token = torch.arange(tokens).repeat_interleave(blocks)
    z = torch.ops.aten._embedding_bag_per_sample_weights_backward(x.to(rows.dtype), rows, places.flatten(), starts, token, SUM)
    return z.view(tokens, blocks).to(x.dtype)  # type: ignore[no-any-return]


def tiled_products(x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """`chosen_products` by a kernel: a program makes `TILE_ROWS` of the products of one token."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_products

    x, places, rows = x.contiguous(), places.contiguous(), rows.contiguous()
    (tokens, blocks), width = places.shape, rows.shape[1]
    z = torch.empty(tokens, blocks, dtype=x.dtype, device=x.device)
    tile_products[tokens, -(-blocks // TILE_ROWS)](x, places, rows, z, blocks, width, TILE_ROWS, TILE_COLUMNS)
    return z


def tiled_sums(h: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """`summed_rows` by a kernel: a program adds a part of the rows, `TILE_COLUMNS` wide, of one token."""
    from retrofit.passes.sparse_ffn.triton_kernels import tile_sums

    h, places, rows = h.contiguous(), places.contiguous(), rows.contiguous()
    (tokens, blocks), width = places.shape, rows.shape[1]
    across = -(-width // TILE_COLUMNS)
    parts = max(1, min(-(-blocks // TILE_ROWS), PROGRAMS // (tokens * across)))
    each = -(-blocks // (parts * TILE_ROWS)) * TILE_ROWS  # rows a part, whole tiles
    y = torch.empty(parts, tokens, width, dtype=torch.float32, device=h.device)
    tile_sums[tokens, across, parts](h, places, rows, y, blocks, width, tokens, each, TILE_ROWS, TILE_COLUMNS)
    return y.sum(0).to(h.dtype)
