"""One linear map of a stream's blocks and a layer's output: one coefficient for all columns of a block, and few tensors kept alive.

The sums run in a fixed order, element by element, so that coefficients 0, 1 and −1 give exact results in every dtype, also under
autocast and with TF32: what a matrix product does not promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import is_exporting


def mix(x: Tensor, a: Tensor) -> Tensor:
    """Row r of the result is Σ_c a[r,c] x^c, in the order of c: x (…, C·d) and a [R, C], or one a per token, give (…, R, d)."""
    blocks = x.unflatten(-1, (a.shape[-1], 1, -1)).unbind(-3)  # C of (…, 1, d)
    columns = a.unsqueeze(-1).unbind(-2)  # C of ([…,] R, 1)
    mixed, add = blocks[0] * columns[0], addition()
    for c in range(1, len(blocks)):
        mixed = add(mixed, blocks[c], columns[c])
    return mixed


def mix_and_add(x: Tensor, y: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """Block r of the result is Σ_c a[r,c] x^c + g[r] y: y comes last, and stays bit for bit where the terms before it cancel."""
    return addition()(mix(x, a), y.unsqueeze(-2), g).flatten(-2)


def addition() -> Callable[..., Tensor]:
    """x + a·b for tensors: in place on x, except in an export, whose graph must have no side effects."""
    return torch.addcmul if is_exporting() else Tensor.addcmul_


class Contraction(torch.autograd.Function):
    """`mix_and_add` that keeps x and y alive for the backward pass, and neither of them where the coefficients are not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, g: Tensor) -> Tensor:
        trained = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        ctx.save_for_backward(a, g, *((x, y) if trained else ()))
        return mix_and_add(x, y, a, g)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        a, g, *kept = ctx.saved_tensors
        wants_x, wants_y, wants_a, wants_g = ctx.needs_input_grad
        grad_x = mix(grad, a.mT).flatten(-2) if wants_x else None
        grad_y = mix(grad, g.mT).squeeze(-2) if wants_y else None
        grad_a = grad_g = None
        if kept:
            x, y = kept[0].unflatten(-1, (a.shape[-1], -1)), kept[1].unsqueeze(-1)  # (…, C, d), (…, d, 1)
            rows = grad.unflatten(-1, (a.shape[-2], -1))  # (…, R, d)
            with torch.autocast(grad.device.type, enabled=False):
                grad_a = (rows @ x.mT).sum_to_size(a.shape) if wants_a else None
                grad_g = (rows @ y).sum_to_size(g.shape) if wants_g else None
        return grad_x, grad_y, grad_a, grad_g


def contract(x: Tensor, y: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """Σ_c a[r,c] x^c + g[r] y in x's dtype: x (…, C·d), y (…, d), a ([…,] R, C), g ([…,] R, 1) give (…, R·d)."""
    dtype = x.dtype
    if y.dtype != dtype or a.dtype != dtype or g.dtype != dtype:
        y, a, g = y.to(dtype), a.to(dtype), g.to(dtype)
    if torch.is_grad_enabled() and not is_exporting():
        return Contraction.apply(x, y, a, g)  # type: ignore[no-any-return]
    return mix_and_add(x, y, a, g)


def combine_blocks(x: Tensor, weights: Sequence[float]) -> Tensor:
    """Σ_i weights[i] x^i: (…, K·d) gives (…, d)."""
    return weighted_sum(x.unflatten(-1, (len(weights), -1)).unbind(-2), weights)


def weighted_sum(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ_i weights[i] terms[i], those of weight 0 left out: a single one of weight 1 is returned as it is."""
    (first, weight), *others = [(term, weight) for term, weight in zip(terms, weights, strict=True) if weight] or [(terms[0], 0.0)]
    total = first if weight == 1.0 else first * weight
    for term, weight in others:
        total = torch.add(total, term, alpha=weight)
    return total
