"""The active units of each token, chosen on a GPU in few launches: what a decoder's step takes there is launches, not arithmetic.

    the k largest in each block of N of (x C1 C2 + c)        or of logits that are given

The first product is `indexed_rows.tiled_sums` with all rows of C1; then one kernel multiplies by C2 and chooses
(`triton_kernels.py`). Many tokens are multiplied by torch's own products, and only chosen for by the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrofit.passes.sparse_ffn.indexed_rows import added_parts, reads_tiles, tiled_sums

MANY = 16  # tokens from which on torch multiplies by C1 and C2
CHOICE = (32, 128, 4)  # units, and rows of C2, that a program reads at a time, and its warps; at least one block
LARGEST = 64  # N up to which several units of a block are chosen: the kernel compares each with each


def chooses_in_kernel(n: int, k: int, x: Tensor, *operands: Tensor | None) -> bool:
    """Whether the functions below choose k of every n: on CUDA, where no gradient is needed, but not in float64.

    The kernel's logits are float32, and what is compared in float64 may differ by another choice between two that are almost equal.
    """
    return (k == 1 or n <= LARGEST) and x.dtype != torch.float64 and reads_tiles(x, *operands)


def chosen_units(x: Tensor, c1: Tensor, c2: Tensor, bias: Tensor, n: int, k: int, mask: torch.dtype | None = None) -> Tensor:
    """The indices of the k largest of x C1 C2 + c in each block of n, largest first: (tokens, d) to (tokens, blocks k).

    It is for few tokens. With `mask`, a dtype, a tensor of it instead that is 1 at these and 0 elsewhere: (tokens, d_ff).
    """
    return choose(added_parts(tiled_sums(x, None, c1), None, torch.float32), c2.contiguous(), bias, n, k, mask)


def chosen_of(logits: Tensor, n: int, k: int, mask: torch.dtype | None = None) -> Tensor:
    """The same for logits that are given, (tokens, d_ff)."""
    return choose(logits.contiguous(), None, None, n, k, mask)


def choose(low: Tensor, c2: Tensor | None, bias: Tensor | None, n: int, k: int, mask: torch.dtype | None) -> Tensor:
    from retrofit.passes.sparse_ffn.triton_kernels import tile_choice

    tokens, rank = low.shape
    units = rank if c2 is None else c2.shape[1]
    blocks, padded = units // n, power_of_two(n)
    together, ranks = max(1, CHOICE[0] // padded), min(CHOICE[1], power_of_two(rank))
    size, dtype = (blocks * k, torch.int64) if mask is None else (units, mask)
    out = torch.empty(tokens, size, dtype=dtype, device=low.device)
    weights = (low, low) if c2 is None or bias is None else (c2, bias)
    given = low, *weights, out, rank, blocks, n, c2 is None, mask is not None, k, padded, together, ranks
    tile_choice[tokens, -(-blocks // together)](*given, num_warps=CHOICE[2])
    return out


def power_of_two(least: int) -> int:
    """The smallest power of two from `least` on."""
    return 1 << (least - 1).bit_length()
