"""Memory looked up by hashed n-grams: a token's id and those before it.

    i(n,h) = (XOR_{j<n} m[n,h,j] · c_{t−j}) mod M_{n,h}         c: canonical ids; m: odd 64-bit multipliers; M: different primes

    gate=none      y = layer(x) + Σ_{n,h} b[n,h,i(n,h)]         b: [ΣM, d]
    gate=context   y = layer(x) + σ(x̂ · k̂ / √d) v               k = W_K e, v = W_V e, x̂ = norm(x), k̂ = norm(k)
                   e = the rows b[n,h,i(n,h)] side by side      b: [ΣM, ⌊d/hashes⌋]; W_K, W_V: [d, e]; norm(x) = √d x/|x|

At the start b is zero, or W_V with a gate. Products and XOR are of 64-bit integers that wrap around. Positions before the start of
a sequence have the id `RESERVED`. In decoding the model's own cache stores the last ids.

Ids whose texts differ only in case, a leading space or the form of their characters share one canonical id.

    c(i) = the first id whose text folds to the same as the text of i         fold: NFKC, lower case, without a leading space

Special tokens, parts of a character (byte tokens, which decode to no text) and ids without a token keep their id.

Conditional Memory via Scalable Lookup (Engram, arXiv 2601.07372): lookup and tokenizer compression.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.memory.external_memory import ExternalMemory, require_ids
from retrofit.passes.memory.memory_layer import MemoryLayer
from retrofit.sdk import SpecError, argument_place, depth_ranges
from retrofit.sdk.anatomy import LayerCall
from retrofit.sdk.data import SAVED
from retrofit.sdk.modules import (
    TokenHistory,
    cache_among,
    histories_of,
    is_growing,
    lookback_gates,
    packs_sequences,
    staying_tokens,
    tensor_argument,
    visible_keys,
)

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

MOST = 8  # the highest order
RESERVED = -1  # the id before a sequence's beginning; no token has it


def parse_orders(text: str, owner: str) -> tuple[int, ...]:
    """Return the orders named by a text like `2-3` or `2+4`, ascending. Raises `SpecError` for an order outside 1 to `MOST`."""
    orders: set[int] = set()
    for first, last in depth_ranges(text, owner, "ngrams"):
        if last < first:
            raise SpecError(
                f"{owner}: ngrams={text} has the empty range {first}-{last}",
                remedy=f"write {last}-{first}",
                option="ngrams",
                code="range",
            )
        if first < 1 or last > MOST:
            raise SpecError(
                f"{owner}: ngrams={text} names order {last if last > MOST else first}",
                why="an n-gram is a token and the n−1 before it",
                remedy=f"use orders from 1 to {MOST}",
                option="ngrams",
                code="range",
            )
        orders.update(range(first, last + 1))
    return tuple(sorted(orders))


def primes_from(buckets: int, count: int) -> tuple[int, ...]:
    """Return the `count` largest primes up to `buckets`, descending; all of them if there are fewer."""
    found: list[int] = []
    number = buckets
    while number > 1 and len(found) < count:
        if is_prime(number):
            found.append(number)
        number -= 1
    return tuple(found)


WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough for every number below 3·10^24


def is_prime(number: int) -> bool:
    """Return whether the number is a prime, by the test of Miller and Rabin."""
    if number < 2 or any(number % prime == 0 for prime in WITNESSES):
        return number in WITNESSES
    twos = ((number - 1) & (1 - number)).bit_length() - 1  # number − 1 = odd · 2^twos
    for witness in WITNESSES:
        power = pow(witness, (number - 1) >> twos, number)
        if power not in (1, number - 1) and all((power := power * power % number) != number - 1 for _ in range(twos - 1)):
            return False
    return True


class NgramMemory(ExternalMemory):
    """Σ_{n,h} b[n,h,i(n,h)]: zero at the start. `moduli` are the numbers of rows of the hashes, order by order."""

    reads_ids = True
    multipliers: Tensor
    moduli: Tensor
    first_rows: Tensor
    canonical: Tensor | None

    def __init__(
        self,
        orders: Sequence[int],
        moduli: Sequence[int],
        width: int,
        like: Tensor,
        *,
        canonical: Tensor | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__(sum(moduli), self.row_width(moduli, width), 0, like, sparse=sparse)
        self.width, self.past = width, max(orders) - 1  # number of earlier ids that a token reads
        order_of_hash = [order for order in orders for _ in range(len(moduli) // len(orders))]
        drawn = torch.randint(-(2**63), 2**63 - 1, (len(moduli), max(orders)), device=like.device) | 1
        used = torch.tensor([[back < order for back in range(max(orders))] for order in order_of_hash], device="cpu")
        self.register_buffer("multipliers", drawn * used.to(drawn))  # (hashes, max n); those beyond n are zero
        sizes = torch.tensor(moduli, device="cpu")
        self.register_buffer("moduli", sizes.to(like.device))
        self.register_buffer("first_rows", (sizes.cumsum(0) - sizes).to(like.device))
        self.register_buffer("canonical", canonical)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.rows(self.b, self.hashes(ids)).sum(-2)

    def hashes(self, ids: Tensor | None) -> Tensor:
        """Return the row of every hash, (…, hashes), for ids (…, max n): a token's own first, then the one before it, and so on."""
        assert ids is not None
        code = ids[..., :1] * self.multipliers[:, 0]
        for back in range(1, self.past + 1):
            code = code ^ (ids[..., back : back + 1] * self.multipliers[:, back])
        return code.remainder(self.moduli) + self.first_rows

    def canonical_ids(self, ids: Tensor) -> Tensor:
        """Return the canonical ids, which the hashes read; ids beyond the table `canonical` stay the same."""
        if self.canonical is None:
            return ids.long()
        known = self.canonical.shape[0]
        return torch.where(ids < known, self.canonical[ids.clamp(max=known - 1)], ids.long())

    def tables(self) -> tuple[str, ...]:
        return ("b",)

    @staticmethod
    def row_width(moduli: Sequence[int], width: int) -> int:
        """Return the width of a row, for hashes with these moduli and a stream of this width."""
        return width

    @staticmethod
    def size(moduli: Sequence[int], width: int) -> int:
        """Return the number of parameters."""
        return sum(moduli) * width

    def extra_repr(self) -> str:
        return f"hashes={len(self.moduli)}, rows={self.buckets}, width={self.width}"


