"""Dataclasses that a model takes or returns: torch reads the tensors in one whose class it knows as a container."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree


@contextlib.contextmanager
def open_dataclasses(model: nn.Module, inputs: Any) -> Iterator[None]:
    """The dataclasses among the inputs, and, within this context, in what the model returns, are containers of their fields."""
    register_classes(inputs)
    handle = model.register_forward_hook(lambda module, args, output: register_classes(output))
    try:
        yield
    finally:
        handle.remove()


def register_classes(value: Any) -> None:
    """Every class of dataclasses in the value, however nested, is a container to torch."""
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_instance and type(value) not in _pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(type(value))
    for item in _pytree.tree_leaves(value, is_leaf=lambda one: one is not value):
        if item is not value:
            register_classes(item)
