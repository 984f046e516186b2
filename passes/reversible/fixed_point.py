"""Numbers of a residual stream in fixed point, where sums lose nothing, and bits packed eight to a byte.

    X = round(2³² x)          X: int64

A step of 2⁻³² is finer than float32's from 2⁻⁸ on. Up to 2²⁹ in magnitude a number of the stream is represented; one beyond that,
or that is none, is not a number in what is made of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SCALE = 2.0**32
LARGEST = 2.0**29


def to_fixed(x: Tensor) -> Tensor:
    """x in fixed point; what cannot be represented becomes the nearest number that can, or zero."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * SCALE).round_().clamp_(-LARGEST * SCALE, LARGEST * SCALE).nan_to_num_(nan=0.0).to(torch.int64)


def to_float(fixed: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of a type; contiguous."""
    wide = fixed.to(torch.promote_types(dtype, torch.float32), memory_format=torch.contiguous_format)
    return wide.mul_(1 / SCALE).to(dtype)


def not_a_number_where(unrepresented: Tensor, x: Tensor) -> Tensor:
    """x, and not a number wherever `unrepresented` cannot be represented; laid out in memory as `unrepresented` is."""
    return laid_out(torch.where(unrepresented.abs() <= LARGEST, x, torch.nan), strides_of(unrepresented))


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Those of x, or of a contiguous tensor of its size where x has gaps or overlaps."""
    return torch.empty_like(x, device="meta").stride()


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides: how a product is rounded depends on the layout of what is multiplied."""
    return x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def low_bits(fixed: Tensor, count: int) -> Tensor:
    """The `count` lowest bits of each number, packed: (count, ⌈numbers / 8⌉) bytes."""
    flat = fixed.reshape(-1)
    planes = []
    for bit in range(count):
        plane = F.pad((flat >> bit).bitwise_and_(1).to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
        planes.append((plane << places(fixed)).sum(-1, dtype=torch.uint8))
    return torch.stack(planes)


def unpacked(bits: Tensor, like: Tensor) -> Tensor:
    """The numbers of which `low_bits` are these, of the shape of `like`."""
    found = torch.zeros_like(like)
    for bit, plane in enumerate(bits):
        values = (plane.unsqueeze(-1) >> places(like)).bitwise_and_(1).view(-1)[: like.numel()]
        found |= values.view(like.shape).to(torch.int64) << bit
    return found


def places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
