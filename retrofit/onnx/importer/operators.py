"""ONNX's operators on elements, shapes, places and axes as torch functions, one small function each; the table of all.

Inputs come in ONNX's order, attributes by name; outputs are one value or a tuple. Where all inputs are numbers
(`retrofit.onnx.values`) and the result can be said in numbers, it is.

Source: the operator specifications of ONNX, operator sets 13 to 24.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.values import (
    DTYPES,
    Value,
    cast,
    dtype_of,
    is_number,
    number,
    numbers,
    place_by_place,
    quotient,
    square_root,
    tensor,
)

Operator = Callable[..., Any]

OPERATORS: dict[tuple[str, str], Operator] = {}  # by domain and name
REFUSALS: dict[
    tuple[str, str], Callable[[dict[str, Any]], str]
] = {}  # what of a node's attributes no function computes, "" if nothing
MAKERS: set[Operator] = set()  # those that make a tensor from numbers and are told its device
END = 2**31 - 1  # "to the end" in a slice is this or more
FEW = 16  # numbers up to which a constant of one value is numbers and no tensor


def operator(
    *names: str, domain: str = "", makes: bool = False, refuses: Callable[[dict[str, Any]], str] | None = None
) -> Callable[[Operator], Operator]:
    """Nodes of these names call the decorated function; one that `makes` is told the device of what it makes.

    `refuses` says what of a node's attributes the function does not compute, "" where it computes all.
    """

    def registered(function: Operator) -> Operator:
        for name in names:
            OPERATORS[domain, name] = function
            if refuses is not None:
                REFUSALS[domain, name] = refuses
        if makes:
            MAKERS.add(function)
        return function

    return registered


# ── Element by element ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def elementwise(name: str, of_tensors: Operator, of_numbers: Operator | None = None) -> Operator:
    """The operator `name`, from what it does to tensors and, if it does anything, to single numbers."""

    def computed(*values: Value) -> Value:
        like = next((value for value in values if isinstance(value, Tensor)), None)
        if like is None and of_numbers is not None:
            return place_by_place(of_numbers, *values)
        if like is None:
            return of_tensors(*map(tensor, values))
        first, *others = values
        others = [tensor(value, like) if isinstance(value, tuple) else value for value in others]
        if is_number(first):  # of the same type as the others, as ONNX has it
            first = tensor(first, like, None if dtype_of(first) is torch.bool else like.dtype)
        return of_tensors(first, *others)

    computed.__name__ = computed.__qualname__ = attribute(name)
    computed.__doc__ = f"ONNX's {name}."
    return operator(name)(computed)


def attribute(name: str) -> str:
    """The name of the function: `greater_or_equal` for `GreaterOrEqual`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
    return f"{words}_" if keyword.iskeyword(words) or hasattr(builtins, words) else words


def folded(function: Operator) -> Operator:
    """A function of two operands as one of any number."""

    def of_many(first: Any, *others: Any) -> Any:
        for other in others:
            first = function(first, other)
        return first

    return of_many


def whole_quotient(one: Tensor, other: Value) -> Tensor:
    return one / other if one.is_floating_point() else torch.div(one, other, rounding_mode="trunc")


def larger(one: Tensor, other: Value) -> Tensor:
    return torch.maximum(one, other) if isinstance(other, Tensor) else one.clamp(min=other)


def smaller(one: Tensor, other: Value) -> Tensor:
    return torch.minimum(one, other) if isinstance(other, Tensor) else one.clamp(max=other)


add = elementwise("Add", lambda a, b: a + b, lambda a, b: a + b)
sub = elementwise("Sub", lambda a, b: a - b, lambda a, b: a - b)
mul = elementwise("Mul", lambda a, b: a * b, lambda a, b: a * b)
div = elementwise("Div", whole_quotient, quotient)
pow_ = elementwise("Pow", lambda a, b: (a**b).to(a.dtype), lambda a, b: a**b)
sum_ = elementwise("Sum", folded(lambda a, b: a + b), folded(lambda a, b: a + b))
max_ = elementwise("Max", folded(larger), folded(torch.sym_max))
min_ = elementwise("Min", folded(smaller), folded(torch.sym_min))
neg = elementwise("Neg", torch.neg, lambda a: -a)
abs_ = elementwise("Abs", torch.abs, lambda a: torch.sym_max(a, -a))
sqrt = elementwise("Sqrt", torch.sqrt, square_root)
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
        return place_by_place(lambda a, b: a % b, one, other)
    return torch.fmod(tensor(one), tensor(other)) if fmod else torch.remainder(tensor(one), tensor(other))


@operator("Where")
def where(condition: Value, one: Value, other: Value) -> Value:
    given = (condition, one, other)
    if all(map(is_number, given)):
        return place_by_place(lambda chosen, a, b: a if chosen else b, *given)
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
    return cast(x, DTYPES[to]) if is_number(x) else x.to(DTYPES[to])


@operator("CastLike")
def cast_like(x: Value, like: Value, **rounding: Any) -> Value:
    dtype = like.dtype if isinstance(like, Tensor) else dtype_of(like)
    return cast(x, dtype) if is_number(x) else x.to(dtype)


