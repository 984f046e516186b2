"""Run a model without changing it: its modes, gradients, buffers, attributes and hooks, and the random state."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn

from retrofit.process import preserve_attribute, quiet

REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and name not in REGISTRIES)


def preserve_modes(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Restore, after this context, the training or evaluation mode of each module of `model`."""
    return preserve_attribute("training", model.modules())


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation mode."""
    with preserve_modes(model):
        model.eval()
        yield


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode in this context, and restore everything but its parameters' values afterwards.

    That is: modes, gradients, buffers, plain attributes, hooks, settings, the state of the random number generators. Nothing is
    logged.
    """
    attributes = [(vars(module), plain_attributes(module)) for module in model.modules()]
    hooks = [(table, set(table)) for module in model.modules() for table in map(vars(module).get, HOOKS) if table is not None]
    settings = [(vars(owner), dict(vars(owner))) for owner in settings_of(model)]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    plain = without_history(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with preserve_random_state(), quiet():
            torch.manual_seed(0)
            for parameter, _ in gradients:
                parameter.grad = None
            model.eval()
            yield
    finally:
        for table, values in attributes:
            restore(table, values, keep=REGISTRIES)
        for table, known in hooks:
            for key in table.keys() - known:  # added by the model's own code, whose record of it is removed with the attributes
                del table[key]
        for table, values in settings:
            restore(table, values)
        for table, values in buffers:
            table.update(values)
        forget_history(plain)
        for buffer, content in contents:
            if not same_bits(buffer, content):
                buffer.detach().copy_(content)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def without_history(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that have values and no autograd graph."""
    return [buffer for buffer in model.buffers() if buffer.grad_fn is None]


def forget_history(buffers: list[torch.Tensor]) -> None:
    """Detach the buffers: values that a model writes into them (a cache, for example) may have come with a graph."""
    for buffer in buffers:
        if buffer.grad_fn is not None:
            buffer.detach_()


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the states of torch's, numpy's and Python's random number generators after this context."""
    python, numbers = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the module other than parameters, buffers and children."""
    return {name: value for name, value in vars(module).items() if name not in REGISTRIES}


def settings_of(model: nn.Module) -> list[Any]:
    """Return the config objects that a model and its modules read."""
    found = [vars(module).get(name) for module in model.modules() for name in ("config", "generation_config")]
    return list({id(owner): owner for owner in found if hasattr(owner, "__dict__")}.values())


def restore(table: dict[str, Any], values: dict[str, Any], keep: tuple[str, ...] = ()) -> None:
    """Set `table` to its earlier `values`, and remove all other entries except those in `keep`."""
    for key in [key for key in table if key not in values and key not in keep]:
        del table[key]
    table.update(values)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b)) or bool(torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))))
