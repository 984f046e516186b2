"""One softmax over two sets of keys: a module with the signature of torch's `scaled_dot_product_attention` plus the other set.

    s_j = scale · q·k_j + mask_j                       of the attention's own keys
    s_j = scale · q·k_j + mask_j + log w               of the other keys, w = 1 in the method
    y   = Σ_j softmax_j(s) v_j

In the first attention of a layer the decoder's tokens are its own keys and the encoder's tokens the others; in the second, which
was the cross-attention, it is the reverse. At w = 0 it is the dense attention.

If scores are written out, the model's own code computes the scores of both sets and the products with the values:

    p = softmax([s; t + log w])            s: scores of the attention's own keys, t: scores of the other keys, w = 1 in the method
    y = p_s v + p_t v'

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.merge_cross_attention.attention_calls import AnsweredScores, RecordedScores, answered_core, recorded_core
from retrofit.sdk.modules import is_exporting

NONE, FIRST = "none", "first"  # relative positions of encoder tokens to decoder tokens


class AttentionToOthers(nn.Module):
    """Has w, the weight of the other keys, and the factor `share` of w, which a dial sets."""

    def __init__(self, heads: int, positions: str, encoder_is_own: bool, weight: float, like: Tensor) -> None:
        """Start with w = `weight`; below 1 it is a parameter with one number per head."""
        super().__init__()
        self.heads, self.positions, self.encoder_is_own = heads, positions, encoder_is_own
        self.share = 1.0
        self.log_weight: nn.Parameter | None = None
        if weight < 1:
            self.log_weight = nn.Parameter(torch.full((heads,), math.log(weight), dtype=like.dtype, device=like.device))

    @property
    def weighs(self) -> bool:
        """Return whether the weight of the other keys may differ from 1."""
        return self.log_weight is not None or self.share != 1

    def added(self) -> Tensor | float:
        """Return the logarithm of the weight and the share, (1, heads, 1, 1) or a number."""
        share = math.log(self.share) if self.share != 1 else 0.0
        return share if self.log_weight is None else self.log_weight.view(1, -1, 1, 1) + share

    def extra_repr(self) -> str:
        return f"heads={self.heads}, positions={self.positions}, encoder_is_own={self.encoder_is_own}"


FEW = 8  # up to so many queries, as in decoding, scores are written out, which copies no key
HIDDEN = -1e4  # an additive mask below this hides


@dataclasses.dataclass(frozen=True)
class Part:
    """The queries, keys and values of one set of keys, by head, with its mask and scale."""

    q: Tensor  # (batch, heads, T, d)
    k: Tensor  # (batch, key heads, K, d)
    v: Tensor  # (batch, key heads, K, d_v)
    mask: Tensor | None  # (batch or 1, heads or 1, T or 1, K), a bias or the visible keys
    scale: float

    @staticmethod
    def of(given: Mapping[str, Any], heads: int) -> Part:
        """Return the part in an attention's arguments. Some models pass heads that share a key as further queries of a token."""
        query, key, mask = given["query"], given["key"], given.get("attn_mask")
        q = query.reshape(query.shape[0], heads, -1, query.shape[-1])
        keys = key.shape[-2]
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
            if mask.shape[1] not in (1, heads):
                mask = mask.reshape(mask.shape[0], heads, -1, keys)
        if given.get("is_causal"):
            mask = torch.ones(q.shape[2], keys, dtype=torch.bool, device=q.device).tril().view(1, 1, q.shape[2], keys)
        scale = given.get("scale")
        return Part(q, key, given["value"], mask, query.shape[-1] ** -0.5 if scale is None else scale)

    def scores(self) -> Tensor:
        """Return the masked scores, (batch, heads, T, K), in float32 or wider."""
        batch, heads, tokens, _ = self.q.shape
        folded = self.q.reshape(batch, self.k.shape[1], -1, self.q.shape[-1])  # heads that share a key are queries of one head
        s = ((folded * self.scale) @ self.k.mT).reshape(batch, heads, tokens, -1)
        s = s.to(torch.promote_types(s.dtype, torch.float32))
        if self.mask is None:
            return s
        return s.masked_fill(~self.mask, torch.finfo(s.dtype).min) if self.mask.dtype == torch.bool else s + self.mask

    def full_mask(self, is_bias: bool) -> Tensor:
        """Return the mask for all queries and keys, (batch or 1, heads or 1, T, K): a bias or the visible keys."""
        tokens, keys = self.q.shape[2], self.k.shape[2]
        if self.mask is None:
            like = self.q.new_zeros(1, 1, 1, 1) if is_bias else self.q.new_ones(1, 1, 1, 1, dtype=torch.bool)
            return like.expand(1, 1, tokens, keys)
        mask = self.mask
        if is_bias and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=self.q.dtype).masked_fill(~mask, torch.finfo(self.q.dtype).min)
        mask = mask.to(self.q.dtype) if is_bias else mask
        return mask.expand(*mask.shape[:2], tokens, keys)

    def with_bias_of_first(self, decoder: Part) -> Part:
        """Return the keys with the decoder's queries, and with the bias of the decoder's first token added to the mask."""
        mask = self.mask
        if decoder.mask is not None and decoder.mask.dtype != torch.bool:
            bias = decoder.mask[..., :1]
            bias = torch.where(bias > HIDDEN, bias, 0.0)
            if mask is None:
                mask = bias.expand(*bias.shape[:3], self.k.shape[2])
            else:
                mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias
        return dataclasses.replace(self, q=decoder.q, mask=mask)

    def beside(self, others: Part) -> tuple[Part, Part]:
        """Return both parts with one query of twice the width; the keys of each have zeros in the other's half."""
        q = torch.cat([self.q * self.scale, others.q * others.scale], -1)
        own, other = torch.cat([self.k, torch.zeros_like(self.k)], -1), torch.cat([torch.zeros_like(others.k), others.k], -1)
        return dataclasses.replace(self, q=q, k=own, scale=1.0), dataclasses.replace(others, q=q, k=other, scale=1.0)

    def weighed(self, p: Tensor) -> Tensor:
        """Return Σ_j p_j v_j: (batch, heads, T, d_v)."""
        batch, heads, tokens, keys = p.shape
        folded = p.reshape(batch, self.v.shape[1], -1, keys).to(self.v.dtype)
        return (folded @ self.v).reshape(batch, heads, tokens, -1)


