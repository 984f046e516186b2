"""Calibration data: batches of real inputs, what a model's modules receive on them, and parts to fit on and to hold out."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, cat, nn

from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.probes import accepts, extent_of, run
from retrofit.progress import counted

Watcher = Callable[[Tensor], None]
HELD_OUT = 8  # one window in so many
BATCH = 8  # windows a batch
Window = dict[str, Any]  # a batch of one


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


def split_calibration(calibration: Calibration, tokens: int, held_out_tokens: int = 0) -> tuple[Calibration, Calibration]:
    """Windows of about `tokens` tokens to fit on, spread evenly over the data, and windows of about `held_out_tokens` held out.

    Without `held_out_tokens` these are a quarter as many. Where the data is a single window, both parts are that window.
    """
    windows = [window for batch in calibration.batches for window in windows_of_batch(batch)]
    held_out = windows[HELD_OUT - 1 :: HELD_OUT] or windows[-1:]
    chosen = {id(window) for window in held_out}
    fitted = [window for window in windows if id(window) not in chosen] or windows
    length = max(1, max(length_of(window) for window in windows))
    most = max(1, tokens // length)
    kept = max(1, (held_out_tokens or tokens // 4) // length)
    return Calibration(tuple(batched(spread(fitted, most)))), Calibration(tuple(batched(spread(held_out, kept))))


def sample_calibration(calibration: Calibration, tokens: int) -> Calibration:
    """Windows of about `tokens` tokens, spread evenly over the data; all of it where it is no more."""
    windows = [window for batch in calibration.batches for window in windows_of_batch(batch)]
    length = max(1, max(length_of(window) for window in windows))
    return Calibration(tuple(batched(spread(windows, max(1, tokens // length)))))


def windows_of_batch(batch: Window) -> Iterator[Window]:
    """Each row of a batch as a batch of one; a value without rows is in all of them."""
    rows, _ = extent_of(batch)
    for row in range(rows):
        yield {
            name: value[row : row + 1] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in batch.items()
        }


def length_of(window: Window) -> int:
    """The tokens of a window; those of an image are not known before it is run, and count as its rows of pixels."""
    return max((value.shape[-1] for value in window.values() if isinstance(value, Tensor) and value.dim()), default=1)


def spread(windows: Sequence[Window], most: int) -> list[Window]:
    """At most so many of the windows, at even distances, the last one included."""
    count = min(most, len(windows))
    return [windows[(index + 1) * len(windows) // count - 1] for index in range(count)]


def evenly_spaced(x: Tensor, most: int) -> Tensor:
    """Return at most so many rows of x, at even distances."""
    return x[torch.arange(most, device=x.device) * len(x) // most] if len(x) > most else x


def batched(windows: Iterable[Window]) -> Iterator[Window]:
    """The windows in batches of up to `BATCH`, in order; one whose shapes differ from the last one's begins a batch."""
    for _, equal in itertools.groupby(windows, shapes_of):
        alike = list(equal)
        for first in range(0, len(alike), BATCH):
            part = alike[first : first + BATCH]
            yield {name: cat([one[name] for one in part]) if is_row(value) else value for name, value in part[0].items()}


def shapes_of(window: Window) -> list[Any]:
    return [(name, tuple(value.shape) if is_row(value) else id(value)) for name, value in window.items()]


def is_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == 1
