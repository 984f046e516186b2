"""Histories of tokens that rewritten modules need in the next decoding step, stored in the model's own cache object.

The class of a cache that stores histories is changed, in place, to a subclass of its own class: each operation of generation on its
keys and values (reordering for beams, cropping, repeating, resetting) is applied to the histories too. Nothing is stored in the
modules.

If the cache updates its own tensors in place, so that a decoding step can be compiled or captured in a CUDA graph, its histories
are updated in place as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrofit.errors import RetrofitError
from retrofit.inputs.module_calls import is_cache

if TYPE_CHECKING:
    from transformers.cache_utils import Cache
    from transformers.cache_utils import Cache as Mixed
else:
    Mixed = object  # transformers is slow to import, and the class that it is mixed into is a cache's

SLACK = 64  # tokens that may be cropped at once beyond the history of a module: assisted decoding crops a few


class TokenHistory:
    """The last `length` values of a sequence, zeros before its beginning, and `slack` older ones.

    `values` is (batch, room, …); the stored values are the last before `end`. New values are written after them while there is
    room, so that a decoding step copies only its own tokens.
    """

    def __init__(self, length: int, like: Tensor, slack: int = SLACK) -> None:
        self.length, self.slack = length, slack
        self.values = like.new_zeros(like.shape[0], length + slack, *like.shape[2:])
        self.end = length + slack
        self.missing = 0  # the number of oldest values that are zeros because newer ones were cropped
        self.was_reset = False  # true until the next push

    @property
    def begins(self) -> Tensor | None:
        """Return which tokens of the call, (tokens), are the first of their sequence if sequences are packed; else None."""
        return None

    @property
    def rounds(self) -> int:
        """Return how many times a recurrent state must be computed and pushed until that of every token is right.

        Once, unless a packed sequence continues after a token computed in the same call.
        """
        return 1

    @staticmethod
    def in_cache(cache: Cache | None, length: int, like: Tensor) -> TokenHistory:
        """Return an empty history for `cache`, updated in place if the cache's own tensors are."""
        if packs_sequences(cache):
            return cache.new_history(length, like)  # type: ignore[union-attr,no-any-return]
        if cache is None or is_growing(cache):
            return TokenHistory(length, like)
        return FixedHistory(length, like, SLACK if can_crop(cache) else 0)

    def last(self) -> Tensor:
        """Return the last `length` values: (batch, length, …)."""
        if self.missing > self.slack:
            raise RetrofitError(
                f"the cache was cropped by {self.missing} tokens too many",
                why=f"the rewritten layers store {self.length + self.slack} tokens in addition to the keys and values",
                remedy=f"crop by at most {self.slack} tokens at a time, or start from an empty cache",
                code="cropped",
            )
        return self.values[:, self.end - self.length : self.end]

    def stored(self) -> Tensor:
        """Return all stored values: (batch, length + slack, …)."""
        return self.values[:, self.end - self.length - self.slack : self.end]

    def push(self, new: Tensor, staying: Tensor | None = None) -> None:
        """Append `new`, (batch, tokens, …): of each row up to its last token that is `staying` (batch, tokens; None: all)."""
        count, stored = new.shape[1], self.stored()
        if staying is not None:
            self.missing = max(0, self.missing - int(last_true(staying).min()))
            self.replace_window(up_to(torch.cat([stored, new.to(stored.dtype)], 1), last_true(staying), stored.shape[1]))
            return
        self.missing = max(0, self.missing - count)
        if count > SLACK or not self.is_writable(new):
            self.values, self.end = torch.cat([stored, new[:, -stored.shape[1] :]], 1)[:, -stored.shape[1] :], stored.shape[1]
            return
        if self.end + count > self.values.shape[1]:
            self.values = torch.cat([stored, torch.zeros_like(stored[:, :SLACK])], 1)
            self.end = stored.shape[1]
        self.values[:, self.end : self.end + count] = new
        self.end += count

    def advance(self, new: Tensor, staying: Tensor | None = None) -> Tensor:
        """Push `new`; return the values before it: (batch, length, …), or those before each token if sequences are packed."""
        before = self.last()
        self.push(new, staying)
        return before

    def is_writable(self, new: Tensor) -> bool:
        """Return whether `new` may be written into `values`: no tracer, gradient or inference mode needs them unchanged."""
        if torch.compiler.is_compiling():  # first, because tracing fails at the conditions below
            return False
        return not self.is_followed(new) and (torch.is_inference_mode_enabled() or not self.values.is_inference())

    def is_followed(self, new: Tensor) -> bool:
        """Return whether a gradient may need the current content of `values`."""
        return torch.is_grad_enabled() and (new.requires_grad or self.values.requires_grad)

    def take_back(self, count: int | Tensor) -> None:
        """Remove the last `count` values: a number for each row (batch), or the same for all."""
        counts = count if isinstance(count, Tensor) else self.values.new_full((len(self.values),), count, dtype=torch.long)
        most = int(counts.max())
        if most > 0:
            stored = self.stored()
            room = stored.shape[1]
            self.replace_window(up_to(torch.cat([torch.zeros_like(stored), stored], 1), (room - counts).clamp(min=0), room))
            self.missing += most

    def replace_window(self, stored: Tensor) -> None:
        """Replace all stored values by `stored`, (batch, length + slack, …)."""
        self.replace(stored)
        self.end = stored.shape[1]

    def choose(self, rows: Tensor) -> None:
        """Select these rows, in this order; a row may be selected several times."""
        self.replace(self.values.index_select(0, rows.to(self.values.device)))

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times."""
        self.replace(self.values.repeat_interleave(times, 0))

    def replace(self, values: Tensor) -> None:
        """Store `values` instead."""
        self.values = values


class FixedHistory(TokenHistory):
    """A history in one tensor at a fixed address: a decoding step overwrites its content and changes nothing else.

    Compiled code can therefore treat it as a constant of the graph, and a replayed CUDA graph reads the previous replay's values.
    """

    def __init__(self, length: int, like: Tensor, slack: int) -> None:
        super().__init__(length, like, slack)
        mark_as_fixed(self.values)

    def last(self) -> Tensor:
        """Return a copy of the last `length` values, because the next ones overwrite them: (batch, length, …)."""
        return super().last().clone()

    def push(self, new: Tensor, staying: Tensor | None = None) -> None:
        count, room = new.shape[1], self.values.shape[1]
        self.was_reset = False
        if staying is not None:
            super().push(new, staying)
            return
        self.missing = max(0, self.missing - count)
        self.replace(new[:, -room:] if count >= room else torch.cat([self.values[:, count:], new], 1))

    def reset(self) -> None:
        """Set all values to zero, as before the first push."""
        self.missing, self.was_reset = 0, True
        self.replace(torch.zeros_like(self.values))

    def replace(self, values: Tensor) -> None:
        """Store `values` instead: in place if their shape is the same and nothing needs the old ones."""
        if values.shape == self.values.shape and self.is_writable(values):
            self.values.copy_(values)
        else:
            self.values = mark_as_fixed(values.clone())

    def is_writable(self, new: Tensor) -> bool:
        return not self.is_followed(new) if torch.compiler.is_compiling() else super().is_writable(new)


def last_true(values: Tensor) -> Tensor:
    """Return the number of entries up to the last true one in each row of (batch, n): (batch)."""
    return (values * torch.arange(1, values.shape[1] + 1, device=values.device)).amax(1)


def up_to(values: Tensor, ends: Tensor, count: int) -> Tensor:
    """Return, in each row of (batch, count + n, …), the `count` entries before `count + end`; `ends` (batch), from 0 to n."""
    index = ends.view(-1, 1) + torch.arange(count, device=values.device)
    return values.gather(1, index.view(*index.shape, *(1 for _ in values.shape[2:])).expand(-1, -1, *values.shape[2:]))


def mark_as_fixed(values: Tensor) -> Tensor:
    """Mark `values` as a tensor that does not move, for compiled code; a tensor created in compiled code cannot be marked."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(values)
    return values


