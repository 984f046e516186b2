"""The values of an imported ONNX graph: tensors, and numbers that stay numbers.

A *number* is a Python or symbolic int, float or bool, or a flat tuple of them. The shapes that ONNX graphs compute on (Shape,
Gather, Concat, Reshape) are numbers all the way, so that a graph captured again has dynamic shapes, and a constant factor is a
factor and not a tensor of one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = Any
Value: TypeAlias = Any  # a Tensor or a Number

DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}  # by the number that ONNX gives them
TYPES_OF_NUMBERS = (torch.float32, torch.int64, torch.bool)  # what numbers are as tensors, where nothing else is known


def is_number(value: Value) -> bool:
    return value is not None and not isinstance(value, Tensor)


def tensor(value: Value, like: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The value as a tensor, on the device of `like`."""
    if isinstance(value, Tensor):
        return value
    device = like.device if like is not None else None
    if isinstance(value, tuple):
        parts = [tensor(one, like, dtype) for one in value]
        return torch.stack(parts) if parts else torch.empty(0, dtype=dtype or torch.int64, device=device)
    return torch.full((), value, dtype=dtype or dtype_of(value), device=device)


def dtype_of(value: Number) -> torch.dtype:
    """What the number, or the first of several, is as a tensor."""
    first = (value or (0,))[0] if isinstance(value, tuple) else value
    if isinstance(first, (bool, torch.SymBool)):
        return torch.bool
    return torch.float32 if isinstance(first, (float, torch.SymFloat)) else torch.int64


def numbers(value: Value) -> tuple[Any, ...]:
    """The value as a tuple of numbers; a tensor is read for it, which a graph that is captured again cannot do."""
    if isinstance(value, Tensor):
        return tuple(value.reshape(-1).tolist())
    return value if isinstance(value, tuple) else (value,)


def number(value: Value) -> Any:
    """The value as a single number."""
    (only,) = numbers(value)
    return only


def map_numbers(function: Callable[..., Any], *values: Number) -> Number:
    """A function of single numbers on tuples of them; a single one goes with every place of the others."""
    lengths = {len(value) for value in values if isinstance(value, tuple)}
    if not lengths:
        return function(*values)
    length = next(iter(lengths - {1}), 1)
    rows = (
        (value if len(value) == length else value * length) if isinstance(value, tuple) else (value,) * length for value in values
    )
    return tuple(function(*row) for row in zip(*rows, strict=True))


def cast_number(value: Number, dtype: torch.dtype) -> Number:
    """The number in the kind of number that the dtype holds."""
    if isinstance(value, tuple):
        return tuple(cast_number(one, dtype) for one in value)
    if dtype is torch.bool:
        return value != 0
    if dtype.is_floating_point:
        return torch.sym_float(value)
    return torch.sym_int(value)


def sqrt_number(value: Number) -> Number:
    return torch.sym_sqrt(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else math.sqrt(value)


def divide_numbers(one: Number, other: Number) -> Number:
    """ONNX's quotient: of integers the whole part."""
    if isinstance(one, (float, torch.SymFloat)) or isinstance(other, (float, torch.SymFloat)):
        return one / other
    below = [isinstance(each, int) and each < 0 for each in (one, other)]
    return -(-one // other) if below[0] != below[1] else one // other


def remainder_of_numbers(one: Number, other: Number) -> Number:
    """What is left of `one`, with its sign, when it is divided."""
    return math.fmod(one, other) if isinstance(one, float) else one - other * divide_numbers(one, other)
