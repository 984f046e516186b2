"""A forward in a wider arithmetic than the dtype of its model, buffers and inputs, or with its sums in another order.

Every operation is intercepted below autograd (`TorchDispatchMode`): its narrower floating-point arguments are widened, and so is
every narrower dtype that the code names. So `.float()` in a norm, a rotary table or a router is wide too. The model is never
copied, and only one of its weights at a time exists in both widths: a large one is multiplied in slices.

Tensors that the code writes into stay narrow; the written values are stored in full next to them as long as the context lasts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SLICE = 1 << 18  # elements of a weight that are wide at a time: as many as a cache holds
WIDTH = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}

aten = torch.ops.aten
Kind = Literal["plain", "view", "write", "random", "selection"]
UNTOUCHED = {aten.view.dtype, aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor}
SELECTIONS = {aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default, aten.masked_select.default}

STRICT = {
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.rms_norm,  # these accept several widths, and warn of them
    torch.rms_norm,
    aten.rms_norm.default,
}

RANDOM = frozenset(  # random operations; attention with a dropout computes first
    "bernoulli cauchy exponential geometric log_normal multinomial native_dropout normal normal_functional poisson rand rand_like"
    " randint randint_like randn randn_like random randperm rrelu_with_noise uniform".split()
)

# if no dtype is named, these use the default one
OF_DEFAULT = {aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator, aten.normal.float_float}


@functools.cache
def kind_of(function: OpOverload) -> Kind:
    """Return what an operation does with the memory of its arguments."""
    if function._schema.name.removeprefix("aten::").rstrip("_") in RANDOM:
        return "random"
    if written_arguments(function):
        return "write"
    if any(result.alias_info is not None for result in function._schema.returns):
        return "view"
    return "selection" if function in SELECTIONS else "plain"


@contextlib.contextmanager
def as_stored() -> Iterator[None]:
    """Within this context operations compute in the dtypes of their arguments, whatever arithmetic context surrounds it."""
    with _disable_current_modes():
        yield


class SameWidth(TorchFunctionMode):
    """Widens the arguments of functions that refuse several widths, or warn of them, before any dispatcher.

    The same is done if an argument needs a gradient: autograd then records the cast, and the backward pass is wide too. Gradients
    of narrow parameters are rounded once, at the end.
    """

    def __init__(self, widened: Widened) -> None:
        super().__init__()
        self.widened = widened

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in BACKWARD:  # wide as recorded; the mode would widen values that are rounded for the parameters
            with _disable_current_modes():
                return function(*args, **kwargs)
        if function in STRICT or (torch.is_grad_enabled() and computes(name) and needs_gradient((args, *kwargs.values()))):
            args, kwargs = self.convert(args), {name: self.convert(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    def convert(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self.convert, value))
        if not isinstance(value, Tensor) or not self.widened.is_narrow(value.dtype):
            return value
        return value.to(COMPLEX[self.widened.dtype] if value.is_complex() else self.widened.dtype)


BACKWARD = ("backward", "grad")


def computes(name: str) -> bool:
    """Return whether the function of that name computes something, rather than reading an attribute or changing a tensor."""
    in_place = name.endswith("_") and not name.endswith("__")
    return not in_place and name not in ("__get__", "__set__", "retain_grad", "register_hook", "untyped_storage")


def needs_gradient(value: Any) -> bool:
    """Return whether a tensor among the arguments needs a gradient."""
    if isinstance(value, (tuple, list)):
        return any(map(needs_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


class Widened(TorchDispatchMode):
    """Within this context everything is computed in `dtype`, float32 or float64, in whatever narrower dtype it is stored.

    The outputs of a forward have that dtype. Random numbers are the same as without, and widened. Code that compares dtypes itself
    before it calls torch (`nn.LSTM`) may refuse its arguments.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype
        self.width = WIDTH[dtype]
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # storage → its tensor, kept alive, and the wide one

    def __enter__(self) -> Widened:
        self.default = torch.get_default_dtype()  # the dtype of quotients of integers
        if self.is_narrow(self.default):
            torch.set_default_dtype(self.dtype)
        super().__enter__()
        self.same_width = SameWidth(self)
        self.same_width.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.same_width.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)
        torch.set_default_dtype(self.default)
        self.written.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, HigherOrderOperator):
            with self.again():
                return function(*args, **kwargs)
        if function in UNTOUCHED:
            return function(*args, **kwargs)
        if is_composite(function):
            with torch._C.DisableTorchFunction(), self.again():
                return function.decompose(*args, **kwargs)
        kind = kind_of(function)
        if kind == "view":
            return function(*args, **kwargs)
        if kind == "selection" and self.is_narrow(args[0].dtype) and not self.is_written(args[0]):
            return self.widen(function(*args, **kwargs))
        if kind == "random":
            return self.draw(function, args, kwargs)
        if kind == "write":
            return self.write(function, args, kwargs)
        if function is aten._grouped_mm.default:
            return self.multiply_groups(*bind(function, args, kwargs).values())
        if function in PRODUCTS and (wide := self.multiply_in_slices(function, args)) is not None:
            return wide
        return self.widen(function(*self.widen(args), **{name: self.widen(value) for name, value in kwargs.items()}))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within this context, inside an operation, the operations that it consists of are intercepted too."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    # ── Widening ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_narrow(self, dtype: torch.dtype) -> bool:
        return WIDTH.get(dtype, 8) < self.width or (dtype is torch.complex64 and self.width == 8)

    def widen(self, value: Any) -> Any:
        """Return the value with every narrow tensor and dtype in it widened."""
        if isinstance(value, Tensor):
            if not self.is_narrow(value.dtype):
                return value
            if self.is_written(value):
                wide = self.written[storage_key(value)][1]
                return wide.as_strided(value.shape, value.stride(), value.storage_offset())
            return value.to(COMPLEX[self.dtype] if value.is_complex() else self.dtype)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.widen, value)) if type(value) in (tuple, list) else value
        if isinstance(value, torch.dtype) and self.is_narrow(value):
            return COMPLEX[self.dtype] if value.is_complex else self.dtype
        return value

    def multiply_in_slices(self, function: OpOverload, args: Any) -> Tensor | None:
        """Return the product with a large narrow matrix, some columns (in a batch, some matrices) at a time; else None."""
        *others, weight = args[: PRODUCTS[function]]
        if not self.is_narrow(weight.dtype) or weight.numel() <= SLICE or self.is_written(weight):
            return None
        if weight.dim() == 3 and len(weight) == 1:  # one row of inputs, which torch multiplies as a batch
            whole = self.multiply_in_slices(aten.mm.default, (others[0][0], weight[0]))
            return None if whole is None else whole.unsqueeze(0)
        batched = weight.dim() == 3
        along = 0 if batched else 1
        step = max(1, SLICE * weight.shape[along] // weight.numel())
        first, *rest = map(self.widen, others)
        parts = []
        memory = torch.empty_like(weight.narrow(along, 0, step), dtype=self.dtype)  # one for all pieces, which avoids fragmentation
        for start in range(0, weight.shape[along], step):
            narrow = weight.narrow(along, start, min(step, weight.shape[along] - start))
            piece = memory.narrow(along, 0, narrow.shape[along]).copy_(narrow)
            if batched:
                parts.append(function(first[start : start + step], piece))
            elif rest:  # addmm: the bias may be the same for all columns
                bias = first if first.shape[-1:] in ((), (1,)) else first[..., start : start + step]
                parts.append(aten.addmm(bias, rest[0], piece))
            else:
                parts.append(aten.mm(first, piece))
        return torch.cat(parts, along if batched else -1)

    def multiply_groups(
        self, first: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, *_: Any
    ) -> Tensor:
        """Return the products of consecutive rows (or columns) with a matrix each, for which float64 has no kernel."""
        if offs is None:
            return self.widen(torch.bmm(self.widen(first), self.widen(other)))
        ends = offs.tolist()
        parts = []
        for group, (start, end) in enumerate(itertools.pairwise((0, *ends))):
            left = first[group] if first.dim() == 3 else first[:, start:end] if other.dim() == 2 else first[start:end]
            right = other[group] if other.dim() == 3 else other[start:end] if first.dim() == 2 else other[:, start:end]
            product = self.widen(left) @ self.widen(right)
            parts.append(product if bias is None else product + self.widen(bias[group] if bias.dim() == 2 else bias))
        if first.dim() == other.dim() == 2:
            return torch.stack(parts)
        along = 1 if first.dim() == 3 else 0
        total = other.shape[1] if first.dim() == 3 else first.shape[0]
        rest = total - sum(part.shape[along] for part in parts)  # rows of no group
        shape = [*parts[0].shape]
        shape[along] = rest
        return torch.cat([*parts, parts[0].new_zeros(shape)], along)

    # ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_written(self, value: Tensor) -> bool:
        return bool(self.written) and storage_key(value) in self.written

    def wide_memory(self, value: Any) -> Any:
        """Return the wide memory of a written tensor: the tensor itself, or its copy next to a narrow one."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.wide_memory, value))
        if not isinstance(value, Tensor) or not self.is_narrow(value.dtype):
            return value
        if not self.is_written(value):
            size = value.untyped_storage().nbytes() // value.element_size()
            whole = value.detach().as_strided((size,), (1,), 0)
            self.written[storage_key(value)] = value, whole.to(COMPLEX[self.dtype] if value.is_complex() else self.dtype)
        return self.widen(value)

    def write(self, function: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run the operation on wide memory, and round the result into the narrow tensor."""
        given = bind(function, args, kwargs)
        targets = {name: value for name, value in given.items() if name in written_arguments(function)}
        wide = {name: self.wide_memory(value) for name, value in targets.items()}
        inputs = {name: wide[name] if name in wide else self.widen(value) for name, value in given.items()}
        results = call(function, inputs)
        originals = {}
        for narrow, full in itertools.chain.from_iterable(pairs(targets[name], wide[name]) for name in targets):
            originals[id(full)] = narrow
            if narrow is not full:
                narrow.copy_(full)
        if isinstance(results, Tensor):
            return originals[id(results)] if id(results) in originals else self.widen(results)
        if isinstance(results, (tuple, list)):
            return type(results)(originals.get(id(result), self.widen(result)) for result in results)
        return results

    def draw(self, function: OpOverload, args: Any, kwargs: Any) -> Any:
        """Return the random numbers that are drawn without this context in the default dtype, widened."""
        given = bind(function, args, kwargs)
        targets = [name for name in written_arguments(function) if isinstance(given.get(name), Tensor)]
        if given.get("dtype") is self.dtype or (given.get("dtype") is None and function in OF_DEFAULT):
            given["dtype"] = self.default
        wide = {name: self.wide_memory(given[name]) for name in targets}
        drawn = {name: torch.empty_like(value, dtype=self.drawn_dtype(value)) for name, value in wide.items()}
        rest = {name: self.as_drawn(value) for name, value in given.items() if name not in targets}
        results = call(function, {**rest, **drawn})
        for name, value in wide.items():
            value.copy_(drawn[name])
            if given[name] is not value:
                given[name].copy_(value)
        return given[targets[0]] if targets else self.widen(results)

    def drawn_dtype(self, value: Tensor) -> torch.dtype:
        return self.default if value.dtype is self.dtype else value.dtype

    def as_drawn(self, value: Any) -> Any:
        return value.to(self.drawn_dtype(value)) if isinstance(value, Tensor) else value


# ── Operations ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────

# matrix products by the number of their tensors, the matrix last
PRODUCTS: dict[Any, int] = {aten.mm.default: 2, aten.addmm.default: 3, aten.bmm.default: 2}


def storage_key(value: Tensor) -> int:
    return value.untyped_storage()._cdata


@functools.cache
def is_composite(function: OpOverload) -> bool:
    """Return whether an operation consists of others, which are then intercepted one by one (as in inference mode)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"))


@functools.cache
def written_arguments(function: OpOverload) -> frozenset[str]:
    """Return the names of the arguments that an operation writes into."""
    schema = function._schema
    return frozenset(
        argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
    )


def bind(function: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by name."""
    return {**{argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}, **kwargs}


def call(function: OpOverload, arguments: dict[str, Any]) -> Any:
    """Return the result of an operation for arguments by name."""
    positional = [
        argument.name for argument in function._schema.arguments if not argument.kwarg_only and argument.name in arguments
    ]
    rest = {name: value for name, value in arguments.items() if name not in positional}
    return function(*(arguments[name] for name in positional), **rest)


def pairs(narrow: Any, wide: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of an argument with the wide ones, in order."""
    if isinstance(narrow, (tuple, list)):
        return [pair for part, other in zip(narrow, wide, strict=True) for pair in pairs(part, other)]
    return [(narrow, wide)] if isinstance(narrow, Tensor) else []


aten = torch.ops.aten


class SplitReductions(TorchDispatchMode):
    """Within this context products of matrices are summed in another order."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.mm.default and args[0].shape[1] > 1:
            return sum_of_halves(*args)
        if function is aten.addmm.default and not kwargs and args[1].shape[1] > 1:
            return args[0] + sum_of_halves(*args[1:])
        return function(*args, **(kwargs or {}))


def sum_of_halves(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of (n, k) and (k, m)."""
    half = left.shape[1] // 2
    return aten.mm(left[:, :half], right[:half]) + aten.mm(left[:, half:], right[half:])
