"""The gradients of large weights, looked at a slice at a time: none is ever held whole.

Within `SlicedGradients` a product with a large weight and a look-up in one are made by functions whose way back computes the
weight's gradient in slices, shows them and gives the weight none. Where no element can be infinite, the first slice that is not
zero is the last. Whatever else a model does with a large weight gives that its gradient whole, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 1 << 22  # elements of a weight whose gradient is not held whole
SLICE = 1 << 19  # elements of a gradient that are computed at a time: they stay in a processor's cache
Saw = Callable[[Tensor], None]  # takes a part of a gradient


class SlicedGradients(TorchFunctionMode):
    """Within this context a large parameter gets no gradient: `saw` gets its name and slices of it, which say what the whole would.

    That is, whether it is zero and whether it is finite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], saw: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.names = {id(one): name for name, one in parameters.items() if is_sliced(one)}
        self.saw = saw

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = arguments_of(function, args, kwargs) if torch.is_grad_enabled() and self.names else None
        if given is None or id(given[1]) not in self.names:
            return function(*args, **kwargs)
        name = self.names[id(given[1])]
        chosen = LookUp if function is nn.functional.embedding else Product
        return chosen.apply(*given, lambda part: self.saw(name, part))


def is_sliced(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient is looked at in slices: it is a large matrix, and nobody else looks at the gradient."""
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.dim() == 2 and parameter.numel() >= LARGE and parameter.device.type == "cpu" and not hooks


def arguments_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Of a product x, weight, bias and whether x·W is meant, not x·Wᵀ; of a look-up ids, weight, padding id; else None."""
    if function is nn.functional.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"], given.get("bias"), False
    if function is torch.addmm and len(args) == 3 and not kwargs and args[1].dim() == 2 and args[0].dim() == 1:
        return args[1], args[2], args[0], True
    if function is nn.functional.embedding:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("max_norm") is None and not given.get("scale_grad_by_freq") and not given.get("sparse"):
            return given["input"], given["weight"], given.get("padding_idx")
    return None


class Product(torch.autograd.Function):
    """x·Wᵀ + b, or `by_rows` x·W + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_rows: bool, saw: Saw) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows, ctx.saw = by_rows, saw
        return nn.functional.linear(x, weight.t() if by_rows else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = gradient @ (weight.t() if ctx.by_rows else weight) if ctx.needs_input_grad[0] else None
        outs, ins = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        finite = is_bounded(outs, ins)
        for part in slices(outs, ins):
            ctx.saw(part)
            if finite and bool(part.any()):
                break
        return to_x, None, outs.sum(0) if ctx.needs_input_grad[2] else None, None, None


class LookUp(torch.autograd.Function):
    """Some rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, saw: Saw) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.saw = None if padding is None else padding % len(weight), saw
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        rows, ids = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1)
        if ctx.padding is not None:
            rows = rows[ids != ctx.padding]
            ids = ids[ids != ctx.padding]
        unique, places = ids.unique(return_inverse=True)
        if len(unique):
            ctx.saw(rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, places, rows))
        return None, None, None, None


def is_bounded(outs: Tensor, ins: Tensor) -> bool:
    """Whether no element of outsᵀ·ins, nor any part of its sum, can be infinite or no number."""
    largest = outs.abs().amax(-1).double() * ins.abs().amax(-1).double()  # of each token's products
    return bool(largest.sum() < torch.finfo(outs.dtype).max / 2)  # not where it is no number


def slices(outs: Tensor, ins: Tensor) -> Iterator[Tensor]:
    """outsᵀ·ins, some of its rows at a time."""
    step = max(1, SLICE // ins.shape[1])
    for start in range(0, outs.shape[1], step):
        yield outs[:, start : start + step].t() @ ins