def is_growing(cache: Cache | None) -> bool:
    """Return whether the last token in the cache is the latest one; a cache of fixed length has free positions after it."""
    return cache is not None and not getattr(cache, "is_compileable", False)


def can_crop(cache: Cache) -> bool:
    """Return whether tokens can be removed from the end of the cache."""
    return all(hasattr(layer, "crop") for layer in getattr(cache, "self_attention_cache", cache).layers)


class CacheWithHistories(Mixed):
    """The methods of a cache that also stores histories by name; mixed into a cache's class, see `histories_of`."""

    histories: dict[str, TokenHistory]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the cache as its original class, from which the subclass is made again: a prompt's cache may be kept in a file."""
        kind = type(self).__bases__[1]
        return empty_with_histories, (kind,), self.__getstate__()

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
        self.forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = int(self.get_seq_length())
        super().crop(*args, **kwargs)
        after = int(self.get_seq_length())
        if not after:
            self.forget()
            return
        for history in self.histories.values():
            history.take_back(before - after)

    def forget(self) -> None:
        forget_histories(self.histories)


def forget_histories(histories: dict[str, TokenHistory]) -> None:
    """Set histories at fixed addresses to zero and remove all others."""
    for name, history in list(histories.items()):
        if isinstance(history, FixedHistory):
            history.reset()
        else:
            del histories[name]


