"""Batches of real inputs, and what a model's modules receive when it runs on them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.runtime.counted_work import counted
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.probes import accepts, run

Watcher = Callable[[Tensor], None]


class Enough(Exception):
    """A watcher needs no more batches."""


class Stop(Exception):
    """All that was wanted of a forward has been seen; the rest of it is not run."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Batches of inputs, by argument name, that a model is observed on."""

    batches: tuple[dict[str, Any], ...]

    @torch.no_grad()
    def observe(self, model: nn.Module, watchers: Mapping[str, Watcher]) -> None:
        """Each watcher has seen the input of the module at its path, batch by batch: (tokens, d), padding left out.

        A watcher that raises `Enough` sees no more; when all have, the rest of the batches is not run. Every forward but the first
        ends with the last call that a watcher waits for: as many of them as the first one made. The model runs in evaluation mode,
        without a cache, and is left as it was.
        """
        waiting, made = set(watchers), collections.Counter[str]()
        without_cache = {"use_cache": False} if accepts(model, "use_cache") else {}
        with evaluation_mode(model):
            for batch in counted(self.batches, "running the model on text, batch", len(self.batches)):
                inputs = named_inputs(model, batch)
                last = sum(made[path] for path in waiting) if all(made[path] for path in waiting) else None
                watched = WatchedForward(real_tokens(model, inputs), waiting, last)
                handles = [watched.watch(model.get_submodule(path), path, watchers[path]) for path in waiting]
                try:
                    run(model, {**inputs, **without_cache})
                except Stop:
                    pass
                finally:
                    for handle in handles:
                        handle.remove()
                if not waiting:
                    return
                made = made or watched.made


class WatchedForward:
    """A forward whose modules' inputs watchers see, those in `waiting`; raises `Stop` in it when they have seen the last call."""

    def __init__(self, masks: list[Tensor], waiting: set[str], last: int | None) -> None:
        self.masks, self.waiting, self.last = masks, waiting, last
        self.made = collections.Counter[str]()  # calls by path

    def watch(self, module: nn.Module, path: str, watcher: Watcher) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.made[path] += 1
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
            if values and path in self.waiting:
                try:
                    if len(rows := self.real(values[0].detach())):
                        watcher(rows)
                except Enough:
                    self.waiting.discard(path)
            if not self.waiting or self.made.total() == self.last:
                raise Stop

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def real(self, x: Tensor) -> Tensor:
        """The rows of x that are no padding: (tokens, d)."""
        mask = next((mask for mask in self.masks if mask.shape == x.shape[:-1]), None)
        return x.reshape(-1, x.shape[-1]) if mask is None else x[mask]


def real_tokens(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The masks among the inputs that say which positions are no padding: (batch, length), boolean."""
    masks = [value for name, value in inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]
    return [mask.bool() for mask in masks if mask.dim() == 2]
