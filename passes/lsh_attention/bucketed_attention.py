"""Attention in buckets of locality-sensitive hashes: a module with the signature of torch's `scaled_dot_product_attention`.

    y_r = Σ_j softmax_j(s_j) v_j,   l_r = log Σ_j exp(s_j)       s_j = scale · q·k_j + mask_j, over the keys of round r
    y   = Σ_r softmax_r(l_r) y_r

Round r has the keys that the query sees in it and in no earlier round, so y is a softmax over all keys seen, each once.
`key_orders.py` defines the keys seen in a round of hashes. Causal attention has two more rounds: a first one with the last `chunk`
keys by position, and a last one with the first key that the query may see, to which models give much weight whatever its content. A
query that sees no key returns its own value. Up to `chunk` keys torch's own attention is used.

With `shared`, keys are queries: s_j = q·k_j / |k_j| + mask_j, and a query's own key has s = −1e5, which matters only if it sees no
other.

It replaces the attention within a module's own code: that code's call of torch's fused attention is redirected to it.

Reformer: The Efficient Transformer (ICLR 2020); Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from retrofit.passes.lsh_attention.key_buckets import hash_buckets, in_heads, known_buckets
from retrofit.passes.lsh_attention.key_orders import order_by_bucket, order_by_position
from retrofit.passes.lsh_attention.seen_keys import HIDDEN, Operands, by_comparison, by_lists, by_order, most_seen
from retrofit.sdk import RetrofitError, Wrapper
from retrofit.sdk.modules import AnsweredFusedAttention, cache_among, child_modules, cond, is_growing, query_positions

FEW = 4  # queries that look for their keys one by one, as in decoding
OWN = -1e5  # the score of a query's own key where keys are queries


class BucketedAttention(nn.Module):
    """Attention in which a query sees the keys of its buckets. A cache stores the buckets of its keys under `name`."""

    def __init__(self, name: str, heads: int, causal: bool, shared: bool, chunk: int, rotations: Tensor) -> None:
        """Store `rotations`, those of all rounds, (rounds, d, buckets / 2)."""
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
        """Return the attention's output for the arguments of `scaled_dot_product_attention`: (batch, heads, n_q, d_v).

        Some models pass query heads that share a key as further queries of one token.
        """

        n_k = key.shape[-2]
        known = isinstance(n_k, int)

        def dense(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
            given = mask[0] if mask else None
            y = F.scaled_dot_product_attention(query, key, value, given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return y if known else y.contiguous()  # laid out as the other branch of a condition

        def all_keys(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
            operands = self.operands(query, key, value, mask, dropout_p, is_causal, scale, cache)
            return as_given(by_comparison(operands, None, self.chunk), query)

        def bucketed(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
            operands = self.operands(query, key, value, mask, dropout_p, is_causal, scale, cache)
            return as_given(self.bucketed(operands, key, cache), query)

        few = all_keys if self.shared else dense
        mask = () if attn_mask is None else (attn_mask,)
        if known:
            return (few if n_k <= self.chunk else bucketed)(query, key, value, *mask)
        size = (*query.shape[:-1], value.shape[-1])
        return cond(n_k <= self.chunk, few, bucketed, query, key, value, *mask, size=size)

    def operands(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        given: tuple[Tensor, ...],
        dropout: float,
        is_causal: bool,
        scale: float | None,
        cache: Cache | None,
    ) -> Operands:
        """Return the operands of the attention: the same arguments, with a row for each head of each sequence."""
        q = query.reshape(query.shape[0] * self.heads, -1, query.shape[-1])
        n_q, n_k = q.shape[1], key.shape[2]
        mask = given[0].reshape((1,) * (4 - given[0].dim()) + given[0].shape) if given else None
        if mask is not None and mask.shape[1] not in (1, self.heads):  # as the queries are
            mask = mask.reshape(mask.shape[0], self.heads, -1, n_k)
        if mask is not None:
            positions = query_positions(visible_to_some_head(mask).expand(-1, n_q, -1), n_q, is_growing(cache))
        else:
            positions = torch.arange(n_q, device=q.device) + (0 if is_causal else n_k - n_q)
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
        """Return the result, (rows, n_q, d_v), for more keys than one chunk."""
        n_q, n_k = operands.q.shape[1], key.shape[2]
        if self.causal:  # a query sees nothing after it
            operands = dataclasses.replace(operands, causal=False)
        query_buckets = hash_buckets(operands.q, self.rotations)  # (rounds, rows, n_q)
        known = known_buckets(key, n_q, self.rotations, cache, self.name)
        few = self.causal and isinstance(n_q, int) and n_q <= FEW
        if few and known is not None and most_seen(len(self.rotations), self.chunk) < n_k // 2:
            hidden = hidden_from_all(operands, n_k)
            if hidden is not NotImplemented:
                lists = known.lists_for(hidden, n_q, self.buckets, self.chunk)
                return by_lists(operands, query_buckets, lists, known.values, self.chunk)
        found = hash_buckets(key, self.rotations) if known is None else in_heads(known.values, key.shape[1]).long()
        found = found.repeat_interleave(operands.group, 2) if operands.group > 1 else found  # (rounds, batch, heads, n_k)
        if operands.mask is not None:
            visible = visible_keys_of(operands.mask).any(2)  # to any query
            found = torch.where(visible, found, self.buckets)
        key_buckets = found.flatten(1, 2)
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
    """Return which keys a 4-dimensional mask shows, in its shape."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def hidden_from_all(operands: Operands, n_k: int) -> Any:
    """Return which keys no query sees, (batch, n_k); None if there are none.

    Returns `NotImplemented` if heads differ in it, or if the queries are not the last tokens.
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
    """Return the first key that each query may see by a mask of 4 dimensions, without its last."""
    if mask is None:
        return torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    return visible_keys_of(mask).to(torch.uint8).argmax(-1)


def visible_to_some_head(mask: Tensor) -> Tensor:
    """Return the same for all heads: (batch or 1, n_q or 1, n_k)."""
    return visible_keys_of(mask).any(1)


def as_given(y: Tensor, query: Tensor) -> Tensor:
    """Return the result (rows, n_q, d_v) laid out as the queries were given."""
    return y.reshape(*query.shape[:-1], y.shape[-1])


class InterceptedAttention(Wrapper):
    """Calls the attention module `layer`, whose code attends by `attention`."""

    def __init__(self, layer: nn.Module, attention: BucketedAttention, keeps_buckets: bool) -> None:
        super().__init__(layer)
        self.attention, self.keeps_buckets = attention, keeps_buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        children = child_modules(self)
        cache = cache_among(args, kwargs) if self.keeps_buckets else None
        calls: list[bool] = []

        def answer(*operands: Any, **named: Any) -> Tensor:
            calls.append(True)
            return children["attention"](*operands, **named, cache=cache)  # type: ignore[no-any-return]

        with AnsweredFusedAttention(answer):
            result = children["layer"](*args, **kwargs)
        if not torch.compiler.is_compiling() and not calls:
            raise RetrofitError(
                f"the attention {self.attention.name} no longer calls torch's scaled_dot_product_attention",
                why="attention in buckets replaces that call",
                remedy="use attn_implementation='sdpa', as when the model was rewritten",
                code="other-path",
            )
        return result
