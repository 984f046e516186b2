"""The attention of tiles by torch's fused kernel of the CPU, which returns the logarithm of each sum too; without gradients.

A score is computed, weighed and multiplied by its value while it is in the processor's cache. Which keys a query sees is said by a
bias, made of rows of small tables.

The kernel is private to torch: where a version has none of this name, or one that takes or returns something else, tiles are a
product, a softmax and a product as everywhere else, and no other numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

UNSEEN = -1e30  # what is added to the score of a key that is not seen
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
TAKES = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")


@functools.cache
def kernel(name: str) -> Any:
    """Torch's operation of this name, None where there is none that takes and returns what is expected here."""
    packet = getattr(torch.ops.aten, name, None)
    operation = getattr(packet, "default", None)
    if operation is None:
        return None
    takes = tuple(one.name for one in operation._schema.arguments)
    returns = [str(one.type) for one in operation._schema.returns]
    return operation if takes == TAKES and returns == ["Tensor", "Tensor"] else None


def is_fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel can be called: it is there, in float32 on a CPU, outside of any tracing, where no gradient is wanted."""
    followed = torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v))
    plain = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in (q, k, v))
    return (
        plain and q.shape[-1] == v.shape[-1] and not followed and not torch.compiler.is_compiling() and kernel(KERNEL) is not None
    )


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Σ softmax(s) v and the logarithm of Σ exp(s): q (rows, tiles, C, d), k and v (rows, tiles, keys, d), bias likewise."""
    bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    y, total = kernel(KERNEL)(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return y, total


def window_bias(first: Tensor, last: Tensor, size: int) -> Tensor:
    """0 for each place [first, last) of a window of so many, else `UNSEEN` or less: (…, size)."""
    place = torch.arange(size + 1, device=first.device)
    behind = torch.where(place[:-1] >= place.unsqueeze(-1), 0.0, UNSEEN)  # of each place, which of the window are at it or behind
    before = torch.where(place[:-1] < place.unsqueeze(-1), 0.0, UNSEEN)
    rows = (table.index_select(0, end.clamp(0, size).flatten()) for table, end in ((behind, first), (before, last)))
    bias, other = rows
    return bias.add_(other).view(*first.shape, size)


def last_keys(q: Tensor, k: Tensor, v: Tensor, first: int, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Each query, the first at position `first`, over the last `chunk` keys up to its own position: rows (rows, n, d) of all.

    The queries of a tile see a window of keys by the same bias wherever it is; windows overlap, and none is copied.
    """
    rows, n_q, d = q.shape
    size = max(1, chunk // 2)
    n_k, tiles, before = k.shape[1], -(-n_q // size), -(-chunk // size)  # tiles before which some of a window is before all keys
    place = torch.arange(chunk + size, device=q.device)
    own = torch.arange(size, device=q.device).unsqueeze(-1)
    bias = torch.where((place > own) & (place <= own + chunk), 0.0, UNSEEN)
    queries = F.pad(q, (0, 0, 0, tiles * size - n_q)).view(rows, tiles, size, d)
    behind = max(0, first + tiles * size - n_k)
    windows = []
    for x in (k, v):
        padded = F.pad(x, (0, 0, chunk, behind)).contiguous()
        shape, strides = (rows, tiles, chunk + size, d), (padded.stride(0), size * d, d, 1)
        windows.append(padded.as_strided(shape, strides, padded.storage_offset() + first * d))
    ys, totals = [], []
    for part in (*(slice(number, number + 1) for number in range(before)), slice(before, None)):
        if part.start < tiles:
            seen = bias if part.stop is None else bias.where(place >= chunk - first - part.start * size, UNSEEN)
            y, total = fused(queries[:, part], windows[0][:, part], windows[1][:, part], seen, scale)
            ys.append(y.flatten(1, 2))
            totals.append(total.flatten(1, 2))
    return torch.cat(ys, 1)[:, :n_q], torch.cat(totals, 1)[:, :n_q]
