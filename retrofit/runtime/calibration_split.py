"""Calibration data in two parts: windows that a start is fitted on, and windows held out, on which starts are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, cat

from retrofit.runtime.calibration import Calibration
from retrofit.runtime.probes import extent_of

HELD_OUT = 8  # one window in so many
BATCH = 8  # windows a batch

Window = dict[str, Any]  # a batch of one


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
