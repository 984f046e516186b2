"""ONNX reductions as torch functions."""

from __future__ import annotations

import torch
from torch import Tensor

from retrofit.onnx.importer.operators.table import Operator, function_name, operator
from retrofit.onnx.importer.values import (
    Value,
    is_number,
    numbers,
    tensor,
)


def reduction(name: str, of_tensor: Operator, of_numbers: Operator | None = None) -> Operator:
    """The operator `name`, from what it does to a tensor along some axes; the axes are an input or, before, an attribute."""

    def computed(
        x: Value, axes: Value = None, keepdims: int = 1, noop_with_empty_axes: int = 0, **of_old: tuple[int, ...]
    ) -> Value:
        axes = of_old.get("axes_attribute", axes)
        if is_number(x) and of_numbers is not None:
            result = x
            for position, one in enumerate(numbers(x)):
                result = one if position == 0 else of_numbers(result, one)
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
