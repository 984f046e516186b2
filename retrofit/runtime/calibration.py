"""Batches of real inputs, and what a model's modules receive when it runs on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.runtime.counted_work import counted
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.probes import run

Watcher = Callable[[Tensor], None]


class Enough(Exception):
    """A watcher needs no more batches."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Batches of inputs, by argument name, that a model is observed on."""

    batches: tuple[dict[str, Any], ...]

    @torch.no_grad()
    def observe(self, model: nn.Module, watchers: Mapping[str, Watcher]) -> None:
        """Each watcher has seen the input of the module at its path, batch by batch: (tokens, d), padding left out.

        A watcher that raises `Enough` sees no more; when all have, the rest of the batches is not run. The model runs in evaluation
        mode and is left as it was.
        """
        waiting = set(watchers)
        with evaluation_mode(model):
            for batch in counted(self.batches, "running the model on text, batch", len(self.batches)):
                inputs = named_inputs(model, batch)
                real = real_tokens(model, inputs)
                handles = [self.watch(model.get_submodule(path), path, watchers[path], real, waiting) for path in waiting]
                try:
                    run(model, inputs)
                finally:
                    for handle in handles:
                        handle.remove()
                if not waiting:
                    return

    @staticmethod
    def watch(module: nn.Module, path: str, watcher: Watcher, real: list[Tensor], waiting: set[str]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
            if not values or path not in waiting:
                return
            x = values[0].detach()
            mask = next((mask for mask in real if mask.shape == x.shape[:-1]), None)
            rows = x.reshape(-1, x.shape[-1]) if mask is None else x[mask]
            try:
                if len(rows):
                    watcher(rows)
            except Enough:
                waiting.discard(path)

        return module.register_forward_pre_hook(hook, with_kwargs=True)


def real_tokens(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The masks among the inputs that say which positions are no padding: (batch, length), boolean."""
    masks = [value for name, value in inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]
    return [mask.bool() for mask in masks if mask.dim() == 2]
