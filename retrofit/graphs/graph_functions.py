"""Functions that the graph of a graph module calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.errors import DoesNotFitError


def check_sizes(value: Tensor, name: str, sizes: tuple[int | None, ...], largest: tuple[int | None, ...] = ()) -> Tensor:
    """The argument called `name`; raises `DoesNotFitError` where it has not the sizes that are fixed, or exceeds the largest."""
    for dim, size in enumerate(sizes):
        if size is not None and value.shape[dim] != size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"this graph takes {size} there: the model's code fixed it when it was captured",
                remedy="give inputs of that size, or capture the model again: with dynamic sizes, or example_inputs= of that size",
            )
    for dim, size in enumerate(largest):
        if size is not None and value.shape[dim] > size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"this graph takes at most {size} there, as what it was made from does",
                remedy="give a smaller input",
            )
    return value


def mask_or_ones(mask: Tensor | None, ids: Tensor) -> Tensor:
    """The mask, or ones where there is none."""
    return torch.ones_like(ids) if mask is None else mask


def getitem(values: Any, index: int) -> Any:
    """`values[index]`."""
    return values[index]