# ── Shapes and layout ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@operator("Shape")
def shape(x: Value, start: int = 0, end: int | None = None) -> Value:
    found = tuple(x.shape) if isinstance(x, Tensor) else (len(x),) if isinstance(x, tuple) else ()
    return found[start:end]


@operator("Size")
def size(x: Value) -> Value:
    return x.numel() if isinstance(x, Tensor) else len(numbers(x))


@operator("Reshape")
def reshape(x: Value, shape: Value, allowzero: int = 0) -> Value:
    wanted = numbers(shape)
    if is_number(x) and len(wanted) <= 1:
        return in_a_row(x) if wanted else number(x)
    if isinstance(x, tuple) and wanted == (-1, 2):  # of every axis what is put before it and after: numbers in pairs
        return tuple(zip(x[::2], x[1::2], strict=True))
    x = tensor(x)
    if not allowzero:
        wanted = tuple(x.shape[at] if isinstance(one, int) and one == 0 else one for at, one in enumerate(wanted))
    return x.reshape(wanted)


def in_a_row(x: Value) -> tuple[Any, ...]:
    """Numbers, or rows of numbers, as one row."""
    return tuple(one for part in numbers(x) for one in numbers(part))


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
    axis %= x.dim() + 1
    rows = 1
    for extent in x.shape[:axis]:
        rows = rows * extent
    return x.reshape(rows, -1)


@operator("Concat")
def concat(*values: Value, axis: int) -> Value:
    if all(map(is_number, values)):
        return tuple(one for value in values for one in numbers(value))
    like = next(value for value in values if isinstance(value, Tensor))
    parts = [tensor(value, like) for value in values]
    full = [part for part in parts if not is_empty(part, axis)] or parts[:1]
    return torch.cat(full, axis) if len(full) > 1 else full[0]


def is_empty(x: Tensor, axis: int) -> bool:
    """Whether nothing is there to be joined: the past before any token."""
    return isinstance(x.shape[axis], int) and x.shape[axis] == 0


@operator("Split")
def split(x: Value, sizes: Value = None, axis: int = 0, num_outputs: int | None = None, *, outputs: int = 1) -> tuple[Value, ...]:
    if is_number(x):
        given = numbers(sizes) if sizes is not None else equal_parts(len(x), num_outputs or outputs)
        ends = [sum(given[: at + 1]) for at in range(len(given))]
        return tuple(x[end - length : end] for end, length in zip(ends, given, strict=True))
    given = numbers(sizes) if sizes is not None else equal_parts(x.shape[axis], num_outputs or outputs)
    return torch.split(x, list(given), axis)


def equal_parts(length: int, count: int) -> tuple[int, ...]:
    each = -(-length // count)
    return (*(each for _ in range(count - 1)), length - each * (count - 1))


@operator("Slice")
def slice_(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    firsts, lasts = numbers(starts), numbers(ends)
    along = numbers(axes) if axes is not None else tuple(range(len(firsts)))
    strides = numbers(steps) if steps is not None else (1,) * len(firsts)
    for first, last, axis, step in zip(firsts, lasts, along, strides, strict=True):
        x = sliced(x, first, last, axis, step)
    return x


def sliced(x: Value, first: Any, last: Any, axis: int, step: int) -> Value:
    if is_number(x):
        return x[bound(first) : bound(last) : step]
    if step < 0:  # torch steps forward only: what is left, turned round
        chosen = range(int(x.shape[axis]))[bound(first) : bound(last) : step]
        return x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64, device=x.device))
    key: list[slice] = [slice(None)] * x.dim()
    key[axis] = slice(None if isinstance(first, int) and first == 0 else bound(first), bound(last), step)
    return x[tuple(key)]


def bound(place: Any) -> Any:
    """An end of a slice; None at, or beyond, what ONNX takes for the end."""
    return None if isinstance(place, int) and not -END < place < END else place


@operator("Expand")
def expand(x: Value, shape: Value) -> Tensor:
    """Broadcast against the shape: an extent of 1 in it leaves the tensor's."""
    x, wanted = tensor(x), numbers(shape)
    lead = x.dim() - len(wanted)
    wanted = (*(-1 for _ in range(lead)), *wanted)
    return x.expand(
        tuple(-1 if isinstance(one, int) and one == 1 and at >= len(wanted) - x.dim() else one for at, one in enumerate(wanted))
    )


@operator("Tile")
def tile(x: Value, repeats: Value) -> Value:
    return numbers(x) * number(repeats) if is_number(x) and isinstance(number(repeats), int) else tensor(x).repeat(numbers(repeats))


@operator("Pad")
def pad(x: Tensor, pads: Value, value: Value = None, axes: Value = None, mode: str = "constant") -> Tensor:
    given = numbers(pads)
    count = len(given) // 2
    along = numbers(axes) if axes is not None else tuple(range(count))
    widths = {axis % x.dim(): (given[at], given[at + count]) for at, axis in enumerate(along)}
    first = x.dim() if not widths else next((axis for axis in range(x.dim()) if widths.get(axis, (0, 0)) != (0, 0)), x.dim())
    flat = [width for axis in reversed(range(first, x.dim())) for width in widths.get(axis, (0, 0))]
    names = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode == "constant":
        return F.pad(x, flat, value=0 if value is None else number(value))
    return F.pad(x, flat, mode=names[mode])


