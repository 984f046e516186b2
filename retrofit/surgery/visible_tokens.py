"""Which keys a mask lets each query see, and which tokens are padding: from the mask that a module is called with."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e4  # an additive mask below this hides


def visible_keys(mask: Tensor, tokens: int, true_hides: bool) -> Tensor | None:
    """Which keys each query may see, (batch or 1, tokens, keys); None for a mask that is not about single keys and queries.

    `mask` is (batch, keys), 0 or False for padding, or for all else where `true_hides`, and then a bias perhaps; or (batch, heads,
    queries, keys), a bias or booleans.
    """
    if mask.dim() == 2:
        if true_hides and mask.is_floating_point():
            return ((mask > HIDDEN) & (mask < 0.5)).unsqueeze(1).expand(-1, tokens, -1)
        return (mask.bool() ^ true_hides).unsqueeze(1).expand(-1, tokens, -1)
    if mask.dim() != 4:
        return None
    head = mask[:, 0]
    visible = head > HIDDEN if head.is_floating_point() else head.bool() ^ true_hides
    return visible.expand(-1, tokens, -1)


def query_positions(visible: Tensor, tokens: int) -> Tensor:
    """The index of each query among the keys of `visible`, (batch or 1, tokens, keys): (tokens)."""
    keys = visible.shape[-1]
    positions = torch.arange(tokens, device=visible.device)
    if keys > tokens:  # the queries are the last tokens so far; a cache of fixed length has free places behind them
        used = visible.any(1).any(0) * torch.arange(keys, device=visible.device)
        positions = positions + used.amax() - (tokens - 1)
    return positions


def unpadded_tokens(visible: Tensor, tokens: int) -> Tensor:
    """Which queries are no padding, (batch or 1, tokens): those that may see themselves."""
    own = query_positions(visible, tokens).clamp(min=0).view(1, -1, 1)
    return visible.gather(-1, own.expand(visible.shape[0], -1, -1)).squeeze(-1)
