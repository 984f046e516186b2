"""Value embeddings: rows of a table, looked up by token id, are added to an attention's values; each head has a gate.

    v_t ← v_t + g_t · table[i_t],   g_t = 2σ(W x_t[:32])          table: [n, values of all heads], W: [heads of values, 32]

x is the input of the value projection: the stream, or the latent of multi-head latent attention (DeepSeek-V2, 2024). At the start
the table and W are zero: the gates are 1 and nothing is added. A cache stores the sums as values; one of latents, from which all
values are computed again in each call, also stores the ids. Query heads that share values share the rows added to them.

The projection keeps its place, name and weight: each call runs a shallow copy of the attention, in which the rows are added to the
projection's output, at the columns that are values (`ValueSite`).

As in nanochat and modded-nanogpt (2024, 2025).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.memory.external_memory import TokenIdMemory
from retrofit.passes.memory.memory_layer import TOKEN_IDS, reads_token_ids
from retrofit.sdk import Anatomy, NearMiss, RetrofitError, Stack, WrappedModule, Wrapper
from retrofit.sdk.anatomy import ValueSite, find_value_sites
from retrofit.sdk.modules import cache_among, call_with_substitutes, child_modules

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

GATE_INPUTS = 32  # features of x that a gate reads; all if there are fewer


class ValueEmbedding(TokenIdMemory):
    """v ← v + 2σ(W x[:32]) · table[i] in the columns of y that are values. y: (…, columns), x: (…, d), ids: (batch, tokens)."""

    def __init__(self, rows: int, site: ValueSite, like: Tensor, *, sparse: bool = False) -> None:
        super().__init__(rows, site.columns, 0, like, sparse=sparse)
        self.heads, self.inputs = site.heads, min(GATE_INPUTS, site.features)
        self.blocks, self.start, self.tokens_first = site.blocks, site.start, site.tokens_first
        self.w = nn.Parameter(torch.zeros(self.heads, self.inputs, device=like.device, dtype=like.dtype))

    def create(self, kind: dict[str, Any]) -> None:
        self.table = nn.Parameter(torch.zeros(self.buckets, self.width, **kind))

    def forward(self, y: Tensor, x: Tensor, ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        i, known = self.look_up(x, ids.transpose(0, 1) if self.tokens_first and ids is not None else ids)
        gate = 2 * torch.sigmoid(F.linear(x[..., : self.inputs].to(self.w.dtype), self.w))  # (…, heads)
        gate = gate if known is None else gate * known.unsqueeze(-1).to(gate.dtype)
        added = (self.rows(self.table, i).unflatten(-1, (self.heads, -1)) * gate.unsqueeze(-1)).flatten(-2).to(y.dtype)
        if y.shape[-1] == self.width:
            return y + added
        blocks, width = y.unflatten(-1, (self.blocks, -1)), self.width // self.blocks
        end = self.start + width
        values = blocks[..., self.start : end] + added.unflatten(-1, (self.blocks, width))
        return torch.cat([blocks[..., : self.start], values, blocks[..., end:]], -1).flatten(-2)

    def tables(self) -> tuple[str, ...]:
        return ("table",)

    def late_parameters(self) -> tuple[str, ...]:
        return ("w",)

    def extra_repr(self) -> str:
        return f"buckets={self.buckets}, heads={self.heads} of {self.width // self.heads}"


@dataclasses.dataclass(frozen=True)
class ValuePlace(WrappedModule):
    """An attention that gets value embeddings, and its value projection."""

    site: ValueSite = dataclasses.field(kw_only=True)


def value_places(
    anatomy: Anatomy, stack: Stack, depths: list[int], near_misses: list[NearMiss]
) -> dict[str, tuple[WrappedModule, ...]]:
    """Return the attentions at these depths that get value embeddings, by layer; layers without any are included."""
    sites, missed = find_value_sites(anatomy, [(stack, depth) for depth in depths])
    near_misses += missed
    return {
        layer.name: tuple(ValuePlace(site.name, 0, None, site=site) for site in sites.get(layer.name, ()))
        for layer in stack.layers
        if layer.name
    }


def value_formula(tables: Iterable[tuple[int, WrappedModule]]) -> tuple[int, str]:
    """Return the number of parameters of tables with these rows and places, and its formula."""
    sizes = collections.Counter(
        (rows, place.site.columns, place.site.heads, min(GATE_INPUTS, place.site.features))
        for rows, place in tables
        if isinstance(place, ValuePlace)
    )
    total = sum(times * (rows * columns + heads * inputs) for (rows, columns, heads, inputs), times in sizes.items())
    terms = (f"{times}·({rows:,}·{columns:,} + {heads}·{inputs})" for (rows, columns, heads, inputs), times in sizes.items())
    return total, f"V·d_v + h_v·{GATE_INPUTS} a table: {' + '.join(terms)} = {total:,}"


class ValueTokens:
    """The ids of the tokens that the value projection computes values of, in one call of the attention."""

    def __init__(self, ids: Tensor | None) -> None:
        self.ids, self.were_read = ids, False

    def read(self) -> Tensor | None:
        self.were_read = True
        return self.ids


class CacheOfLatents:
    """Stands for the model's cache in one call of an attention whose latents it may contain; it stores the ids with them.

    Each id becomes digits of 8 bits, exact in 16-bit floats, in more features of what the attention stores, so every kind of cache
    and every operation on it (reordering, cropping) works. Afterwards `tokens` are those of all latents in the cache. An attention
    that stores keys and values has computed the values before, and stores nothing more.
    """

    def __init__(self, cache: Cache, tokens: ValueTokens, most: int) -> None:
        self.cache, self.tokens, self.most = cache, tokens, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, latent: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store `latent`, (batch, 1, tokens, features), and `other`; return all that is stored of them.

        Raises `RetrofitError` if the cache is quantized, because that rounds ids.
        """
        ids = self.tokens.ids
        if self.tokens.were_read or ids is None:
            return self.cache.update(latent, other, *args, **kwargs)
        if any(hasattr(layer, "_dequantize") for layer in getattr(self.cache, "layers", ())):
            raise RetrofitError(
                "value embeddings cannot be called with a quantized cache",
                why="the attention stores latents and their tokens' ids, and quantization rounds the ids",
                remedy="use a dynamic or static cache",
                code="quantized-cache",
            )
        ids, shifts = ids.clamp(max=self.most), range(0, self.most.bit_length(), 8)
        digits = torch.stack([ids >> shift & 255 for shift in shifts], -1).unsqueeze(1)
        stored, other = self.cache.update(torch.cat([latent, digits.to(latent)], -1), other, *args, **kwargs)
        latent, digits = stored.split([latent.shape[-1], len(shifts)], -1)
        self.tokens.ids = sum(digit.long() << shift for digit, shift in zip(digits.unbind(-1), shifts, strict=True))
        return latent, other


