"""The sizes of the tensors of a program, as numbers and symbolic expressions."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, fx

UNBOUNDED = sys.maxsize - 1  # torch has this or infinity for a size without a bound


def is_size_value(node: fx.Node) -> bool:
    """Whether the node's value is a number, as sizes are, and no tensor."""
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple))


def symbolic_sizes(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a tensor, or the one number that the node is: an int where it is static, else an expression."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,) if isinstance(value, (int, torch.SymInt)) else ()
    expressions = [size if isinstance(size, int) else size.node.expr for size in sizes]
    return tuple(size if isinstance(size, int) or not size.is_number else int(size) for size in expressions)


def largest_sizes(node: fx.Node) -> tuple[int | None, ...]:
    """The largest that each dynamic size of a tensor may be: None where it has no bound, or the size is static."""
    value = node.meta.get("val")
    return tuple(map(largest_size, value.shape)) if isinstance(value, Tensor) else ()


def largest_size(size: int | torch.SymInt) -> int | None:
    """The largest that a dynamic size may be; None where it has no bound, or is static."""
    if isinstance(size, int):
        return None
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound < UNBOUNDED else None