class JointAttention(AttentionToOthers):
    """Attention over the keys of the call and over other keys."""

    replaces = "torch's scaled_dot_product_attention"
    recorded = staticmethod(recorded_core)
    answered = staticmethod(answered_core)

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
        other: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return the output, in the shape of the query, for the arguments of `scaled_dot_product_attention` and the other keys.

        `other["query"]` is None if the other keys have the call's query.
        """
        if other is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        call = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        same_query = other["query"] is None
        own, others = Part.of(call, self.heads), Part.of({**other, "query": query} if same_query else other, self.heads)
        if self.positions == FIRST and self.encoder_is_own:
            own = own.with_bias_of_first(others)
        elif self.positions == FIRST:
            others = others.with_bias_of_first(own)
        one_query = (same_query or self.positions == FIRST) and own.scale == others.scale
        tokens = own.q.shape[2]
        # an exported program must contain one attention over all keys, for any queries, so that later passes find it
        if is_exporting() or (one_query and not (isinstance(tokens, int) and tokens <= FEW)):
            if not one_query:
                own, others = own.beside(others)
            y = self.fused(own, others, dropout_p)
        else:
            y = self.written_out(own, others, dropout_p)
        return y.reshape(*query.shape[:-1], value.shape[-1])

    def written_out(self, own: Part, others: Part, dropout: float) -> Tensor:
        """Return the output by one softmax over the scores of both sets, without a copy of the keys."""
        s, t = own.scores(), others.scores()
        if self.weighs:
            t = t + self.added()
        p = torch.cat([s, t], -1).softmax(-1)
        p = F.dropout(p, dropout) if dropout else p
        first, second = p.split([s.shape[-1], t.shape[-1]], -1)
        return own.weighed(first) + others.weighed(second)

    def fused(self, own: Part, others: Part, dropout: float) -> Tensor:
        """Return the output of torch's attention over the concatenated keys of both sets."""
        q, heads = own.q, self.heads
        k = torch.cat([repeated(own.k, heads), repeated(others.k, heads)], 2)
        v = torch.cat([repeated(own.v, heads), repeated(others.v, heads)], 2)
        if own.mask is None and others.mask is None and not self.weighs:
            mask = None
        else:
            masks = own.mask, others.mask
            is_bias = self.weighs or any(mask is not None and mask.dtype != torch.bool for mask in masks)
            parts = [part.full_mask(is_bias) for part in (own, others)]
            if self.weighs:
                parts[1] = (parts[1] + self.added()).to(q.dtype)
            leading = torch.broadcast_shapes(parts[0].shape[:2], parts[1].shape[:2])
            mask = torch.cat([part.expand(*leading, -1, -1) for part in parts], -1)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=own.scale)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return x with a copy of each shared head for every head that shares it: (batch, heads, K, width)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class JointSoftmax(AttentionToOthers):
    """The softmax weights of the keys of a call and of other keys."""

    replaces = "a softmax between two products"
    recorded = RecordedScores
    answered = AnsweredScores

    def forward(self, scores: Tensor, dtype: torch.dtype | None = None, *, other: Mapping[str, Any] | None = None) -> Tensor:
        """Return the weights (…, T, K + K') for scores (…, T, K) and others (…, T, K'); … is batch and heads, or their product."""
        if other is None:
            return scores.softmax(-1, dtype)
        others = other["scores"].reshape(*scores.shape[:-1], -1).to(scores.dtype)
        if self.weighs:
            by_head = others.reshape(-1, self.heads, *others.shape[-2:])
            others = (by_head + self.added()).to(scores.dtype).reshape(others.shape)
        return torch.cat([scores, others], -1).softmax(-1, dtype)
