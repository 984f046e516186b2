"""How far values lie from what they should be, so that no token decides by its length alone.

    error = √(Σ_t w_t ‖y_t − ŷ_t‖² / Σ_t w_t ‖y_t‖²)        w_t = min(1, median_s ‖y_s‖² / ‖y_t‖²)

A trained model gives a few tokens activations hundreds of times longer than the others'. Each of them counts as a token of the
median length does: it is neither left out nor more important than the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(y: Tensor, *others: Tensor) -> Tensor:
    """w of the formula above for each row of y, (tokens, d): (tokens), in float32.

    With `others`, of the same shape, such as what is to be combined into y, the longest of a token's rows counts.
    """
    lengths = torch.stack([one.detach().float().square().sum(-1) for one in (y, *others)]).amax(0)
    median = lengths.median()
    median = median if bool(median > 0) else lengths.mean()
    return (median / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)


def weighted_error(found: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """The error of `found` relative to y, (tokens, d) both, in float32; `weights`, (tokens), are those of y where not given."""
    weights = token_weights(y) if weights is None else weights
    missed = (found.float() - y.float()).square().sum(-1) @ weights
    return (missed / (y.float().square().sum(-1) @ weights).clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