class ValueProjection(Wrapper):
    """Wraps an attention's value projection for one call of the attention and adds the rows of `tokens` to its output."""

    def __init__(self, projection: nn.Module, memory: ValueEmbedding, tokens: ValueTokens) -> None:
        super().__init__(projection)
        self.memory, self.tokens = memory, tokens
        self.training = projection.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        children = child_modules(self)
        x = args[0] if args else next(iter(kwargs.values()))
        y: Tensor = children["memory"](children["layer"](*args, **kwargs), x, self.tokens.read())
        return y


class ValueAttention(Wrapper):
    """Calls the attention `layer` with value embeddings, looked up by the keyword `token_ids`, in its projection at `path`.

    If the projection reads a latent, the cache may contain latents.
    """

    opens_layer = True

    def __init__(self, layer: nn.Module, path: str, memory: ValueEmbedding, *, latent: bool) -> None:
        super().__init__(layer)
        self.memory, self.path, self.latent, self.forwards_ids = memory, path, latent, reads_token_ids(layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keywords, children = dict(kwargs), child_modules(self)
        memory: Any = children["memory"]
        tokens = ValueTokens(keywords.get(TOKEN_IDS))
        if not self.forwards_ids:
            keywords.pop(TOKEN_IDS, None)
        if self.latent and (cache := cache_among(args, keywords)) is not None:
            stand_in = CacheOfLatents(cache, tokens, memory.buckets)
            args = tuple(stand_in if value is cache else value for value in args)
            keywords = {name: stand_in if value is cache else value for name, value in keywords.items()}

        def with_rows(projection: nn.Module) -> nn.Module:
            return ValueProjection(projection, memory, tokens)

        return call_with_substitutes(children["layer"], (self.path,), with_rows, args, keywords)
