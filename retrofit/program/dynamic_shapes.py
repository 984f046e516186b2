"""Which extents of a model's inputs are free while it is traced: all of them, or of pictures only the batch.

What is free is a symbol, and what hangs on it an expression. Code that cuts pictures into windows makes these ever longer, until
the tracer takes hours over them; there the size of the pictures is fixed.
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

Made = TypeVar("Made")
LONGEST = 24  # operations in one extent; windows have 29 after one layer and 81 after two, everything else at most 13


class TangledSizesError(Exception):
    """An extent of some value became too long an expression of those of the inputs."""


def with_dynamic_shapes(model: nn.Module, inputs: dict[str, Any], trace: Callable[[dict[str, Any]], Made]) -> Made:
    """What `trace` makes where every extent is free, in the terms of `torch.export`; of pictures only the batch if it must be."""
    try:
        with Untangled() if any(map(is_picture, inputs.values())) else contextlib.nullcontext():
            return trace(sizes_by_argument(model, inputs, every_extent))
    except TangledSizesError:
        return trace(sizes_by_argument(model, inputs, every_extent_but_of_pictures))


def sizes_by_argument(model: nn.Module, inputs: dict[str, Any], free: Callable[[Any], Any]) -> dict[str, Any]:
    """What is free in each of the inputs, for those that the forward gathers under the name it gathers by."""
    parameters = inspect.signature(model.forward).parameters
    gathered = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), "")
    sizes: dict[str, Any] = {name: free(inputs[name]) for name in parameters if name in inputs}
    if others := {name: free(value) for name, value in inputs.items() if name not in parameters}:
        sizes[gathered] = others
    return sizes


def every_extent(value: Any) -> Any:
    """Every extent of a tensor may be another, as far as the code allows; nothing in what is no tensor."""
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
    return tree_map(lambda leaf: None, value)


def every_extent_but_of_pictures(value: Any) -> Any:
    """`every_extent`, but of pictures only the batch."""
    return {0: torch.export.Dim.AUTO} if is_picture(value) else every_extent(value)


def is_picture(value: Any) -> bool:
    """Whether the value is pictures, (batch, channels, height, width)."""
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


class Untangled(TorchFunctionMode):
    """Within this context a trace ends with `TangledSizesError` as soon as an operation gives what has such an extent."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and any(operations(extent) > LONGEST for extent in made.shape):
            raise TangledSizesError
        return made


def operations(extent: int | torch.SymInt) -> int:
    """How many operations the expression of an extent has."""
    return int(extent.node.expr.count_ops()) if isinstance(extent, torch.SymInt) else 0