@operator("ConstantOfShape", makes=True)
def constant_of_shape(shape: Value, value: Any = 0.0, device: torch.device | None = None) -> Value:
    """`value`, a number, in every place; few whole ones in a row are numbers, which shapes are computed from."""
    wanted = numbers(shape)
    if dtype_of(value) is torch.int64 and len(wanted) == 1 and isinstance(wanted[0], int) and wanted[0] <= FEW:
        return (value,) * wanted[0]
    return torch.full(wanted, value, dtype=dtype_of(value), device=device)


@operator("Range", makes=True)
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


# ── Selecting ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@operator("Gather")
def gather(x: Value, indices: Value, axis: int = 0) -> Value:
    if is_number(x) and is_number(indices):
        return place_by_place(lambda at: x[at], indices)
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
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


@operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    indices = tensor(indices, x)
    leading = tuple(
        torch.arange(x.shape[at], device=x.device).reshape(-1, *(1 for _ in range(indices.dim() - 2 - at)))
        for at in range(batch_dims)
    )
    return x[(*leading, *indices.unbind(-1))]


def other_reduction(attributes: dict[str, Any]) -> str:
    kind = attributes.get("reduction", "none")
    return "" if kind in ("none", "add") else f"reduction={kind}"


@operator("ScatterND", refuses=other_reduction)
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    return tensor(x).index_put(tensor(indices).unbind(-1), tensor(updates), accumulate=reduction == "add")


@operator("ScatterElements")
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none") -> Tensor:
    if reduction == "none":
        return torch.scatter(x, axis, indices, updates)
    kinds = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return torch.scatter_reduce(x, axis, indices, updates, kinds[reduction])


@operator("OneHot")
def one_hot(indices: Tensor, depth: Value, values: Value, axis: int = -1) -> Tensor:
    off, on = numbers(values)
    places = torch.arange(number(depth), device=indices.device)
    chosen = indices.unsqueeze(-1) == places
    made = torch.where(chosen, tensor(on, indices), tensor(off, indices))
    return made.movedim(-1, axis)


@operator("TopK")
def top_k(x: Tensor, k: Value, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    found = torch.topk(x, number(k), axis, bool(largest), bool(sorted))
    return found.values, found.indices


@operator("ArgMax")
def arg_max(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmax(axis, bool(keepdims))


@operator("ArgMin")
def arg_min(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmin(axis, bool(keepdims))


@operator("NonZero")
def non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(tensor(x)).t()


@operator("CumSum")
def cum_sum(x: Tensor, axis: Value, exclusive: int = 0, reverse: int = 0) -> Tensor:
    along = number(axis)
    turned = x.flip(along) if reverse else x
    total = turned.cumsum(along, dtype=x.dtype)
    total = total - turned if exclusive else total
    return total.flip(along) if reverse else total


# ── Reductions ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reduction(name: str, of_tensor: Operator, of_numbers: Operator | None = None) -> Operator:
    """The operator `name`, from what it does to a tensor along some axes; the axes are an input or, before, an attribute."""

    def computed(
        x: Value, axes: Value = None, keepdims: int = 1, noop_with_empty_axes: int = 0, **of_old: tuple[int, ...]
    ) -> Value:
        axes = of_old.get("axes_attribute", axes)
        if is_number(x) and of_numbers is not None:
            made = x
            for position, one in enumerate(numbers(x)):
                made = one if position == 0 else of_numbers(made, one)
            return (made,) if keepdims and isinstance(x, tuple) else made
        x = tensor(x)
        along = () if axes is None else numbers(axes)
        if not along and noop_with_empty_axes:
            return x
        return of_tensor(x, along or tuple(range(x.dim())), bool(keepdims))

    computed.__name__ = computed.__qualname__ = attribute(name)
    computed.__doc__ = f"ONNX's {name}."
    return operator(name)(computed)


def product_along(x: Tensor, along: tuple[int, ...], keep: bool) -> Tensor:
    for axis in along:
        x = x.prod(axis, keepdim=True)
    return x if keep else x.squeeze(along)


reduce_mean = reduction("ReduceMean", torch.mean)
reduce_sum = reduction("ReduceSum", torch.sum, lambda a, b: a + b)
reduce_max = reduction("ReduceMax", torch.amax, torch.sym_max)
reduce_min = reduction("ReduceMin", torch.amin, torch.sym_min)
reduce_prod = reduction("ReduceProd", product_along, lambda a, b: a * b)
reduce_l1 = reduction("ReduceL1", lambda x, along, keep: x.abs().sum(along, keep))
reduce_l2 = reduction("ReduceL2", lambda x, along, keep: torch.linalg.vector_norm(x, 2, along, keep))
reduce_sum_square = reduction("ReduceSumSquare", lambda x, along, keep: x.square().sum(along, keep))
reduce_log_sum_exp = reduction("ReduceLogSumExp", torch.logsumexp)
