"""What the attention over two sets of keys is, whether torch's fused one or written out: how much the other keys count."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

NONE, FIRST = "none", "first"  # positions between a token of the decoder and one of the encoder


class AttentionToOthers(nn.Module):
    """Has w, the weight of the other keys; `share` of it is in use, all of it but while a dial turns."""

    def __init__(self, heads: int, positions: str, encoder_is_own: bool, weight: float, like: Tensor) -> None:
        """`weight` is w at the start; below 1 it is trained, a number for each head."""
        super().__init__()
        self.heads, self.positions, self.encoder_is_own = heads, positions, encoder_is_own
        self.share = 1.0
        self.log_weight: nn.Parameter | None = None
        if weight < 1:
            self.log_weight = nn.Parameter(torch.full((heads,), math.log(weight), dtype=like.dtype, device=like.device))

    @property
    def weighs(self) -> bool:
        """Whether the other keys count with a weight other than 1."""
        return self.log_weight is not None or self.share != 1

    def added(self) -> Tensor | float:
        """log w of each head, (1, heads, 1, 1), and of the share that is in use; 0 where w is 1."""
        share = math.log(self.share) if self.share != 1 else 0.0
        return share if self.log_weight is None else self.log_weight.view(1, -1, 1, 1) + share

    def extra_repr(self) -> str:
        return f"heads={self.heads}, positions={self.positions}, encoder_is_own={self.encoder_is_own}"
