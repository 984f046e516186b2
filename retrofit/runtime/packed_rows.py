"""Packed weights that are tensors of a class of their own: unpacked whole, or a few of their rows.

What such a tensor consists of is said by `__tensor_flatten__`, the protocol by which torch.compile takes tensor classes apart: the
whole numbers, their scales, their zeros. Where each of them has a row for each row of the matrix, rows are apart: those that are
read are put together again as a small matrix of the same class, which unpacks itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

APART: Any = WeakIdKeyDictionary()  # of each packed matrix that was asked for, whether its rows can be read one by one


def is_packed_tensor(weight: Tensor) -> bool:
    """Whether the tensor is of a class of its own that consists of other tensors."""
    return type(weight.detach()) is not Tensor and hasattr(weight, "__tensor_flatten__") and hasattr(weight, "dequantize")


def unpacked(weight: Tensor) -> Tensor:
    """The numbers that a packed matrix represents; a plain one itself."""
    return weight.dequantize() if is_packed_tensor(weight) else weight


def has_rows_apart(weight: Tensor) -> bool:
    """Whether `rows_at` reads the rows of this packed matrix as they are in the whole; tried once for each matrix."""
    if weight not in APART:
        APART[weight] = is_packed_tensor(weight) and weight.dim() == 2 and agrees_by_rows(weight)
    return bool(APART[weight])


@torch.no_grad()
def agrees_by_rows(weight: Tensor) -> bool:
    """Whether a few of the rows, read alone, are those of the whole."""
    parts, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined] # of tensors with a class of their own
    if any(getattr(weight, name).dim() == 0 or len(getattr(weight, name)) != len(weight) for name in parts):
        return False
    tried = torch.linspace(0, len(weight) - 1, 5, device=weight.device).long()
    try:
        return torch.equal(rows_at(weight, tried), weight.dequantize().index_select(0, tried))
    except Exception:  # whatever a class raises that does not expect this
        return False


def rows_at(weight: Tensor, indices: Tensor) -> Tensor:
    """The rows of a packed matrix with these indices, unpacked: (indices, columns)."""
    parts, rest = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    read = {name: getattr(weight, name).index_select(0, indices) for name in parts}
    shape = torch.Size((len(indices), *weight.shape[1:]))
    few: Tensor = type(weight.detach()).__tensor_unflatten__(read, rest, shape, None)  # type: ignore[attr-defined]
    return few.dequantize()
