"""ONNX operators on shapes and layout, those that create tensors, and those that gather, scatter or sort, as torch functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.operators import (
    DTYPES,
    Value,
    dtype_of,
    is_number,
    map_numbers,
    number,
    numbers,
    operator,
    tensor,
)

END = 2**31 - 1  # "to the end" in a slice is this or more
FEW = 16  # up to this number, a constant of one value is a tuple of numbers rather than a tensor


@operator("Shape")
def shape(x: Value, start: int = 0, end: int | None = None) -> Value:
    found = tuple(x.shape) if isinstance(x, Tensor) else (len(x),) if isinstance(x, tuple) else ()
    return found[start:end]


@operator("Size")
def size(x: Value) -> Value:
    return x.numel() if isinstance(x, Tensor) else len(numbers(x))


@operator("Reshape")
def reshape(x: Value, shape: Value, allowzero: int = 0) -> Value:
    extents = numbers(shape)
    if is_number(x) and len(extents) <= 1:
        return flatten_numbers(x) if extents else number(x)
    if isinstance(x, tuple) and extents == (-1, 2):  # the padding before and after every axis: numbers in pairs
        return tuple(zip(x[::2], x[1::2], strict=True))
    x = tensor(x)
    if not allowzero:
        extents = tuple(x.shape[at] if isinstance(extent, int) and extent == 0 else extent for at, extent in enumerate(extents))
    return x.reshape(extents)


def flatten_numbers(x: Value) -> tuple[Any, ...]:
    """Return numbers, or rows of numbers, as one row."""
    return tuple(item for part in numbers(x) for item in numbers(part))


@operator("Transpose")
def transpose(x: Value, perm: tuple[int, ...] | None = None) -> Value:
    if isinstance(x, tuple):  # rows of numbers
        return tuple(zip(*x, strict=True))
    return x.permute(perm if perm is not None else tuple(reversed(range(x.dim()))))


@operator("Unsqueeze")
def unsqueeze(x: Value, axes: Value) -> Value:
    places = numbers(axes)
    if is_number(x) and not isinstance(x, tuple) and places in ((0,), (-1,)):
        return (x,)
    x = tensor(x)
    rank = x.dim() + len(places)
    for place in sorted(place % rank for place in places):
        x = x.unsqueeze(place)
    return x


@operator("Squeeze")
def squeeze(x: Value, axes: Value = None) -> Value:
    if is_number(x):
        return x[0] if isinstance(x, tuple) and len(x) == 1 else x
    if axes is None:
        return x.squeeze()
    return x.squeeze(tuple(place % x.dim() for place in numbers(axes)))


@operator("Flatten")
def flatten(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(math.prod(x.shape[: axis % (x.dim() + 1)]), -1)


@operator("Concat")
def concat(*values: Value, axis: int) -> Value:
    if all(map(is_number, values)):
        return tuple(item for value in values for item in numbers(value))
    like = next(value for value in values if isinstance(value, Tensor))
    parts = [tensor(value, like, like.dtype) for value in values]
    full = [part for part in parts if not is_empty_along(part, axis)] or parts[:1]
    return torch.cat(full, axis) if len(full) > 1 else full[0]


def is_empty_along(x: Tensor, axis: int) -> bool:
    """Return whether the axis is empty: the past before any token."""
    return isinstance(x.shape[axis], int) and x.shape[axis] == 0


@operator("Split")
def split(x: Value, sizes: Value = None, axis: int = 0, num_outputs: int | None = None, *, outputs: int = 1) -> tuple[Value, ...]:
    if is_number(x):
        given = numbers(sizes) if sizes is not None else equal_parts(len(x), num_outputs or outputs)
        ends = itertools.accumulate(given)
        return tuple(x[end - length : end] for end, length in zip(ends, given, strict=True))
    given = numbers(sizes) if sizes is not None else equal_parts(x.shape[axis], num_outputs or outputs)
    return torch.split(x, list(given), axis)


def equal_parts(length: int, count: int) -> tuple[int, ...]:
    """Return `count` lengths that sum to `length`, equal except for the last."""
    part = -(-length // count)
    return (*(part,) * (count - 1), length - part * (count - 1))


@operator("Slice")
def slice_(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    firsts, lasts = numbers(starts), numbers(ends)
    along = numbers(axes) if axes is not None else tuple(range(len(firsts)))
    strides = numbers(steps) if steps is not None else (1,) * len(firsts)
    for first, last, axis, step in zip(firsts, lasts, along, strides, strict=True):
        x = slice_axis(x, first, last, axis, step)
    return x


def slice_axis(x: Value, first: Any, last: Any, axis: int, step: int) -> Value:
    if is_number(x):
        return x[slice_bound(first) : slice_bound(last) : step]
    if step < 0:  # torch's steps are positive: the selection, reversed
        chosen = range(int(x.shape[axis]))[slice_bound(first) : slice_bound(last) : step]
        return x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64, device=x.device))
    key: list[slice] = [slice(None)] * x.dim()
    key[axis] = slice(None if isinstance(first, int) and first == 0 else slice_bound(first), slice_bound(last), step)
    return x[tuple(key)]


def slice_bound(place: Any) -> Any:
    """Return an end of a slice; None at or beyond ONNX's value for the end."""
    return None if isinstance(place, int) and not -END < place < END else place


