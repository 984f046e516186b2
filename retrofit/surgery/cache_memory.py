"""Histories of tokens that rewritten modules need in the next decoding step, stored in the model's own cache object.

A cache that stores histories becomes, in place, an instance of a subclass of its own class: whatever generation does to its keys
and values (reordering for beams, cropping, repeating, resetting) it does to the histories too. Nothing is stored in the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retrofit.errors import RetrofitError

SLACK = 64  # tokens that may be cropped at once beyond those a module needs: assisted decoding crops a few


class TokenHistory:
    """The last `length` values of a sequence, zeros before its beginning, and `SLACK` older ones.

    `values` is (batch, room, …); those stored are the last before `end`. New values are written behind them while there is room, so
    that a decoding step copies its own tokens and no more.
    """

    def __init__(self, length: int, like: Tensor) -> None:
        self.length = length
        self.values = like.new_zeros(like.shape[0], length + SLACK, *like.shape[2:])
        self.end = length + SLACK
        self.missing = 0  # how many of the oldest values are zeros because newer ones were cropped

    def last(self) -> Tensor:
        """The last `length` values: (batch, length, …)."""
        if self.missing > SLACK:
            raise RetrofitError(
                f"the cache was cropped by {self.missing} tokens more than it can take back",
                why=f"the rewritten layers store {self.length + SLACK} tokens in addition to the keys and values",
                remedy=f"crop by at most {SLACK} tokens at a time, or start from an empty cache",
            )
        return self.values[:, self.end - self.length : self.end]

    def stored(self) -> Tensor:
        """All that is stored: (batch, length + SLACK, …)."""
        return self.values[:, self.end - self.length - SLACK : self.end]

    def push(self, new: Tensor) -> None:
        """`new`, (batch, tokens, …), is appended."""
        count, stored = new.shape[1], self.stored()
        self.missing = max(0, self.missing - count)
        if count > SLACK or not self.is_writable(new):
            self.values, self.end = torch.cat([stored, new[:, -stored.shape[1] :]], 1)[:, -stored.shape[1] :], stored.shape[1]
            return
        if self.end + count > self.values.shape[1]:
            self.values = torch.cat([stored, torch.zeros_like(stored[:, :SLACK])], 1)
            self.end = stored.shape[1]
        self.values[:, self.end : self.end + count] = new
        self.end += count

    def is_writable(self, new: Tensor) -> bool:
        """Whether `new` may be written into `values`: no tracer, gradient or inference mode needs them unchanged."""
        if torch.compiler.is_compiling():  # first, because tracing fails at the conditions below
            return False
        followed = torch.is_grad_enabled() and (new.requires_grad or self.values.requires_grad)
        fixed = self.values.is_inference() and not torch.is_inference_mode_enabled()
        return not (followed or fixed)

    def take_back(self, count: int) -> None:
        """The last `count` values are removed."""
        if count > 0:
            stored = self.stored()
            gone = stored.new_zeros(stored.shape[0], min(count, stored.shape[1]), *stored.shape[2:])
            self.values, self.end = torch.cat([gone, stored[:, : stored.shape[1] - gone.shape[1]]], 1), stored.shape[1]
            self.missing += count

    def choose(self, rows: Tensor) -> None:
        """Only these rows are left, in this order; a row that is named twice is there twice."""
        self.values = self.values.index_select(0, rows.to(self.values.device))

    def repeat(self, times: int) -> None:
        """Each row is there so many times."""
        self.values = self.values.repeat_interleave(times, 0)


class CacheWithHistories(Cache):
    """A cache that also stores histories by name; never instantiated directly, see `histories_of`."""

    histories: dict[str, TokenHistory]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for history in self.histories.values():
            history.choose(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for history in self.histories.values():
            history.choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for history in self.histories.values():
            history.repeat(repeats)

    def reset(self) -> None:
        super().reset()
        self.histories.clear()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = int(self.get_seq_length())
        super().crop(*args, **kwargs)
        after = int(self.get_seq_length())
        if not after:
            self.histories.clear()
        for history in self.histories.values():
            history.take_back(before - after)


@functools.cache
def cache_class_with_histories(kind: type[Cache]) -> type[Cache]:
    """The class of caches of class `kind` that also store histories."""
    return type(kind.__name__, (CacheWithHistories, kind), {"__module__": kind.__module__})


def histories_of(cache: Cache) -> dict[str, TokenHistory]:
    """The histories that `cache` stores, by the name of the module that needs them; from here on it stores some."""
    if not isinstance(cache, CacheWithHistories):
        cache.__class__ = cache_class_with_histories(type(cache))  # type: ignore[arg-type]
        cache.histories = {}  # type: ignore[attr-defined]
    return cache.histories  # type: ignore[attr-defined,no-any-return]


def cache_among(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """The cache among a call's arguments, None where there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
