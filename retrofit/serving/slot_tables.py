"""States of earlier tokens besides keys and values, in a table with one row per slot of a paged cache.

A pass stores such states in the model's cache (`retrofit.surgery.cache_memory`). Here that cache is a `SlotCache`: a row of the
table holds all states that the layers push for the token in that slot. States are written at the slots of the current tokens; those
of earlier tokens are read through the block table. So paging, shared prefixes, chunks, preemption and parallel samples need no
further code: equal blocks hold equal states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retrofit.errors import RetrofitError
from retrofit.surgery.cache_memory import CacheWithHistories, TokenHistory

ALIGNED = 16  # bytes: every state begins at a multiple


@dataclasses.dataclass
class RowLayout:
    """The layout of a row, in bytes: each state gets its place in the model's first run, and none is added later."""

    width: int = 0
    is_final: bool = False

    def reserve(self, count: int) -> int:
        """Return the first byte of a state of `count` bytes. Raises `RetrofitError` if the layout is final."""
        if self.is_final:
            raise RetrofitError("a layer keeps a state that it did not keep when the model first ran", code="states")
        start = self.width
        self.width += math.ceil(count / ALIGNED) * ALIGNED
        return start


class Places:
    """The places of a batch's tokens: the slots to write to, those of earlier tokens, and which tokens begin a sequence.

    `table` is (blocks, 1, slots of a block, bytes). The tokens of a sequence are consecutive; `starts`, (sequences + 1), gives the
    first token of each, `blocks`, (sequences, any), its block table. `slots` and `positions` are those of the tokens; the last may
    be padding.
    """

    def __init__(self, table: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, blocks: Tensor) -> None:
        self.table, self.positions, self.size = table, positions.long(), table.shape[2]
        written = slots[: len(positions)].long().clamp(min=0)  # padding has none: block 0 is unused
        self.block, self.offset = written // self.size, written % self.size
        tokens = torch.arange(len(positions), device=positions.device)
        owner = torch.searchsorted(starts[1:].long().contiguous(), tokens, right=True)
        self.blocks = blocks[owner.clamp(max=len(starts) - 2)]
        self.begins = torch.isin(tokens, starts[:-1].long())
        self.owner = owner

    @functools.cached_property
    def rounds(self) -> int:
        """Return the length of the longest chain of sequences in which each continues after a token that the previous one computes.

        A block counts as part of a prefix as soon as a sequence gets it: another sequence may share it in the same batch.
        """
        first = self.begins.nonzero().flatten()
        before = (self.positions[first] - 1).clamp(min=0)
        slots = self.blocks[first].gather(1, (before // self.size).unsqueeze(1)).squeeze(1) * self.size + before % self.size
        same = (slots.unsqueeze(1) == self.block * self.size + self.offset) & (self.positions[first] > 0).unsqueeze(1)
        pairs = zip(self.owner[first].tolist(), self.owner[same.long().argmax(1)].tolist(), same.any(1).tolist(), strict=True)
        after = {sequence: other for sequence, other, goes_on in pairs if goes_on}
        longest = 1
        for sequence in after:
            length, other = 1, sequence
            while other in after:
                other, length = after[other], length + 1
            longest = max(longest, length)
        return longest

    def write(self, start: int, values: Tensor) -> None:
        """Write (tokens, bytes) into the tokens' rows, beginning at column `start`."""
        self.table[self.block, 0, self.offset, start : start + values.shape[1]] = values

    def before(self, length: int, start: int, count: int) -> Tensor:
        """Return columns of the rows of the `length` tokens before each, oldest first, zeros if none: (tokens, length, count)."""
        earlier = self.positions.unsqueeze(1) - torch.arange(length, 0, -1, device=self.positions.device)
        known = earlier.clamp(min=0)
        blocks = self.blocks.gather(1, known // self.size).long()
        rows = self.table[blocks, 0, known % self.size, start : start + count]
        return rows.masked_fill((earlier < 0).unsqueeze(-1), 0)


class SlotHistory(TokenHistory):
    """A state of each token, in the table: `last` are those before each current token, (tokens, length, …)."""

    def __init__(self, cache: SlotCache, length: int, like: Tensor) -> None:
        self.cache, self.length = cache, length
        self.shape, self.dtype = like.shape[2:], like.dtype
        self.count = math.prod(self.shape) * like.element_size()
        self.start = cache.layout.reserve(self.count)
        self.was_reset, self.missing = False, 0

    def last(self) -> Tensor:
        places = self.cache.places
        if places is None:
            return torch.zeros(self.cache.tokens, self.length, *self.shape, dtype=self.dtype, device=self.cache.device)
        rows = places.before(self.length, self.start, self.count).view(self.dtype)
        return rows.view(*rows.shape[:2], *self.shape)

    def push(self, new: Tensor, staying: Tensor | None = None) -> None:
        if self.cache.places is not None:
            values = new.to(self.dtype).flatten().contiguous().view(torch.uint8)
            self.cache.places.write(self.start, values.view(self.cache.tokens, self.count))

    def advance(self, new: Tensor, staying: Tensor | None = None) -> Tensor:
        """Push `new`; return the states before each token, which may include some of `new`."""
        self.push(new, staying)
        return self.last()

    @property
    def begins(self) -> Tensor:
        """Return which tokens begin a sequence; without places all do, as no state is known."""
        places, cache = self.cache.places, self.cache
        return torch.ones(cache.tokens, dtype=torch.bool, device=cache.device) if places is None else places.begins

    @property
    def rounds(self) -> int:
        return 1 if self.cache.places is None else self.cache.places.rounds


class SlotCache(CacheWithHistories, Cache):
    """The cache that layers are called with: it passes keys and values to the engine, and stores histories in the table."""

    packs_sequences = True
    is_compileable = False  # type: ignore[assignment]

    def __init__(self, layout: RowLayout) -> None:
        self.layout, self.layers = layout, []
        self.histories: dict[str, TokenHistory] = {}
        self.places: Places | None = None
        self.tokens, self.device = 0, torch.device("cpu")

    def begin(self, positions: Tensor, places: Places | None) -> None:
        """Start a batch of tokens at these positions; without places the states of earlier tokens are zeros."""
        self.tokens, self.device, self.places = len(positions), positions.device, places

    def new_history(self, length: int, like: Tensor) -> TokenHistory:
        """Return a history stored in the table."""
        return SlotHistory(self, length, like)

    def update(self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def __len__(self) -> int:
        return 0
