"""ONNX attention operators and the fused operators of ONNX Runtime, as torch functions: norms with a residual, GELU with a bias.

An attention takes the keys and values of earlier tokens if the graph passes them; a model for whole sequences never does.

Source: ONNX's operator specifications (set 23); ONNX Runtime's documentation of its contributed operators (`com.microsoft`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from retrofit.onnx.importer.operators import MICROSOFT, Value, operator, tensor
from retrofit.onnx.importer.operators.elementwise import gelu, swish
from retrofit.onnx.importer.operators.shapes import trilu

# ── Fused operators ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@operator("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-12
) -> tuple[Tensor | None, ...]:
    total = with_bias(x, bias) + skip
    return F.layer_norm(total, total.shape[-1:], scale, shift, epsilon), None, None, total


def with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + b: the bias of the product before the residual, so that this layer's result includes all of it."""
    return x if bias is None else x + bias


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None, epsilon: float = 1e-12
) -> tuple[Tensor | None, ...]:
    total = with_bias(x, bias) + skip
    return F.rms_norm(total, total.shape[-1:], scale, epsilon), None, None, total


@operator("EmbedLayerNormalization", domain=MICROSOFT, ignores="mask_index_type")
def embed_layer_normalization(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    kinds: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    mask: Tensor | None = None,
    numbering: Tensor | None = None,
    epsilon: float = 1e-12,
) -> tuple[Tensor | None, ...]:
    places = torch.arange(ids.shape[1], device=ids.device) if numbering is None else numbering
    total = F.embedding(ids, words) + F.embedding(places, positions)
    if kinds is not None and segments is not None:
        total = total + F.embedding(segments, kinds)
    counts = None if mask is None else mask.sum(1).to(torch.int32)
    return F.layer_norm(total, total.shape[-1:], scale, shift, epsilon), counts, total


operator("Gelu", domain=MICROSOFT)(gelu)


