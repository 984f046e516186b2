"""The one call of torch's fused attention in a module's own code: recorded, or answered by another attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FUSED = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class RecordedCore(TorchFunctionMode):
    """Within this context the arguments of torch's fused attention go into `calls`, by name, and its result is zero."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FUSED:
            return function(*args, **(kwargs or {}))
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **(kwargs or {})}
        self.calls.append(given)
        return no_values(given["query"], given["value"].shape[-1])


class AnsweredCore(TorchFunctionMode):
    """Within this context `attention`, with the keys `other` besides, answers for torch's fused attention."""

    def __init__(self, attention: nn.Module, other: Mapping[str, Any] | None, calls: list[bool]) -> None:
        super().__init__()
        self.attention, self.other, self.calls = attention, other, calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FUSED:
            return function(*args, **(kwargs or {}))
        self.calls.append(True)
        return self.attention(*args, **(kwargs or {}), other=self.other)


def no_values(x: Tensor, width: int) -> Tensor:
    """Zeros of this width for each row of x, which take no memory."""
    return x.new_zeros(()).expand(*x.shape[:-1], width)