@functools.cache
def cache_class_with_histories(kind: type[Cache]) -> type[Cache]:
    """Return the class of caches of class `kind` that also store histories."""
    return type(kind.__name__, (CacheWithHistories, kind), {"__module__": kind.__module__})


def empty_with_histories(kind: type[Cache]) -> Cache:
    """Return a cache of class `kind` with histories, without initializing its attributes."""
    made = cache_class_with_histories(kind)  # type: ignore[arg-type]
    return made.__new__(made)


def histories_of(cache: Cache) -> dict[str, TokenHistory]:
    """Return the histories in `cache`, by the name of the module that needs them; make the cache one with histories first."""
    if isinstance(cache, CacheWithHistories):
        return cache.histories
    if torch.compiler.is_dynamo_compiling():
        return histories_of_traced(cache)
    return give_class(cache).histories


def give_class(cache: Cache) -> CacheWithHistories:
    """Return the cache, its class changed to one with histories; compiled code may already have added some."""
    for name in FOLLOWED:
        cache.__dict__.pop(name, None)
    cache.__dict__.setdefault("histories", {})
    cache.__class__ = cache_class_with_histories(type(cache))  # type: ignore[arg-type]
    return cache  # type: ignore[return-value]


FOLLOWED = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "reset", "crop")


class FollowedMethod:
    """A method of a cache that got its histories in compiled code; its first call changes the class, as compiled code cannot."""

    def __init__(self, cache: Cache, name: str) -> None:
        self.cache, self.name = cache, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(give_class(self.cache), self.name)(*args, **kwargs)


def histories_of_traced(cache: Any) -> dict[str, TokenHistory]:
    """Return the histories of a cache in code that is being compiled."""
    if not hasattr(cache, "histories"):
        cache.histories = {}
        for name in FOLLOWED:
            if hasattr(cache, name):
                setattr(cache, name, FollowedMethod(cache, name))
    return cache.histories  # type: ignore[no-any-return]


def staying_tokens(cache: Cache) -> Tensor | None:
    """Return a mask (batch, tokens) of the current tokens that belong to their sequences after the call; None: all.

    A module that runs others on some tokens of each row, and fills shorter rows up, calls them with a cache that has this mask.
    """
    found: Tensor | None = getattr(cache, "staying", None)
    return found


def packs_sequences(cache: Cache | None) -> bool:
    """Return whether the calls have one row in which sequences follow one another, as an engine packs them.

    The histories then have `last` values before each token of that row, (tokens, length, …), and `begins`, (tokens): whether a
    token is the first of its sequence in the call.
    """
    return getattr(cache, "packs_sequences", False)


def cache_among(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """Return the cache among a call's arguments; None if there is none. Raises `RetrofitError` if it cannot store histories."""
    for value in (*args, *kwargs.values()):
        if is_cache(value):
            return value
        if is_paged(value):
            raise RetrofitError(
                "a rewritten layer cannot be called with the paged cache of continuous batching",
                why="it packs sequences and keeps only their keys and values; the layer needs more",
                remedy="call generate, not generate_batch",
                code="paged-cache",
            )
    return None


def is_paged(value: Any) -> bool:
    """Return whether it is the cache of transformers' continuous batching; does not import its code."""
    kind = getattr(sys.modules.get("transformers.generation.continuous_batching.cache"), "PagedAttentionCache", None)
    return kind is not None and isinstance(value, kind)