@operator("Expand")
def expand(x: Value, shape: Value) -> Tensor:
    """Broadcast against the shape: an extent of 1 in it keeps the tensor's."""
    x, extents = tensor(x), numbers(shape)
    extents = (-1,) * (x.dim() - len(extents)) + extents
    new = len(extents) - x.dim()  # axes that x does not have
    return x.expand(extents[:new] + tuple(-1 if isinstance(size, int) and size == 1 else size for size in extents[new:]))


@operator("Tile")
def tile(x: Value, repeats: Value) -> Value:
    return numbers(x) * number(repeats) if is_number(x) and isinstance(number(repeats), int) else tensor(x).repeat(numbers(repeats))


@operator("Pad")
def pad(x: Tensor, pads: Value, value: Value = None, axes: Value = None, mode: str = "constant") -> Tensor:
    given = numbers(pads)
    count = len(given) // 2
    along = numbers(axes) if axes is not None else tuple(range(count))
    widths = {axis % x.dim(): (given[at], given[at + count]) for at, axis in enumerate(along)}
    first = next((axis for axis in range(x.dim()) if widths.get(axis, (0, 0)) != (0, 0)), x.dim())
    flat = [width for axis in reversed(range(first, x.dim())) for width in widths.get(axis, (0, 0))]
    names = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode == "constant":
        return F.pad(x, flat, value=0 if value is None else number(value))
    return F.pad(x, flat, mode=names[mode])


@operator("ConstantOfShape", creates=True)
def constant_of_shape(shape: Value, value: Any = 0.0, device: torch.device | None = None) -> Value:
    """Return `value`, a number, at every position; a short row of integers is a tuple of numbers, used for shapes."""
    extents = numbers(shape)
    if dtype_of(value) is torch.int64 and len(extents) == 1 and isinstance(extents[0], int) and extents[0] <= FEW:
        return (value,) * extents[0]
    return torch.full(extents, value, dtype=dtype_of(value), device=device)


@operator("Range", creates=True)
def range_(start: Value, limit: Value, delta: Value, device: torch.device | None = None) -> Tensor:
    return torch.arange(number(start), number(limit), number(delta), device=device)


@operator("EyeLike")
def eye_like(x: Tensor, k: int = 0, dtype: int | None = None) -> Tensor:
    rows, columns = (torch.arange(extent, device=x.device) for extent in x.shape)
    return (rows[:, None] + k == columns).to(x.dtype if dtype is None else DTYPES[dtype])


@operator("Trilu")
def trilu(x: Tensor, k: Value = None, upper: int = 1) -> Tensor:
    offset = 0 if k is None else number(k)
    return torch.triu(x, offset) if upper else torch.tril(x, offset)


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
    """Return positions that may be counted from the end as positions from the front, in torch's dtype for them."""
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
    """Return the position found along an axis: of equal values the first one, or the last."""
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
