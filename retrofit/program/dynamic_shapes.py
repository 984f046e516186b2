"""Which dimensions of a model's inputs are dynamic while it is traced: all of them, or of images only the batch.

A dynamic dimension is a symbol, and sizes computed from it are expressions. Code that cuts images into windows makes these longer
with every layer, until the tracer takes hours over them; there the height and width are static.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

Result = TypeVar("Result")
MAX_OPERATIONS = 24  # in the expression of one size; windows have 29 after one layer and 81 after two, everything else at most 13


class LongExpressionError(Exception):
    """A size in the trace became too long an expression of the sizes of the inputs."""


def with_dynamic_shapes(model: nn.Module, inputs: dict[str, Any], trace: Callable[[dict[str, Any]], Result]) -> Result:
    """What `trace` returns for all dimensions dynamic (in the terms of `torch.export`), or of images only the batch."""
    try:
        with ExpressionLimit() if any(map(is_image_batch, inputs.values())) else contextlib.nullcontext():
            return trace(dynamic_shapes_by_argument(model, inputs, all_dimensions))
    except LongExpressionError:
        return trace(dynamic_shapes_by_argument(model, inputs, only_batch_of_images))


def dynamic_shapes_by_argument(model: nn.Module, inputs: dict[str, Any], dynamic: Callable[[Any], Any]) -> dict[str, Any]:
    """The dynamic dimensions of each input; those that the forward takes as `**kwargs` under that name."""
    parameters = inspect.signature(model.forward).parameters
    keywords = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), "")
    shapes: dict[str, Any] = {name: dynamic(inputs[name]) for name in parameters if name in inputs}
    if others := {name: dynamic(value) for name, value in inputs.items() if name not in parameters}:
        shapes[keywords] = others
    return shapes


def all_dimensions(value: Any) -> Any:
    """Every dimension of a tensor is dynamic, as far as the code allows; nothing in other values."""
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
    return tree_map(lambda leaf: None, value)


def only_batch_of_images(value: Any) -> Any:
    """`all_dimensions`, but of images only the batch."""
    return {0: torch.export.Dim.AUTO} if is_image_batch(value) else all_dimensions(value)


def is_image_batch(value: Any) -> bool:
    """Whether the value is a batch of images, (batch, channels, height, width)."""
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


class ExpressionLimit(TorchFunctionMode):
    """Within this context a trace ends with `LongExpressionError` as soon as an operation returns a tensor of such a size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and any(expression_length(size) > MAX_OPERATIONS for size in result.shape):
            raise LongExpressionError
        return result


def expression_length(size: int | torch.SymInt) -> int:
    """How many operations the expression of a size has."""
    return int(size.node.expr.count_ops()) if isinstance(size, torch.SymInt) else 0