class GatedNgramMemory(NgramMemory):
    """σ(x̂ · k̂ / √d) v, k = W_K e, v = W_V e, where e are the rows side by side.

    At the start W_V is zero and the rows have the standard deviation `spread`.
    """

    def __init__(
        self, orders: Sequence[int], moduli: Sequence[int], width: int, like: Tensor, *, spread: float, **options: Any
    ) -> None:
        super().__init__(orders, moduli, width, like, **options)
        nn.init.normal_(self.b, std=spread)
        kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        columns = self.row_width(moduli, width) * len(moduli)
        self.w_k = nn.Parameter(torch.randn(width, columns, **kind) / math.sqrt(columns))
        self.w_v = nn.Parameter(torch.zeros(width, columns, **kind))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        e = self.rows(self.b, self.hashes(ids)).flatten(-2)
        k, v = F.linear(e, self.w_k), F.linear(e, self.w_v)
        x = x.to(k.dtype)
        gate = (unit(x) * unit(k)).sum(-1, keepdim=True) * math.sqrt(self.width)  # norm(x) · norm(k) / √d
        return torch.sigmoid(gate).to(v.dtype) * v

    def late_parameters(self) -> tuple[str, ...]:
        return ("b", "w_k")

    @staticmethod
    def row_width(moduli: Sequence[int], width: int) -> int:
        """Return the width of a row; the rows of all hashes side by side are about as wide as the stream."""
        return max(1, width // len(moduli))

    @staticmethod
    def size(moduli: Sequence[int], width: int) -> int:
        row = GatedNgramMemory.row_width(moduli, width)
        return sum(moduli) * row + 2 * width * row * len(moduli)


def unit(x: Tensor) -> Tensor:
    """Return x/|x|."""
    return F.normalize(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, dim=-1)


class NgramLayer(MemoryLayer):
    """`layer(x) + memory(x, ids)`, where the memory reads each token's id and those before it in its own sequence.

    The cache stores the ids of earlier calls under `name`. The layer's arguments show which tokens belong to one sequence: a mask
    hides padding and other sequences packed into the same row, and positions restart.
    """

    memory: NgramMemory

    def __init__(
        self,
        layer: nn.Module,
        memory: NgramMemory,
        *,
        stream_in: int | str,
        stream_out: int | str | None,
        name: str,
        call: LayerCall,
    ) -> None:
        super().__init__(layer, memory, stream_in=stream_in, stream_out=stream_out)
        self.name = name
        self.mask = None if call.mask is None else argument_place(layer, call.mask.key)
        self.true_hides = call.mask is not None and call.mask.true_hides
        self.positions = None if call.positions is None else argument_place(layer, call.positions)

    def looked_up(self, ids: Tensor | None, x: Tensor, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
        """Return each token's id and those before it: (batch, T, max n)."""
        ids = self.memory.canonical_ids(require_ids(ids, x))
        mask, positions = (tensor_argument(place, arguments, keywords) for place in (self.mask, self.positions))
        past, gates, cache = self.memory.past, None, cache_among(arguments, keywords)
        if packs_sequences(cache):  # each token becomes a row
            rows = ids.transpose(0, 1)
            return with_earlier(rows, self.earlier(rows, cache), None, past).transpose(0, 1)
        if past:
            visible = None if mask is None else visible_keys(mask, ids.shape[1], self.true_hides)
            seen = lookback_gates(visible, ids.shape[1], past, is_growing(cache))
            gates = both(seen, position_gates(positions, past))
        return with_earlier(ids, self.earlier(ids, cache), gates, past)

    def earlier(self, ids: Tensor, cache: Cache | None) -> Tensor | None:
        """Return the ids before `ids` from the cache, (batch, past), and store `ids` in it; None without a cache.

        A history is zero before its first value, so it stores ids − RESERVED.
        """
        past = self.memory.past
        if cache is None or not past:
            return None
        histories, stored = histories_of(cache), ids - RESERVED
        if self.name not in histories:
            histories[self.name] = TokenHistory.in_cache(cache, past, stored)
        return histories[self.name].advance(stored, staying_tokens(cache)) + RESERVED


def position_gates(positions: Tensor | None, past: int) -> Tensor | None:
    """Return gates g[t,1] … g[t,past], (batch or 1, T, past): g[t,j] is whether token t − j + 1 continues the sequence of the token
    before it.

    It does if its position is higher; the first token of a call does if its position is above 0.
    """
    if positions is None or positions.dim() != 2:
        return None
    before = torch.cat([torch.zeros_like(positions[:, :1]), positions[:, :-1]], 1)
    row = F.pad(positions > before, (past - 1, 0), value=True)
    return torch.stack([row[:, past - 1 - back : row.shape[1] - back] for back in range(past)], -1)


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the gates that are open in both; None means that all are open."""
    return second if first is None else first if second is None else first & second


def with_earlier(ids: Tensor, before: Tensor | None, gates: Tensor | None, past: int) -> Tensor:
    """Return each of `ids`, (batch, T), and the `past` ids before it: (batch, T, 1 + past). `before` are those before the first.

    An id that does not exist is RESERVED. If `gates`, (batch or 1, T, past), hide an id, it and all ids before it belong to other
    sequences and are RESERVED too.
    """
    if before is None:
        before = ids.new_full((ids.shape[0], past), RESERVED)
    row = torch.cat([before, ids], 1)
    window = torch.stack([row[:, past - back : row.shape[1] - back] for back in range(past + 1)], -1)
    if gates is None:
        return window
    hidden = (~gates).long().cumsum(-1) > 0
    return torch.cat([window[..., :1], window[..., 1:].masked_fill(hidden, RESERVED)], -1)


# ── Canonical ids ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


UNDECODABLE = "\ufffd"  # decoders write it for bytes that are no character


def fold(text: str) -> str:
    """Return the text in NFKC and lower case, without a leading space."""
    return unicodedata.normalize("NFKC", text).lower().removeprefix(" ")


def canonical_ids(tokenizer: Any, count: int, vocabulary: int | None = None) -> Tensor:
    """Return the canonical ids of the first `count` ids of a model whose token table has `vocabulary` rows (None: `count`).

    Returns the ids unchanged if the tokenizer has more ids than the table has rows, because it belongs to another model, or if the
    model is loaded from a file, which contains its canonical ids.
    """
    ids = torch.arange(count, device="cpu")
    if tokenizer is SAVED or size_of(tokenizer) > (count if vocabulary is None else vocabulary):
        return ids
    known = sorted(id for id in set(tokenizer.get_vocab().values()) if id < count)
    texts = tokenizer.batch_decode([[id] for id in known], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    special, first = set(tokenizer.all_special_ids), dict[str, int]()
    for id, text in zip(known, texts, strict=True):
        if id not in special and text and UNDECODABLE not in text:
            ids[id] = first.setdefault(fold(text), id)
    return ids


def size_of(tokenizer: Any) -> int:
    """Return the tokenizer's highest id plus one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def require_of_model(tokenizer: Any, vocabularies: Collection[int], came_with_it: bool) -> None:
    """Raise `SpecError` if `tokenizer` is no tokenizer, or not one for a model whose token tables have this many rows.

    A table may have more rows than the tokenizer has ids, because it is padded or was extended: at most twice as many, unless the
    tokenizer came with the model.
    """
    missing = [name for name in ("get_vocab", "batch_decode", "all_special_ids") if not hasattr(tokenizer, name)]
    if missing:
        raise SpecError(
            f"tokenizer= is {type(tokenizer).__name__}",
            why=f"it has no {missing[0]}",
            remedy="pass a tokenizer of transformers, or its directory",
            option="tokenizer",
            code="no-tokenizer",
        )
    size = size_of(tokenizer)
    if any(size <= vocabulary and (came_with_it or vocabulary <= 2 * size) for vocabulary in vocabularies):
        return
    most = max(vocabularies, default=0)
    beyond = "it is another model's, or the embedding was not resized"
    raise SpecError(
        f"the tokenizer has {size:,} ids, the model {most:,}",
        why=beyond if size > most else "most ids of the model would have no text",
        remedy="use the tokenizer that the model was trained with, or canonical=none",
        code="other-model",
        option="tokenizer",
    )
