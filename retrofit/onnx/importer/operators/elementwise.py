"""Element-wise ONNX operators, including casts, and reductions, as torch functions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.operators import (
    DTYPES,
    Operator,
    Value,
    cast_number,
    divide_numbers,
    dtype_of,
    function_name,
    is_number,
    map_numbers,
    number,
    numbers,
    operator,
    remainder_of_numbers,
    sqrt_number,
    tensor,
)


def elementwise(name: str, of_tensors: Operator, of_numbers: Operator | None = None) -> Operator:
    """Return the operator `name`, given its function on tensors and, if there is one, on single numbers."""

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
    """Return the numbers as a tensor with the dtype of `like`, the common one of a node's operands."""
    return tensor(value, like, None if dtype_of(value) is torch.bool else like.dtype)


def fold_operands(function: Operator) -> Operator:
    """Return a function of two operands as one of any number."""
    return lambda *operands: functools.reduce(function, operands)


def divide(a: Tensor, b: Value) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def larger(a: Tensor, b: Value) -> Tensor:
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


def smaller(a: Tensor, b: Value) -> Tensor:
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


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
bitwise_and = elementwise("BitwiseAnd", lambda a, b: a & tensor(b, a), lambda a, b: a & b)
bitwise_or = elementwise("BitwiseOr", lambda a, b: a | tensor(b, a), lambda a, b: a | b)
bitwise_xor = elementwise("BitwiseXor", lambda a, b: a ^ tensor(b, a), lambda a, b: a ^ b)
bitwise_not = elementwise("BitwiseNot", torch.bitwise_not, lambda a: ~a)
equal = elementwise("Equal", lambda a, b: a == b, lambda a, b: a == b)
greater = elementwise("Greater", lambda a, b: a > b, lambda a, b: a > b)
greater_or_equal = elementwise("GreaterOrEqual", lambda a, b: a >= b, lambda a, b: a >= b)
less = elementwise("Less", lambda a, b: a < b, lambda a, b: a < b)
less_or_equal = elementwise("LessOrEqual", lambda a, b: a <= b, lambda a, b: a <= b)


@operator("Mod")
def mod(x: Value, y: Value, fmod: int = 0) -> Value:
    if is_number(x) and is_number(y):
        return map_numbers(remainder_of_numbers if fmod else lambda a, b: a % b, x, y)
    return torch.fmod(tensor(x), tensor(y)) if fmod else torch.remainder(tensor(x), tensor(y))


@operator("IsInf")
def is_inf(x: Value, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    x = tensor(x)
    found = torch.isinf(x)
    found = found if detect_negative else found & (x > 0)
    return found if detect_positive else found & (x < 0)


@operator("Where")
def where(condition: Value, x: Value, y: Value) -> Value:
    given = (condition, x, y)
    if all(map(is_number, given)):
        return map_numbers(lambda chosen, a, b: a if chosen else b, *given)
    like = next(value for value in given if isinstance(value, Tensor))
    typed = next((value.dtype for value in (x, y) if isinstance(value, Tensor)), None)
    return torch.where(tensor(condition, like), tensor(x, like, typed), tensor(y, like, typed))


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
    """Return the input, as in inference: an exported model has no dropout."""
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


# ── Reductions ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reduction(name: str, of_tensor: Operator, of_numbers: Operator | None = None) -> Operator:
    """Return the operator `name`, given its function on a tensor along axes; the axes are an input or, before, an attribute."""

    def computed(
        x: Value, axes: Value = None, keepdims: int = 1, noop_with_empty_axes: int = 0, **of_old: tuple[int, ...]
    ) -> Value:
        axes = of_old.get("axes_attribute", axes)
        if is_number(x) and of_numbers is not None:
            result = functools.reduce(of_numbers, numbers(x)) if numbers(x) else x
            return (result,) if keepdims and isinstance(x, tuple) else result
        x = tensor(x)
        along = () if axes is None else numbers(axes)
        if not along and noop_with_empty_axes:
            return x
        return of_tensor(x, along or tuple(range(x.dim())), bool(keepdims))

    computed.__name__ = computed.__qualname__ = function_name(name)
    computed.__doc__ = f"ONNX's {name}."
    return operator(name)(computed)


def reduce_product(x: Tensor, along: tuple[int, ...], keep: bool) -> Tensor:
    for axis in along:
        x = x.prod(axis, keepdim=True)
    return x if keep else x.squeeze(along)


reduce_mean = reduction("ReduceMean", torch.mean)
reduce_sum = reduction("ReduceSum", torch.sum, lambda a, b: a + b)
reduce_max = reduction("ReduceMax", torch.amax, torch.sym_max)
reduce_min = reduction("ReduceMin", torch.amin, torch.sym_min)
reduce_prod = reduction("ReduceProd", reduce_product, lambda a, b: a * b)
reduce_l1 = reduction("ReduceL1", lambda x, along, keep: x.abs().sum(along, keep))
reduce_l2 = reduction("ReduceL2", lambda x, along, keep: torch.linalg.vector_norm(x, 2, along, keep))
reduce_sum_square = reduction("ReduceSumSquare", lambda x, along, keep: x.square().sum(along, keep))
reduce_log_sum_exp = reduction("ReduceLogSumExp", torch.logsumexp)
