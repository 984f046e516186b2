"""An attention written out in a module's own code: its scores recorded before the softmax, or its softmax joined with another.

    s = q kᵀ · scale + mask        p = softmax(s)        y = dropout(p) v

The softmax's result is followed, by identity, through dropout, casts and changes of layout to the product with the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from retrofit.passes.merge_cross_attention.core_calls import no_values

ATEN = torch.ops.aten
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, ATEN.softmax.int, ATEN._softmax.default)
PRODUCT = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, ATEN.matmul.default, ATEN.bmm.default)
DROPOUT = (F.dropout, torch.dropout, ATEN.dropout.default)
CAST = (Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16,
        ATEN.to.dtype, ATEN._to_copy.default, ATEN.type_as.default)  # fmt: skip
LAYOUT = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand, Tensor.contiguous, Tensor.clone, torch.clone,
          ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default, ATEN.expand.default, ATEN.contiguous.default,
          ATEN.clone.default)  # fmt: skip


class RecordedScores(TorchFunctionMode):
    """Within this context the scores of a written-out attention and its values go into `calls`, and its result is zero."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls
        self.weights: list[Tensor] = []  # zeros, as far as they are followed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in SOFTMAX:
            scores, _ = softmax_arguments(args, kwargs)
            self.calls.append({"scores": scores})
            self.weights.append(no_values(scores, scores.shape[-1]))
            return self.weights[-1]
        if not args or not any(one is args[0] for one in self.weights):
            return function(*args, **kwargs)
        if function in PRODUCT:
            values = args[1]
            self.calls[-1]["value"] = values
            return values.new_zeros(()).expand(*args[0].shape[:-1], values.shape[-1])
        if function in DROPOUT or function in CAST:
            return args[0]
        result = function(*args, **kwargs)
        if function in LAYOUT:
            self.weights.append(result)
        return result


class AnsweredScores(TorchFunctionMode):
    """Within this context `attention`, with the keys `other` besides, answers for the softmax of a written-out attention."""

    def __init__(self, attention: nn.Module, other: Mapping[str, Any] | None, calls: list[bool]) -> None:
        super().__init__()
        self.attention, self.other, self.calls = attention, other, calls
        self.weights: list[tuple[Tensor, Tensor]] = []  # those of its own keys, as far as they are followed, and of the others

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in SOFTMAX:
            scores, dtype = softmax_arguments(args, kwargs)
            weights = self.attention(scores, dtype, other=self.other)
            if self.other is None:
                self.calls.append(True)
                return weights
            own = weights[..., : scores.shape[-1]]
            self.weights.append((own, weights[..., scores.shape[-1] :]))
            return own
        pair = next((pair for pair in self.weights if args and pair[0] is args[0]), None)
        if pair is None:
            return function(*args, **kwargs)
        own, others = pair
        if function in PRODUCT:
            assert self.other is not None
            self.calls.append(True)
            values = self.other["value"]
            values = values.reshape(*args[1].shape[:-2], -1, values.shape[-1]).to(args[1].dtype)
            return function(own, args[1]) + function(others, values)
        result = function(*args, **kwargs)
        if function in DROPOUT or function in CAST:
            self.weights.append((result, function(others, *args[1:], **kwargs)))
        elif function in LAYOUT:
            self.weights.append((result, others.reshape(*result.shape[:-1], others.shape[-1])))
        return result


def softmax_arguments(args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, torch.dtype | None]:
    """What a softmax normalizes, and the type that it computes in, where one is given."""
    scores = args[0] if args else kwargs["input"]
    given = [one for one in (*args, kwargs.get("dtype")) if isinstance(one, torch.dtype)]
    return scores, given[0] if given else None
