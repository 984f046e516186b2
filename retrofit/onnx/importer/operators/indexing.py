"""ONNX operators that gather, scatter, sort and accumulate along an axis, as torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.operators.table import operator
from retrofit.onnx.importer.values import (
    Value,
    is_number,
    map_numbers,
    number,
    numbers,
    tensor,
)


@operator("Gather")
def gather(x: Value, indices: Value, axis: int = 0) -> Value:
    if is_number(x) and is_number(indices):
        return map_numbers(lambda at: x[at], indices)
    x = tensor(x, indices if isinstance(indices, Tensor) else None)
    if is_number(indices) and not isinstance(indices, tuple):
        return x.select(axis, indices)
    if is_number(indices):
        indices = tensor(indices, x)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(indices, x)
    axis %= x.dim()
    return x[(slice(None),) * axis + (indices,)]


@operator("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, from_the_front(indices, x.shape[axis]))


def from_the_front(indices: Tensor, length: int) -> Tensor:
    """Places that may be counted from the end, counted from the front, in torch's type of them."""
    return torch.where(indices < 0, indices + length, indices).long()


@operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    indices = tensor(indices, x)
    leading = tuple(
        torch.arange(x.shape[at], device=x.device).reshape(-1, *(1 for _ in range(indices.dim() - 2 - at)))
        for at in range(batch_dims)
    )
    return x[(*leading, *indices.unbind(-1))]


def unsupported_reduction(attributes: dict[str, Any]) -> str:
    kind = attributes.get("reduction", "none")
    return "" if kind in ("none", "add") else f"reduction={kind}"


@operator("ScatterND", refuses=unsupported_reduction)
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    return tensor(x).index_put(tensor(indices).unbind(-1), tensor(updates), accumulate=reduction == "add")


@operator("ScatterElements")
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none") -> Tensor:
    indices = from_the_front(indices, x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, indices, updates)
    kinds = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return torch.scatter_reduce(x, axis, indices, updates, kinds[reduction])


@operator("OneHot")
def one_hot(indices: Tensor, depth: Value, values: Value, axis: int = -1) -> Tensor:
    off, on = numbers(values)
    places = torch.arange(number(depth), device=indices.device)
    chosen = from_the_front(indices, number(depth)).unsqueeze(-1) == places
    result = torch.where(chosen, tensor(on, indices), tensor(off, indices))
    return result.movedim(-1, axis)


@operator("TopK")
def top_k(x: Tensor, k: Value, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    found = torch.topk(x, number(k), axis, bool(largest), bool(sorted))
    return found.values, found.indices


@operator("ArgMax")
def arg_max(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return first_or_last(x, torch.argmax, axis, keepdims, select_last_index)


@operator("ArgMin")
def arg_min(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return first_or_last(x, torch.argmin, axis, keepdims, select_last_index)


def first_or_last(x: Tensor, place: Callable[..., Tensor], axis: int, keepdims: int, last: int) -> Tensor:
    """The place that is found along an axis, of equal values the first one, or the last."""
    return x.shape[axis] - 1 - place(x.flip(axis), axis, bool(keepdims)) if last else place(x, axis, bool(keepdims))


@operator("NonZero")
def non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(tensor(x)).t()


@operator("CumSum")
def cum_sum(x: Tensor, axis: Value, exclusive: int = 0, reverse: int = 0) -> Tensor:
    along = number(axis)
    reversed_ = x.flip(along) if reverse else x
    total = reversed_.cumsum(along, dtype=x.dtype)
    total = total - reversed_ if exclusive else total
    return total.flip(along) if reverse else total
