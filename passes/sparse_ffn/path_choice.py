"""Which of two paths computes a sparse feed-forward faster: the active units' rows alone, or all rows and a mask.

Reading rows takes as long as there are tokens and active units; the products with all rows take hardly longer for a few tokens than
for one, and in half precision less than half as long. Where no rule is given below, a token's rows have to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retrofit.passes.sparse_ffn.indexed_rows import is_recorded, reads_tiles
from retrofit.sdk import has_rows_apart, is_packed_tensor

FEW = 4  # up to N / (k FEW) tokens it is faster to copy the active rows than to use all
# Of rows that a CPU reads in place, by whether numbers take less than four bytes (benchmarks/sparse_ffn.py --crossover):
ALWAYS = {False: 16, True: 32}  # from this N / k on rows are faster for any number of tokens
PART = {False: 2, True: 8}  # below, for up to (N / k)² / PART tokens, and for one
CACHED = 32 << 20  # bytes of a matrix, in four bytes a number or more, of which half as large an N / k is enough


def prefers_rows(x: Tensor, width: int, share: int, weights: Sequence[Tensor]) -> bool | torch.SymBool:
    """Whether rows alone are faster for the tokens of x, (…, width), where one of `share` units is active; weights: W_out first."""
    if any(one.device != x.device for one in weights):  # offloaded: they are there only while their own module computes
        return False
    packed = [one for one in weights if is_packed_tensor(one)]
    if packed:  # the whole matrix would be unpacked to be multiplied by
        return x.numel() <= share * width and all(has_rows_apart(one) for one in packed)
    if reads_tiles(x, *weights):  # benchmarks/results/gpu.csv
        return x.numel() <= share * width
    if x.device.type != "cpu" or is_recorded(x, *weights):
        return x.numel() <= share // FEW * width
    half = weights[0].itemsize < 4
    always = ALWAYS[half] // 2 if not half and weights[0].nbytes <= CACHED else ALWAYS[half]
    return share >= always or x.numel() <= max(1, share * share // PART[half]) * width
