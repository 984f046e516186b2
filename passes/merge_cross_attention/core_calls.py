"""The one call of torch's fused attention in a module's own code: recorded, or answered by another attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrofit.sdk import FUSED_ARGUMENTS, AnsweredFusedAttention


def recorded_core(calls: list[dict[str, Any]]) -> AnsweredFusedAttention:
    """A context in which the arguments of torch's fused attention go into `calls`, by name, and its result is zero."""

    def record(*args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(FUSED_ARGUMENTS, args, strict=False)), **kwargs}
        calls.append(given)
        return no_values(given["query"], given["value"].shape[-1])

    return AnsweredFusedAttention(record)


def answered_core(attention: nn.Module, other: Mapping[str, Any] | None, calls: list[bool]) -> AnsweredFusedAttention:
    """A context in which `attention`, with the keys `other` besides, answers for torch's fused attention."""

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(True)
        return attention(*args, **kwargs, other=other)  # type: ignore[no-any-return]

    return AnsweredFusedAttention(answer)


def no_values(x: Tensor, width: int) -> Tensor:
    """Zeros of this width for each row of x, which take no memory."""
    return x.new_zeros(()).expand(*x.shape[:-1], width)
