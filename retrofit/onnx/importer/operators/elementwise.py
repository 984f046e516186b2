"""ONNX operators that work element by element, casts among them, as torch functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.operators.table import Operator, function_name, operator
from retrofit.onnx.importer.values import (
    DTYPES,
    Value,
    cast_number,
    divide_numbers,
    dtype_of,
    is_number,
    map_numbers,
    number,
    remainder_of_numbers,
    sqrt_number,
    tensor,
)


def elementwise(name: str, of_tensors: Operator, of_numbers: Operator | None = None) -> Operator:
    """The operator `name`, from what it does to tensors and, if it does anything, to single numbers."""

    def computed(*values: Value) -> Value:
        like = next((value for value in values if isinstance(value, Tensor)), None)
        if like is None and of_numbers is not None:
            return map_numbers(of_numbers, *values)
        if like is None:
            return of_tensors(*map(tensor, values))
        first, *others = values
        others = [as_tensor_like(value, like) if isinstance(value, tuple) else value for value in others]
        return of_tensors(as_tensor_like(first, like) if is_number(first) else first, *others)

    computed.__name__ = computed.__qualname__ = function_name(name)
    computed.__doc__ = f"ONNX's {name}."
    return operator(name)(computed)


def as_tensor_like(value: Value, like: Tensor) -> Tensor:
    """The numbers as a tensor of the type of `like`, which operands of a node have in common."""
    return tensor(value, like, None if dtype_of(value) is torch.bool else like.dtype)


def fold_operands(function: Operator) -> Operator:
    """A function of two operands as one of any number."""

    def of_many(first: Any, *others: Any) -> Any:
        for other in others:
            first = function(first, other)
        return first

    return of_many


def divide(one: Tensor, other: Value) -> Tensor:
    return one / other if one.is_floating_point() else torch.div(one, other, rounding_mode="trunc")


def larger(one: Tensor, other: Value) -> Tensor:
    return torch.maximum(one, other) if isinstance(other, Tensor) else one.clamp(min=other)


def smaller(one: Tensor, other: Value) -> Tensor:
    return torch.minimum(one, other) if isinstance(other, Tensor) else one.clamp(max=other)


add = elementwise("Add", lambda a, b: a + b, lambda a, b: a + b)
sub = elementwise("Sub", lambda a, b: a - b, lambda a, b: a - b)
mul = elementwise("Mul", lambda a, b: a * b, lambda a, b: a * b)
div = elementwise("Div", divide, divide_numbers)
pow_ = elementwise("Pow", lambda a, b: (a**b).to(a.dtype), lambda a, b: a**b)
sum_ = elementwise("Sum", fold_operands(lambda a, b: a + b), fold_operands(lambda a, b: a + b))
max_ = elementwise("Max", fold_operands(larger), fold_operands(torch.sym_max))
min_ = elementwise("Min", fold_operands(smaller), fold_operands(torch.sym_min))
neg = elementwise("Neg", torch.neg, lambda a: -a)
abs_ = elementwise("Abs", torch.abs, lambda a: torch.sym_max(a, -a))
sqrt = elementwise("Sqrt", torch.sqrt, sqrt_number)
reciprocal = elementwise("Reciprocal", torch.reciprocal, lambda a: 1.0 / a)
floor = elementwise("Floor", torch.floor, lambda a: torch.sym_float(a // 1))
ceil = elementwise("Ceil", torch.ceil, lambda a: torch.sym_float(-(-a // 1)))
round_ = elementwise("Round", torch.round)
exp = elementwise("Exp", torch.exp)
log = elementwise("Log", torch.log)
sin = elementwise("Sin", torch.sin)
cos = elementwise("Cos", torch.cos)
tan = elementwise("Tan", torch.tan)
asin = elementwise("Asin", torch.asin)
acos = elementwise("Acos", torch.acos)
atan = elementwise("Atan", torch.atan)
sinh = elementwise("Sinh", torch.sinh)
cosh = elementwise("Cosh", torch.cosh)
asinh = elementwise("Asinh", torch.asinh)
acosh = elementwise("Acosh", torch.acosh)
atanh = elementwise("Atanh", torch.atanh)
erf = elementwise("Erf", torch.erf)
tanh = elementwise("Tanh", torch.tanh)
sigmoid = elementwise("Sigmoid", torch.sigmoid)
relu = elementwise("Relu", F.relu)
softplus = elementwise("Softplus", F.softplus)
softsign = elementwise("Softsign", F.softsign)
hard_swish = elementwise("HardSwish", F.hardswish)
mish = elementwise("Mish", F.mish)
sign = elementwise("Sign", torch.sign, lambda a: 1 if a > 0 else -1 if a < 0 else 0)
is_na_n = elementwise("IsNaN", torch.isnan)
not_ = elementwise("Not", torch.logical_not, lambda a: not a)
and_ = elementwise("And", lambda a, b: a & tensor(b, a), lambda a, b: a and b)
or_ = elementwise("Or", lambda a, b: a | tensor(b, a), lambda a, b: a or b)
xor = elementwise("Xor", lambda a, b: a ^ tensor(b, a), lambda a, b: bool(a) is not bool(b))
equal = elementwise("Equal", lambda a, b: a == b, lambda a, b: a == b)
greater = elementwise("Greater", lambda a, b: a > b, lambda a, b: a > b)
greater_or_equal = elementwise("GreaterOrEqual", lambda a, b: a >= b, lambda a, b: a >= b)
less = elementwise("Less", lambda a, b: a < b, lambda a, b: a < b)
less_or_equal = elementwise("LessOrEqual", lambda a, b: a <= b, lambda a, b: a <= b)


@operator("Mod")
def mod(one: Value, other: Value, fmod: int = 0) -> Value:
    if is_number(one) and is_number(other):
        return map_numbers(remainder_of_numbers if fmod else lambda a, b: a % b, one, other)
    return torch.fmod(tensor(one), tensor(other)) if fmod else torch.remainder(tensor(one), tensor(other))


@operator("IsInf")
def is_inf(x: Value, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    x = tensor(x)
    found = torch.isinf(x)
    found = found if detect_negative else found & (x > 0)
    return found if detect_positive else found & (x < 0)


@operator("Where")
def where(condition: Value, one: Value, other: Value) -> Value:
    given = (condition, one, other)
    if all(map(is_number, given)):
        return map_numbers(lambda chosen, a, b: a if chosen else b, *given)
    like = next(value for value in given if isinstance(value, Tensor))
    typed = next((value.dtype for value in (one, other) if isinstance(value, Tensor)), None)
    return torch.where(tensor(condition, like), tensor(one, like, typed), tensor(other, like, typed))


@operator("Clip")
def clip(x: Value, low: Value = None, high: Value = None) -> Value:
    if is_number(x):
        x = x if low is None else max_(x, low)
        return x if high is None else min_(x, high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = (None if bound is None else tensor(bound, x, x.dtype) for bound in (low, high))
        return torch.clamp(x, low, high)
    return torch.clamp(x, *(None if bound is None else number(bound) for bound in (low, high)))


@operator("Gelu")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("Swish")
def swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("LeakyRelu")
def leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("Elu")
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@operator("PRelu")
def p_relu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


@operator("Dropout")
def dropout(x: Tensor, ratio: Value = None, training: Value = None, **seed: Any) -> tuple[Tensor, Tensor]:
    """As in inference: an exported model drops nothing."""
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("Identity")
def identity(x: Value) -> Value:
    return x


@operator("Cast")
def cast_to(x: Value, to: int, **rounding: Any) -> Value:
    return cast_number(x, DTYPES[to]) if is_number(x) else x.to(DTYPES[to])


@operator("CastLike")
def cast_like(x: Value, like: Value, **rounding: Any) -> Value:
    dtype = like.dtype if isinstance(like, Tensor) else dtype_of(like)
    return cast_number(x, dtype) if is_number(x) else x.to(dtype)
