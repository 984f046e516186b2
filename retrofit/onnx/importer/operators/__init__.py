"""ONNX operators as torch functions, grouped by subject; their table, by domain and name; the values that the functions take.

A function takes its inputs in ONNX's order and the attributes by name; it returns one value or a tuple. A value is a tensor or a
*number*: a Python or symbolic int, float or bool, or a flat tuple of them. If all inputs are numbers and numbers can express the
result, a function returns numbers. The shapes that ONNX graphs compute with (Shape, Gather, Concat, Reshape) thus stay numbers, so
that a graph captured again has dynamic shapes, and a constant factor is a number rather than a tensor of one element.

Source: the operator specifications of ONNX, operator sets 13 to 24.
"""

from __future__ import annotations

import builtins
import keyword
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
CHOICE = "retrofit.choice"  # in the metadata of an `If` that an export made of the named operator: both branches may be computed
Operator = Callable[..., Any]
Refusal = Callable[[dict[str, Any]], str]  # returns the unsupported part of a node's attributes, "" if there is none
OPERATORS: dict[tuple[str, str], Operator] = {}  # by domain and name
REFUSALS: dict[tuple[str, str], Refusal] = {}  # likewise
IGNORED: dict[tuple[str, str], list[str]] = {}  # likewise: attributes that have no effect here
FACTORIES: set[Operator] = set()  # functions that create a tensor from numbers and need its device


def operator(
    *names: str, domain: str = "", creates: bool = False, refuses: Refusal | None = None, ignores: str = ""
) -> Callable[[Operator], Operator]:
    """Register the decorated function for nodes of these names; one that `creates` a tensor from numbers gets its device.

    `refuses` returns the part of a node's attributes that the function does not support, "" if it supports all. Attributes in
    `ignores`, separated by spaces, have no effect here, unless `refuses` names them; the function does not get them.
    """

    def registered(function: Operator) -> Operator:
        for name in names:
            OPERATORS[domain, name] = function
            IGNORED[domain, name] = ignores.split()
            if refuses is not None:
                REFUSALS[domain, name] = refuses
        if creates:
            FACTORIES.add(function)
        return function

    return registered


def function_name(name: str) -> str:
    """Return the name of the function: `greater_or_equal` for `GreaterOrEqual`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
    return f"{words}_" if keyword.iskeyword(words) or hasattr(builtins, words) else words


Number: TypeAlias = Any
Value: TypeAlias = Any  # a Tensor or a Number

# ── Values ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
}  # by ONNX's number
TYPES_OF_NUMBERS = (torch.float32, torch.int64, torch.bool)  # the dtypes of numbers as tensors, without further information


def is_number(value: Value) -> bool:
    return value is not None and not isinstance(value, Tensor)


def tensor(value: Value, like: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the value as a tensor, on the device of `like`."""
    if isinstance(value, Tensor):
        return value
    device = like.device if like is not None else None
    if isinstance(value, tuple):
        parts = [tensor(item, like, dtype) for item in value]
        return torch.stack(parts) if parts else torch.empty(0, dtype=dtype or torch.int64, device=device)
    return torch.full((), value, dtype=dtype or dtype_of(value), device=device)


def dtype_of(value: Number) -> torch.dtype:
    """Return the dtype of the number, or of the first of several, as a tensor."""
    first = next(iter(value), 0) if isinstance(value, tuple) else value
    if isinstance(first, (bool, torch.SymBool)):
        return torch.bool
    return torch.float32 if isinstance(first, (float, torch.SymFloat)) else torch.int64


def numbers(value: Value) -> tuple[Any, ...]:
    """Return the value as a tuple of numbers; reads a tensor's values, which a graph that is captured again cannot do."""
    if isinstance(value, Tensor):
        return tuple(value.reshape(-1).tolist())
    return value if isinstance(value, tuple) else (value,)


def number(value: Value) -> Any:
    """Return the value as a single number."""
    (only,) = numbers(value)
    return only


def map_numbers(function: Callable[..., Any], *values: Number) -> Number:
    """Return a function of single numbers extended to tuples of them; a single one is combined with every item of the others."""
    lengths = {len(value) for value in values if isinstance(value, tuple)}
    if not lengths:
        return function(*values)
    length = next(iter(lengths - {1}), 1)
    columns = (value if isinstance(value, tuple) else (value,) for value in values)
    rows = zip(*(column if len(column) == length else column * length for column in columns), strict=True)
    return tuple(function(*row) for row in rows)


def cast_number(value: Number, dtype: torch.dtype) -> Number:
    """Return the number as the Python type for the dtype."""
    if isinstance(value, tuple):
        return tuple(cast_number(item, dtype) for item in value)
    if dtype is torch.bool:
        return value != 0
    if dtype.is_floating_point:
        return torch.sym_float(value)
    return torch.sym_int(value)


def sqrt_number(value: Number) -> Number:
    return torch.sym_sqrt(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else math.sqrt(value)


def divide_numbers(a: Number, b: Number) -> Number:
    """Return ONNX's quotient: for integers the integer part."""
    if isinstance(a, (float, torch.SymFloat)) or isinstance(b, (float, torch.SymFloat)):
        return a / b
    a_is_negative, b_is_negative = (isinstance(value, int) and value < 0 for value in (a, b))
    return -(-a // b) if a_is_negative != b_is_negative else a // b


def remainder_of_numbers(a: Number, b: Number) -> Number:
    """Return the remainder of `a` divided by `b`, with the sign of `a`."""
    return math.fmod(a, b) if isinstance(a, float) else a - b * divide_numbers(a, b)
