"""The fused operators of ONNX Runtime other than attention, as torch functions: norms with a residual, GELU with a bias, products.

Source: ONNX Runtime's documentation of its contributed operators (domain `com.microsoft`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.operators.shapes import trilu
from retrofit.onnx.importer.operators.table import MICROSOFT, operator


@operator("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-12
) -> tuple[Tensor | None, ...]:
    total = with_bias(x, bias) + skip
    return F.layer_norm(total, total.shape[-1:], scale, shift, epsilon), None, None, total


def with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + b: the bias is that of the product before the residual, so that this layer's result has all of it."""
    return x if bias is None else x + bias


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None, epsilon: float = 1e-12
) -> tuple[Tensor | None, ...]:
    total = with_bias(x, bias) + skip
    return F.rms_norm(total, total.shape[-1:], scale, epsilon), None, None, total


@operator("EmbedLayerNormalization", domain=MICROSOFT)
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
    mask_index_type: int = 1,
) -> tuple[Tensor | None, ...]:
    places = torch.arange(ids.shape[1], device=ids.device) if numbering is None else numbering
    total = F.embedding(ids, words) + F.embedding(places, positions)
    if kinds is not None and segments is not None:
        total = total + F.embedding(segments, kinds)
    counts = None if mask is None else mask.sum(1).to(torch.int32)
    return F.layer_norm(total, total.shape[-1:], scale, shift, epsilon), counts, total


@operator("Gelu", domain=MICROSOFT)
def exact_gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@operator("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def nonzero_attributes(*names: str) -> Callable[[dict[str, Any]], str]:
    """Refuses nodes that set one of these attributes."""
    return lambda attributes: ", ".join(name for name in names if attributes.get(name, 0) not in (0, -1))


@operator("FusedMatMul", domain=MICROSOFT)
def fused_mat_mul(
    one: Tensor, other: Tensor, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
) -> Tensor:
    product = torch.matmul(matmul_operand(one, transA, transBatchA), matmul_operand(other, transB, transBatchB))
    return product if alpha == 1.0 else alpha * product


def matmul_operand(x: Tensor, transposed: int, rows_first: int) -> Tensor:
    """The matrices that x holds, whose axis of rows stands before those of the batch if `rows_first`, then each transposed."""
    x = x.movedim(0, -2) if rows_first else x
    return x.mT if transposed else x


operator("Trilu", domain=MICROSOFT)(trilu)
