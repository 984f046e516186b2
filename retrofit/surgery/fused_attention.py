"""Torch's fused attention in a module's own code, answered by another function, and what its mask shows.

Queries, keys and values arrive as the model's code has made them: projected, normalized, rotated, after its cache, with its mask.
The mask says which keys each query sees, and which tokens are padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FUSED = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # those that may be given by position


class AnsweredFusedAttention(TorchFunctionMode):
    """Within this context `answer` is called in place of torch's fused attention, with the same arguments."""

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(*args, **(kwargs or {})) if function in FUSED else function(*args, **(kwargs or {}))


HIDDEN = -1e4  # an additive mask below this hides


def visible_keys(mask: Tensor, tokens: int, true_hides: bool) -> Tensor | None:
    """Return which keys each query may see, (batch or 1, tokens, keys); None for a mask that is not about single keys and queries.

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
    """Return the index of each query among the keys of `visible`, (batch or 1, tokens, keys): (tokens)."""
    keys = visible.shape[-1]
    positions = torch.arange(tokens, device=visible.device)
    if keys > tokens:  # the queries are the last tokens so far; a cache of fixed length has free places behind them
        used = visible.any(1).any(0) * torch.arange(keys, device=visible.device)
        positions = positions + used.amax() - (tokens - 1)
    return positions


def unpadded_tokens(visible: Tensor, tokens: int) -> Tensor:
    """Return which queries are no padding, (batch or 1, tokens): those that may see themselves."""
    own = query_positions(visible, tokens).clamp(min=0).view(1, -1, 1)
    return visible.gather(-1, own.expand(visible.shape[0], -1, -1)).squeeze(-1)
