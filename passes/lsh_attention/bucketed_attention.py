"""Attention in buckets of locality-sensitive hashes: a module with the signature of torch's `scaled_dot_product_attention`.

    y_r = Σ_j softmax_j(s_j) v_j,   l_r = log Σ_j exp(s_j)       s_j = scale · q·k_j + mask_j, over the keys of round r
    y   = Σ_r softmax_r(l_r) y_r

Round r has the keys that the query sees in it and in no earlier round, so y is a softmax over all visible keys, each once.
`key_orders.py` defines the keys visible in a round of hashes. Causal attention has two more rounds: first the last `chunk` keys by
position, and last the first key that the query may see, to which models give much weight whatever its content. A query that sees no
key returns its own value. Up to `chunk` keys torch's attention is used.

With `shared`, keys are queries: s_j = q·k_j / |k_j| + mask_j, and a query's own key has s = −1e5, so it counts only if the query
sees no other.

`InterceptedAttention` redirects the call of torch's fused attention in a module's code to it.

Reformer: The Efficient Transformer (ICLR 2020); Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.lsh_attention.key_buckets import cached_buckets, hash_buckets, in_heads
from retrofit.passes.lsh_attention.key_orders import order_by_bucket, order_by_position
from retrofit.passes.lsh_attention.seen_keys import HIDDEN, Operands, by_comparison, by_lists, by_order, most_seen
from retrofit.sdk import RetrofitError, Wrapper
from retrofit.sdk.modules import AnsweredFusedAttention, cache_among, child_modules, cond, is_growing, query_positions

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

FEW = 4  # up to so many queries, as in decoding, each finds its keys separately
OWN = -1e5  # the score of a query's own key where keys are queries


class BucketedAttention(nn.Module):
    """Attention of a query to the keys in its buckets. A cache stores the buckets of its keys under `name`."""

    def __init__(self, name: str, heads: int, causal: bool, shared: bool, chunk: int, rotations: Tensor) -> None:
        """Store the `rotations` of all rounds, (rounds, d, buckets / 2)."""
        super().__init__()
        self.name, self.heads, self.causal, self.shared, self.chunk = name, heads, causal, shared, chunk
        self.rotations: Tensor
        self.register_buffer("rotations", rotations)

    @property
    def buckets(self) -> int:
        return 2 * self.rotations.shape[-1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the output for the arguments of `scaled_dot_product_attention`: (batch, heads, n_q, d_v).

        Some models pass query heads that share a key as further queries of one token.
        """
        n_k = key.shape[-2]
        is_static = isinstance(n_k, int)

        def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
            y = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return y if is_static else y.contiguous()  # the layout of the other branch of the condition

        def all_keys(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
            operands = self.operands(query, key, value, mask, dropout_p, is_causal, scale, cache)
            return by_comparison(operands, None, self.chunk).reshape(*query.shape[:-1], value.shape[-1])

        def bucketed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
            operands = self.operands(query, key, value, mask, dropout_p, is_causal, scale, cache)
            return self.bucketed(operands, key, cache).reshape(*query.shape[:-1], value.shape[-1])

        one_chunk = all_keys if self.shared else dense
        masks = () if attn_mask is None else (attn_mask,)
        if is_static:
            return (one_chunk if n_k <= self.chunk else bucketed)(query, key, value, *masks)
        size = (*query.shape[:-1], value.shape[-1])
        return cond(n_k <= self.chunk, one_chunk, bucketed, query, key, value, *masks, size=size)

    def operands(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        cache: Cache | None,
    ) -> Operands:
        """Return the operands of the attention: the arguments with a row for each head of each sequence."""
        q = query.reshape(query.shape[0] * self.heads, -1, query.shape[-1])
        n_q, n_k = q.shape[1], key.shape[2]
        if mask is None:
            positions = torch.arange(n_q, device=q.device) + (0 if is_causal else n_k - n_q)
        else:
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
            if mask.shape[1] not in (1, self.heads):  # heads are queries in it
                mask = mask.reshape(mask.shape[0], self.heads, -1, n_k)
            positions = query_positions(visible_keys_of(mask).any(1).expand(-1, n_q, -1), n_q, is_growing(cache))
        few = self.causal and isinstance(n_q, int) and n_q <= FEW
        return Operands(
            q=q,
            k=(F.normalize(key, dim=-1) if self.shared and not few else key).flatten(0, 1),
            unit_keys=self.shared and few,
            v=value.flatten(0, 1),
            mask=mask,
            positions=positions,
            first_keys=first_visible(mask, q.device) if self.causal else None,
            heads=self.heads,
            group=self.heads // key.shape[1],
            causal=self.causal or is_causal,
            own=OWN if self.shared else None,
            scale=1.0 if self.shared else query.shape[-1] ** -0.5 if scale is None else scale,
            dropout=dropout,
        )

    def bucketed(self, operands: Operands, key: Tensor, cache: Cache | None) -> Tensor:
        """Return the output, (rows, n_q, d_v), for more keys than one chunk."""
        n_q, n_k = operands.q.shape[1], key.shape[2]
        if self.causal:  # the rounds hide later keys
            operands = dataclasses.replace(operands, causal=False)
        query_buckets = hash_buckets(operands.q, self.rotations)  # (rounds, rows, n_q)
        cached = cached_buckets(key, n_q, self.rotations, cache, self.name)
        few = self.causal and isinstance(n_q, int) and n_q <= FEW
        if few and cached is not None and most_seen(len(self.rotations), self.chunk) < n_k // 2:
            hidden = hidden_from_all(operands, n_k)
            if hidden is not NotImplemented:
                lists = cached.lists_for(hidden, n_q, self.buckets, self.chunk)
                return by_lists(operands, query_buckets, lists, cached.values, self.chunk)
        codes = hash_buckets(key, self.rotations) if cached is None else in_heads(cached.values, key.shape[1]).long()
        codes = codes.repeat_interleave(operands.group, 2) if operands.group > 1 else codes  # (rounds, batch, heads, n_k)
        if operands.mask is not None:
            codes = torch.where(visible_keys_of(operands.mask).any(2), codes, self.buckets)  # visible to any query
        key_buckets = codes.flatten(1, 2)
        if few:
            return by_comparison(operands, (query_buckets, key_buckets), self.chunk)
        orders = [
            order_by_bucket(query, keys, operands.positions, self.buckets + 1, self.chunk, self.causal)
            for query, keys in zip(query_buckets, key_buckets, strict=True)
        ]
        local = order_by_position(operands.positions, n_k, self.chunk) if self.causal else None
        return by_order(operands, orders, local, self.chunk)

    def extra_repr(self) -> str:
        rounds, width, _ = self.rotations.shape
        return f"d={width}, rounds={rounds}, buckets={self.buckets}, chunk={self.chunk}, causal={self.causal}, shared={self.shared}"


def visible_keys_of(mask: Tensor) -> Tensor:
    """Return True where a 4-dimensional mask shows a key, in the mask's shape."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def hidden_from_all(operands: Operands, n_k: int) -> Any:
    """Return True for keys that the mask hides from all queries, (batch, n_k); None without a mask.

    Returns `NotImplemented` if heads differ in these keys, or if the queries are not the last tokens.
    """
    if operands.mask is None:
        return None
    visible = visible_keys_of(operands.mask).any(2)
    n_q = operands.positions.shape[0]
    last = torch.arange(n_k - n_q, n_k, device=visible.device)
    if not bool((visible == visible[:, :1]).all()) or not torch.equal(operands.positions, last):
        return NotImplemented
    return ~visible[:, 0].expand(operands.q.shape[0] // operands.heads, -1)


def first_visible(mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the index of the first key that the mask shows to each query: its shape without the last dimension."""
    if mask is None:
        return torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    return visible_keys_of(mask).to(torch.uint8).argmax(-1)


class InterceptedAttention(Wrapper):
    """Calls the attention module `layer`; `attention` replaces the fused attention that its code calls."""

    def __init__(self, layer: nn.Module, attention: BucketedAttention, keeps_buckets: bool) -> None:
        super().__init__(layer)
        self.attention, self.keeps_buckets = attention, keeps_buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        children = child_modules(self)
        cache = cache_among(args, kwargs) if self.keeps_buckets else None
        core = AnsweredFusedAttention(lambda *operands, **keywords: children["attention"](*operands, **keywords, cache=cache))
        with core:
            result = children["layer"](*args, **kwargs)
        if not torch.compiler.is_compiling() and not core.calls:
            raise RetrofitError(
                f"the attention {self.attention.name} no longer calls torch's scaled_dot_product_attention",
                why="attention in buckets replaces that call",
                remedy="use attn_implementation='sdpa', as when the model was rewritten",
                code="other-path",
            )
        return result
