"""Which earlier tokens a convolution may read, from the mask that the attention itself is called with."""

from __future__ import annotations

import torch
from torch import Tensor

from retrofit.sdk import query_positions


def lookback_gates(visible: Tensor | None, tokens: int, past: int) -> Tensor | None:
    """g[t,1] … g[t,past]: whether each query may see the keys of the `past` tokens before it, (batch or 1, tokens, past).

    A key that the mask does not reach back to has left a window.
    """
    if visible is None or not past:
        return None
    positions = query_positions(visible, tokens)
    earlier = positions.unsqueeze(-1) - torch.arange(1, past + 1, device=visible.device)  # (tokens, past)
    gates = visible.gather(-1, earlier.clamp(min=0).unsqueeze(0).expand(visible.shape[0], -1, -1))
    return gates & (earlier >= 0)
