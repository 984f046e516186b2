"""Torch's fused attention in a module's own code, answered by another function.

Queries, keys and values arrive as the model's code has made them: projected, normalized, rotated, after its cache, with its mask.
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