@operator("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(with_bias(x, bias), approximate="tanh")


@operator("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor:
    return swish(x, alpha)


def nonzero_attributes(*names: str) -> Callable[[dict[str, Any]], str]:
    """Return a test that names those of these attributes that a node sets."""
    return lambda attributes: ", ".join(name for name in names if attributes.get(name, 0) not in (0, -1))


@operator("FusedMatMul", domain=MICROSOFT)
def fused_mat_mul(
    a: Tensor, b: Tensor, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
) -> Tensor:
    product = torch.matmul(matmul_operand(a, transA, transBatchA), matmul_operand(b, transB, transBatchB))
    return product if alpha == 1.0 else alpha * product


def matmul_operand(x: Tensor, transposed: int, rows_first: int) -> Tensor:
    """Return the matrices in x, with the row axis before the batch axes if `rows_first`; then each transposed."""
    x = x.movedim(0, -2) if rows_first else x
    return x.mT if transposed else x


operator("Trilu", domain=MICROSOFT)(trilu)


# ── Attention ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """Return x (batch, heads, length, width) with its first 2·r channels rotated by the angles (batch or 1, 1, length, r)."""
    turning, rest = x[..., : 2 * cosines.shape[-1]], x[..., 2 * cosines.shape[-1] :]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    parts = first * cosines - second * sines, second * cosines + first * sines
    result = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([result, rest], -1) if rest.shape[-1] else result


def apply_rotary(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: int, heads: int, width: int) -> Tensor:
    """Return `rotate` for heads on an axis, (batch, heads, length, width), or concatenated in (batch, length, heads·width)."""
    cosines, sines = (part.unsqueeze(-3) for part in (cosines, sines))
    if x.dim() == 4:
        return rotate(x, cosines, sines, bool(interleaved))
    count = heads or x.shape[-1] // (width or 2 * cosines.shape[-1])
    return merge_heads(rotate(split_heads(x, count), cosines, sines, bool(interleaved)))


@operator("RotaryEmbedding", ignores="rotary_embedding_dim")
def rotary_embedding(
    x: Tensor, cosines: Tensor, sines: Tensor, positions: Value = None, interleaved: int = 0, num_heads: int = 0
) -> Tensor:
    if positions is not None:
        positions = tensor(positions, x)
        cosines, sines = cosines[positions], sines[positions]
    return apply_rotary(x, cosines, sines, interleaved, num_heads, 0)


@operator("RotaryEmbedding", domain=MICROSOFT, ignores="scale is_packed_batching")
def rotary_embedding_of_runtime(
    x: Tensor,
    positions: Value,
    cosines: Tensor,
    sines: Tensor,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    positions = tensor(positions, x)
    if positions.dim() == 1:  # the position of the first token
        positions = positions[:, None] + torch.arange(x.shape[-2], device=x.device)
    return apply_rotary(x, cosines[positions], sines[positions], interleaved, num_heads, rotary_embedding_dim if num_heads else 0)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (batch, length, heads·width) as (batch, heads, length, width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, length, width) as (batch, length, heads·width)."""
    return x.transpose(1, 2).flatten(-2)


def append_to_past(past: Tensor | None, x: Tensor) -> Tensor:
    """Return the keys or values of all tokens, earlier ones first."""
    return x if past is None or (isinstance(past.shape[2], int) and past.shape[2] == 0) else torch.cat([past, x], 2)


def additive_mask(mask: Tensor | None, value: float, like: Tensor) -> Tensor | None:
    """Return a boolean or additive mask as an additive one."""
    if mask is None:
        return None
    if mask.is_floating_point():
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask == 0, value)


def sum_masks(*masks: Tensor | None) -> Tensor | None:
    """Return the sum of additive masks."""
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.add, given) if given else None


def causal_mask(queries: int, keys: int, like: Tensor, window: int = -1) -> Tensor:
    """Return an additive causal mask: each query sees the keys up to its own position, at most `window` of them."""
    rows = torch.arange(queries, device=like.device)[:, None] + (keys - queries)
    columns = torch.arange(keys, device=like.device)
    open_ = columns <= rows
    if window > 0:
        open_ = open_ & (columns > rows - window)
    return additive_mask(open_, float("-inf"), like)  # type: ignore[return-value]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, softcap: float = 0.0, window: int = -1
) -> Tensor:
    """Return the attention of q over k and v (batch, heads, length, width); several queries may share a head of keys and values."""
    if k.shape[1] != q.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    plain = causal and mask is None and softcap == 0 and window <= 0 and statically_known_true(q.shape[2] == k.shape[2])
    if causal and not plain:
        mask = sum_masks(mask, causal_mask(q.shape[2], k.shape[2], q, window))
    if softcap == 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scale)
    scores = torch.matmul(q, k.mT) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    scores = softcap * torch.tanh(scores / softcap)
    return torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)


@operator("Attention", ignores="qk_matmul_output_mode softmax_precision")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """ONNX's own operator; the scores as an output are not supported."""
    flat = q.dim() == 3
    if flat:
        q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    k, v = append_to_past(past_k, k), append_to_past(past_v, v)
    result = attend(q, k, v, additive_mask(mask, float("-inf"), q), bool(is_causal), scale, softcap)
    return merge_heads(result) if flat else result, k, v


@operator(
    "Attention",
    domain=MICROSOFT,
    refuses=nonzero_attributes("do_rotary"),
    ignores="do_rotary past_present_share_buffer rotary_embedding_dim",
)
def attention_of_runtime(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask_index: Value = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    qkv_hidden_sizes: tuple[int, ...] = (),
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Tensor, ...]:
    """Self-attention with its projections; `weight` is (out, in) here, because the import transposes it."""
    projected = F.linear(x, weight, bias)
    third = projected.shape[-1] // 3
    q, k, v = (split_heads(part, num_heads) for part in projected.split(list(qkv_hidden_sizes or (third,) * 3), -1))
    if past is not None:
        k, v = append_to_past(past[0], k), append_to_past(past[1], v)
    mask = sum_masks(key_mask(mask_index, k.shape[2], mask_filter_value, q), attention_bias)
    result = attend(q, k, v, mask, bool(unidirectional), scale or None)
    return merge_heads(result), torch.stack([k, v]) if past is not None else k


def key_mask(mask: Value, keys: int, value: float, like: Tensor) -> Tensor | None:
    """Return ONNX Runtime's key mask as an additive one; it gives the length of each row, its end and start, or a mask."""
    if mask is None:
        return None
    mask = tensor(mask, like)
    if mask.dim() == 1:
        places, batch = torch.arange(keys, device=like.device), like.shape[0]
        ends = mask[:batch, None]
        open_ = places < ends
        if mask.shape[0] > batch:
            open_ = open_ & (places >= mask[batch : 2 * batch, None])
        return additive_mask(open_, value, like)[:, None, None]  # type: ignore[index]
    result = additive_mask(mask, value, like)
    return result[:, None, None] if result.dim() == 2 else result[:, None] if result.dim() == 3 else result  # type: ignore[union-attr, index]


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding: Value = None,
    attention_bias: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int = 0,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Tensor, ...]:
    """`kv_num_heads` is not an attribute of ONNX Runtime's: `read_rows_as_heads` sets it if keys and values have fewer heads."""
    if q.dim() == 5:  # (batch, length, heads, 3, width)
        q, k, v = (part.flatten(-2) for part in q.unbind(3))
    elif k is not None and k.dim() == 5:
        k, v = (part.flatten(-2) for part in k.unbind(3))
    assert k is not None and v is not None
    if bias is not None:
        width = q.shape[-1]
        q = q + bias[:width]
        if k.dim() == 3:
            k, v = k + bias[width : width + k.shape[-1]], v + bias[width + k.shape[-1] :]
    q = split_heads(q, num_heads)
    if k.dim() == 3:
        k, v = (split_heads(part, kv_num_heads or num_heads) for part in (k, v))
    k, v = append_to_past(past_k, k), append_to_past(past_v, v)
    mask = sum_masks(key_mask(key_padding, k.shape[2], mask_filter_value, q), attention_bias)
    return merge_heads(attend(q, k, v, mask, bool(unidirectional), scale or None)), k, v


@operator("GroupQueryAttention", domain=MICROSOFT, refuses=nonzero_attributes("smooth_softmax"), ignores="smooth_softmax")
def group_query_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    last: Tensor | None = None,
    total: Value = None,
    cosines: Tensor | None = None,
    sines: Tensor | None = None,
    positions: Tensor | None = None,
    attention_bias: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    do_rotary: int = 0,
    local_window_size: int = -1,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """Causal attention; `last` is the position of the last token of each row, which padding follows."""
    if k is None or v is None:
        width = q.shape[-1] // (num_heads + 2 * kv_num_heads)
        q, k, v = q.split([num_heads * width, kv_num_heads * width, kv_num_heads * width], -1)
    q, k, v = split_heads(q, num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    before = 0 if past_k is None else past_k.shape[2]
    if do_rotary and cosines is not None and sines is not None:
        places = torch.arange(q.shape[2], device=q.device) + before if positions is None else positions
        turns = cosines[places].unsqueeze(-3), sines[places].unsqueeze(-3)
        q, k = (rotate(part, *turns, bool(rotary_interleaved)) for part in (q, k))
    k, v = append_to_past(past_k, k), append_to_past(past_v, v)
    result = attend(q, k, v, attention_bias, True, scale or None, softcap, local_window_size)
    return merge_heads(result), k, v
