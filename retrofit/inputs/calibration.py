"""Calibration data: batches of real inputs, the modules' recorded inputs for them, and windows to fit on and to hold out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, cat, nn
from torch.utils._pytree import tree_flatten, tree_map

from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import set_aside
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.module_calls import CallRecorder, RecordedCall, real_rows, real_tokens, watched
from retrofit.inputs.probes import accepts, extent_of, run
from retrofit.process import release_freed_memory
from retrofit.progress import counted

Watcher = Callable[[Tensor], None]
HELD_OUT = 8  # one window in HELD_OUT is held out
BATCH = 8  # windows per batch
Window = dict[str, Any]  # the least batch that the model takes


class Enough(Exception):
    """Raised by a watcher that needs no more batches."""


class Stop(Exception):
    """Raised to end a forward once everything needed has been recorded."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Batches of inputs, by argument name, on which a model is observed.

    A window is what a batch can be divided into: one row, or `rows` if the model takes several as one sequence, as codebooks are.
    """

    batches: tuple[dict[str, Any], ...]
    rows: int = 1

    def windows(self) -> Iterator[Window]:
        """Return each window as a batch of its own; values without rows are in all of them."""
        return itertools.chain.from_iterable(windows_of_batch(batch, self.rows) for batch in self.batches)

    def of(self, windows: Iterable[Window]) -> Calibration:
        """Return these windows in batches of up to `BATCH`, in order; a batch ends when the shapes change."""
        return dataclasses.replace(self, batches=tuple(batched(windows, self.rows)))

    def observe(self, model: nn.Module, watchers: Mapping[str, Watcher]) -> None:
        """Call each watcher with the input of the module at its path, batch by batch: (tokens, d), without padding.

        A watcher that raises `Enough` gets no more; once all have raised it, the remaining batches are not run.
        """
        masks: list[Tensor] = []

        def begin(inputs: Mapping[str, Any]) -> None:
            masks[:] = real_tokens(inputs)

        def see(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
            if values and len(rows := real_rows(values[0].detach(), masks)):
                watchers[path](rows)

        self.run(model, watchers, begin, see)

    def record(self, model: nn.Module, paths: Collection[str]) -> dict[str, list[RecordedCall]]:
        """Return the calls of the modules at `paths`, in order, so that a replacement can be called with the same arguments."""
        recorder = CallRecorder(model, dict.fromkeys(paths, ()), store=set_aside)

        def begin(inputs: Mapping[str, Any]) -> None:
            recorder.inputs = inputs

        with recorder.recording():
            self.run(model, paths, begin, lambda *call: None, returned=True)
        return recorder.calls

    @torch.no_grad()
    def run(
        self,
        model: nn.Module,
        paths: Collection[str],
        begin: Callable[[Mapping[str, Any]], None],
        see: Callable[..., None],
        *,
        returned: bool = False,
    ) -> None:
        """Run the model on the batches and call `see` for each call of the modules at `paths`, with the arguments of `watched`.

        With `returned`, `see` also gets the modules' outputs. `begin` gets the inputs of each forward. A module whose watcher
        raises `Enough` is no longer watched; once none is, the remaining batches are not run. Every forward but the first ends with
        the last call of a watched module: it expects as many calls as in the first forward. The model runs in evaluation mode,
        without a cache, and is unchanged afterwards.
        """
        release_freed_memory()  # of what was computed before: recordings may take as much
        waiting, usual = set(paths), collections.Counter[str]()  # calls by path in the first forward
        without_cache = {"use_cache": False} if accepts(model, "use_cache") else {}
        with evaluation_mode(model):
            for batch in counted(self.batches, "running the model on text, batch", len(self.batches)):
                inputs = named_inputs(model, batch)
                begin(inputs)
                last = sum(usual[path] for path in waiting) if all(usual[path] for path in waiting) else None
                forward = WatchedForward(see, waiting, last)
                modules = {path: model.get_submodule(path) for path in waiting}
                hooks = watched(modules, after=forward.see) if returned else watched(modules, before=forward.see)
                with hooks, contextlib.suppress(Stop):
                    run(model, {**inputs, **without_cache})
                if not waiting:
                    return
                usual = usual or forward.made


class WatchedForward:
    """A forward that ends, by `Stop`, with the last watched call."""

    def __init__(self, watcher: Callable[..., None], waiting: set[str], last: int | None) -> None:
        self.watcher, self.waiting, self.last = watcher, waiting, last
        self.made = collections.Counter[str]()  # calls by path

    def see(self, path: str, *call: Any) -> None:
        self.made[path] += 1
        if path in self.waiting:
            try:
                self.watcher(path, *call)
            except Enough:
                self.waiting.discard(path)
        if not self.waiting or self.made.total() == self.last:
            raise Stop


def split_calibration(calibration: Calibration, tokens: int, held_out_tokens: int = 0) -> tuple[Calibration, Calibration]:
    """Return windows of about `tokens` tokens to fit on, evenly spaced, and windows of about `held_out_tokens` tokens to hold out.

    Without `held_out_tokens`, a quarter of `tokens` is held out. If the data is a single window, both parts are that window.
    """
    windows = list(calibration.windows())
    held_out = windows[HELD_OUT - 1 :: HELD_OUT] or windows[-1:]
    chosen = {id(window) for window in held_out}
    fitted = [window for window in windows if id(window) not in chosen] or windows
    length = max(1, max(length_of(window) for window in windows))
    most = max(1, tokens // length)
    kept = max(1, (held_out_tokens or tokens // 4) // length)
    return calibration.of(spread(fitted, most)), calibration.of(spread(held_out, kept))


def sample_calibration(calibration: Calibration, tokens: int) -> Calibration:
    """Return windows of about `tokens` tokens, evenly spaced over the data; all of it if it has no more."""
    windows = list(calibration.windows())
    length = max(1, max(length_of(window) for window in windows))
    return calibration.of(spread(windows, max(1, tokens // length)))


def windows_of_batch(batch: Window, rows: int = 1) -> Iterator[Window]:
    """Yield a batch in parts of so many rows, of nested values too; values without rows are in all of them."""
    count, _ = extent_of(batch)
    for first in range(0, count, rows):
        yield tree_map(lambda value, first=first: value[first : first + rows] if has_rows(value, count) else value, batch)


def length_of(window: Window) -> int:
    """Return the tokens of a window; an image, whose tokens are unknown before a run, counts as its columns of pixels."""
    return max((value.shape[-1] for value in window.values() if isinstance(value, Tensor) and value.dim()), default=1)


def spread(windows: Sequence[Window], most: int) -> list[Window]:
    """Return at most `most` of the windows, evenly spaced, including the last."""
    count = min(most, len(windows))
    return [windows[(index + 1) * len(windows) // count - 1] for index in range(count)]


def evenly_spaced(x: Tensor, most: int) -> Tensor:
    """Return at most `most` rows of x, evenly spaced."""
    return x[torch.arange(most, device=x.device) * len(x) // most] if len(x) > most else x


def batched(windows: Iterable[Window], rows: int = 1) -> Iterator[Window]:
    """Yield windows of so many rows in batches of up to `BATCH`, in order; a batch ends when the shapes change."""

    def shapes_of(window: Window) -> tuple[Any, ...]:
        values, structure = tree_flatten(window)
        return structure, [tuple(value.shape) if has_rows(value, rows) else id(value) for value in values]

    for _, equal in itertools.groupby(windows, shapes_of):
        alike = list(equal)
        for first in range(0, len(alike), BATCH):
            part = alike[first : first + BATCH]
            yield tree_map(lambda *values: cat(values) if has_rows(values[0], rows) else values[0], *part)


def has_rows(value: Any, rows: int) -> bool:
    """Return whether a value is a tensor of so many rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
