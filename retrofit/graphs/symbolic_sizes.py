"""The sizes of the tensors of a program, as numbers and symbolic expressions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def is_size_value(node: fx.Node) -> bool:
    """Whether the node's value is a number, as sizes are, and no tensor."""
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple))


def symbolic_sizes(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a tensor, or the one number that the node is: an int where it is static, else an expression."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,) if isinstance(value, (int, torch.SymInt)) else ()
    expressions = [size if isinstance(size, int) else size.node.expr for size in sizes]
    return tuple(size if isinstance(size, int) or not size.is_number else int(size) for size in expressions)
