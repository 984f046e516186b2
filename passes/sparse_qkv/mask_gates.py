"""Which earlier tokens a convolution may read, from the mask that the attention itself is called with."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e4  # an additive mask below this hides


def visible_keys(mask: Tensor, tokens: int, true_hides: bool) -> Tensor | None:
    """Which keys each query may see, (batch or 1, tokens, keys); None for a mask that is not about single keys and queries.

    `mask` is (batch, keys), 0 or False for padding, or for all else where `true_hides`; or (batch, heads, queries, keys), a bias or
    booleans.
    """
    if mask.dim() == 2:
        return (mask.bool() ^ true_hides).unsqueeze(1).expand(-1, tokens, -1)
    if mask.dim() != 4:
        return None
    head = mask[:, 0]
    visible = head > HIDDEN if head.is_floating_point() else head.bool() ^ true_hides
    return visible.expand(-1, tokens, -1)


def lookback_gates(visible: Tensor | None, tokens: int, past: int) -> Tensor | None:
    """g[t,1] … g[t,past]: whether each query may see the keys of the `past` tokens before it, (batch or 1, tokens, past)."""
    if visible is None or not past:
        return None
    keys = visible.shape[-1]
    positions = torch.arange(tokens, device=visible.device)
    if keys > tokens:  # the queries are the last tokens so far; a cache of fixed length has free places behind them
        used = visible.any(1).any(0) * torch.arange(keys, device=visible.device)
        positions = positions + used.amax() - (tokens - 1)
    earlier = positions.unsqueeze(-1) - torch.arange(1, past + 1, device=visible.device)  # (tokens, past)
    return visible.gather(-1, earlier.clamp(min=0).unsqueeze(0).expand(visible.shape[0], -1, -1))
