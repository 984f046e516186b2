"""What rewritten modules remember from one decoding step to the next, kept in the model's own cache object.

A cache that is asked to remember becomes, in place, one of a subclass of its own class: whatever generation does to its keys and
values (reordering for beams, cropping, repeating, resetting) it does to the memories. Nothing is kept in the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retrofit.errors import RetrofitError

SLACK = 64  # tokens that may be taken back at once beyond those a module needs: assisted decoding takes back a few


class TokenHistory:
    """The last `length` values of a sequence, zeros before its beginning, and `SLACK` older ones.

    `values` is (batch, room, …); those remembered are the last before `end`. What is pushed is written behind them while there is
    room, so that a decoding step copies its own tokens and no more.
    """

    def __init__(self, length: int, like: Tensor) -> None:
        self.length = length
        self.values = like.new_zeros(like.shape[0], length + SLACK, *like.shape[2:])
        self.end = length + SLACK
        self.missing = 0  # of the oldest values, how many were pushed out and taken back for

    def last(self) -> Tensor:
        """The last `length` values: (batch, length, …)."""
        if self.missing > SLACK:
            raise RetrofitError(
                f"the cache was cropped by {self.missing} tokens more than it can take back",
                why=f"the rewritten layers remember {self.length + SLACK} tokens beside the keys and values",
                remedy=f"crop by at most {SLACK} tokens at a time, or start from an empty cache",
            )
        return self.values[:, self.end - self.length : self.end]

    def kept(self) -> Tensor:
        """All that is remembered: (batch, length + SLACK, …)."""
        return self.values[:, self.end - self.length - SLACK : self.end]

    def push(self, new: Tensor) -> None:
        """`new`, (batch, tokens, …), follows."""
        count, kept = new.shape[1], self.kept()
        self.missing = max(0, self.missing - count)
        if count > SLACK or not self.writable(new):
            self.values, self.end = torch.cat([kept, new[:, -kept.shape[1] :]], 1)[:, -kept.shape[1] :], kept.shape[1]
            return
        if self.end + count > self.values.shape[1]:
            self.values = torch.cat([kept, torch.zeros_like(kept[:, :SLACK])], 1)
            self.end = kept.shape[1]
        self.values[:, self.end : self.end + count] = new
        self.end += count

    def writable(self, new: Tensor) -> bool:
        """Whether `new` may be written into `values`: no tracer, gradient or inference mode wants them as they are."""
        if torch.compiler.is_compiling():  # asked first: tracing breaks off at what comes after
            return False
        followed = torch.is_grad_enabled() and (new.requires_grad or self.values.requires_grad)
        fixed = self.values.is_inference() and not torch.is_inference_mode_enabled()
        return not (followed or fixed)

    def take_back(self, count: int) -> None:
        """The last `count` values never were."""
        if count > 0:
            kept = self.kept()
            gone = kept.new_zeros(kept.shape[0], min(count, kept.shape[1]), *kept.shape[2:])
            self.values, self.end = torch.cat([gone, kept[:, : kept.shape[1] - gone.shape[1]]], 1), kept.shape[1]
            self.missing += count

    def choose(self, rows: Tensor) -> None:
        self.values = self.values.index_select(0, rows.to(self.values.device))

    def repeat(self, times: int) -> None:
        self.values = self.values.repeat_interleave(times, 0)


class CacheWithHistories(Cache):
    """A cache that keeps memories by name; never made by itself, see `histories_of`."""

    memories: dict[str, TokenHistory]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for memory in self.memories.values():
            memory.choose(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for memory in self.memories.values():
            memory.choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for memory in self.memories.values():
            memory.repeat(repeats)

    def reset(self) -> None:
        super().reset()
        self.memories.clear()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = int(self.get_seq_length())
        super().crop(*args, **kwargs)
        after = int(self.get_seq_length())
        if not after:
            self.memories.clear()
        for memory in self.memories.values():
            memory.take_back(before - after)


@functools.cache
def cache_class_with_histories(kind: type[Cache]) -> type[Cache]:
    """The caches of class `kind` that keep memories."""
    return type(kind.__name__, (CacheWithHistories, kind), {"__module__": kind.__module__})


def histories_of(cache: Cache) -> dict[str, TokenHistory]:
    """The memories that `cache` keeps, by the name of the module that remembers."""
    if not isinstance(cache, CacheWithHistories):
        cache.__class__ = cache_class_with_histories(type(cache))  # type: ignore[arg-type]
        cache.memories = {}  # type: ignore[attr-defined]
    return cache.memories  # type: ignore[attr-defined,no-any-return]


def cache_among(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """The cache among a call's arguments, None where there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
