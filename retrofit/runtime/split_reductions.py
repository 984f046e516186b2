"""A forward in another order of its sums: each product of matrices is the sum of two, over either half of what is summed over.

How far the outputs move is a model's own rounding, for a fifth of what a forward in float64 costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class SplitReductions(TorchDispatchMode):
    """Within this context products of matrices are summed up in another order."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.mm.default and args[0].shape[1] > 1:
            return sum_of_halves(*args)
        if function is aten.addmm.default and not kwargs and args[1].shape[1] > 1:
            return args[0] + sum_of_halves(*args[1:])
        return function(*args, **(kwargs or {}))


def sum_of_halves(left: Tensor, right: Tensor) -> Tensor:
    """The product of (n, k) and (k, m)."""
    half = left.shape[1] // 2
    return aten.mm(left[:, :half], right[:half]) + aten.mm(left[:, half:], right[half:])
