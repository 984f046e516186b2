"""The activations of a model: what each call of its modules returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

Activations = dict[str, list[torch.Tensor]]  # module → the output of each of its calls; modules in the order of their first call


@contextlib.contextmanager
def record_activations(
    model: nn.Module, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu, also: Collection[str] = ()
) -> Iterator[Activations]:
    """Within this context the output of every module with parameters of its own is recorded, as `keep` reduces it.

    So is that of the modules at the paths in `also`. A nested tensor (torch's encoder makes one of a padded input) is recorded
    with zeros in place of its padding.
    """
    activations: Activations = {}

    def recorder(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                dense = value.to_padded_tensor(0.0) if value.is_nested else value
                activations.setdefault(path, []).append(keep(dense.detach()))

        return hook

    owners = [
        (path, module)
        for path, module in model.named_modules()
        if path and (path in also or next(module.parameters(recurse=False), None) is not None)
    ]
    handles = [module.register_forward_hook(recorder(path)) for path, module in owners]
    try:
        yield activations
    finally:
        for handle in handles:
            handle.remove()


def at_positions(activations: Activations, positions: torch.Tensor) -> Activations:
    """The activations at some positions, a mask (batch, length), of the modules that work on positions."""
    mask = positions.cpu()
    found = {path: [value[mask] for value in values if value.shape[:2] == mask.shape] for path, values in activations.items()}
    return {path: values for path, values in found.items() if values}
