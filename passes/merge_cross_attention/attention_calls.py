"""The attention in a module's own code: recorded, replaced by another attention, or run with another's weights.

It is a call of torch's fused attention, or written out:

    s = q kᵀ · scale + mask        p = softmax(s)        y = dropout(p) v

The softmax's output is followed to the product with the values, by the identity of tensors, through dropout, casts and changes of
layout.

A copy of the code runs with the weights of another attention, and only the operands of its core are used:

    keys and values of the encoder's tokens by self-attention's weights          the code of the cross-attention
    keys and values of the decoder's tokens by cross-attention's weights         the code of the self-attention

So the model's own code determines head layout, norms, positions, masks and the cache. The copy shares all modules with the two
attentions, and nothing is registered in the model.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from retrofit.sdk.modules import FUSED_ARGUMENTS, AnsweredFusedAttention, child_modules


def recorded_core(calls: list[dict[str, Any]]) -> AnsweredFusedAttention:
    """Return a context in which the arguments of torch's fused attention go into `calls`, by name, and its result is zero."""

    def record(*args: Any, **kwargs: Any) -> Tensor:
        operands = {**dict(zip(FUSED_ARGUMENTS, args, strict=False)), **kwargs}
        calls.append(operands)
        return no_values(operands["query"], operands["value"].shape[-1])

    return AnsweredFusedAttention(record)


def answered_core(attention: nn.Module, other: Mapping[str, Any] | None) -> AnsweredFusedAttention:
    """Return a context in which `attention`, with the additional keys `other`, replaces torch's fused attention."""
    return AnsweredFusedAttention(lambda *args, **kwargs: attention(*args, **kwargs, other=other))


def no_values(x: Tensor, width: int) -> Tensor:
    """Return zeros of this width for each row of x, in a tensor that takes no memory."""
    return x.new_zeros(()).expand(*x.shape[:-1], width)


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
    """A context in which the scores of a written-out attention and its values go into `calls`, and its result is zero."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls
        self.weights: list[Tensor] = []  # zeros, identified in later calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in SOFTMAX:
            scores, _ = softmax_arguments(args, kwargs)
            self.calls.append({"scores": scores})
            self.weights.append(no_values(scores, scores.shape[-1]))
            return self.weights[-1]
        if not args or not any(weight is args[0] for weight in self.weights):
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
    """A context in which `attention`, with the additional keys `other`, replaces the softmax of a written-out attention.

    `calls` counts the attentions.
    """

    def __init__(self, attention: nn.Module, other: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.attention, self.other = attention, other
        self.calls: list[bool] = []  # `list[bool]()` cannot be compiled
        self.weights: list[tuple[Tensor, Tensor]] = []  # of the attention's own keys, identified in later calls, and of the others

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
    """Return the scores that a softmax normalizes, and the dtype among its arguments; None without one."""
    dtypes = (argument for argument in (*args, kwargs.get("dtype")) if isinstance(argument, torch.dtype))
    return args[0] if args else kwargs["input"], next(dtypes, None)


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


Recorded = Callable[[list[dict[str, Any]]], AbstractContextManager[Any]]  # appends the operands of an attention to the list


@dataclasses.dataclass(frozen=True)
class Borrowing:
    """The modules of an attention to replace, by paths inside it: by modules of another, or because their outputs are not used."""

    modules: Mapping[str, str]  # path in the attention's own module → path of the replacement in the other
    query: tuple[str, int]  # the module that projects the queries, and their columns; "" if the queries are needed
    out: str  # the module that projects the output; "" if it is outside


class Nothing(nn.Module):
    """Returns zeros of a width for each token, instead of a matrix whose output is removed or not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.width)


def borrowed_operands(
    code: nn.Module, lender: nn.Module, borrowing: Borrowing, recorded: Recorded, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Run `code` with the modules of `lender`. Return the operands that `recorded` records, {} if none, and the output of zeros."""
    replaced = {path: module_at(lender, other) for path, other in borrowing.modules.items()}
    path, width = borrowing.query
    if path:
        replaced[path] = Nothing(width)
    if borrowing.out:
        replaced[borrowing.out] = nn.Identity()
    calls: list[dict[str, Any]] = []
    with recorded(calls):
        returned = copy_with(code, replaced)(*args, **kwargs)
    operands = {key: value for key, value in calls[0].items() if key not in ("dropout_p", "enable_gqa")} if calls else {}
    return (operands | {"query": None} if path and operands else operands), returned


def copy_with(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of `module`, and of its modules that contain a path in `replaced`, with the modules there replaced."""
    if "" in replaced:
        return replaced[""]
    children = dict(child_modules(module))
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, other in replaced.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = other
    for name, below in inner.items():
        children[name] = copy_with(children[name], below)
    copy: nn.Module = object.__new__(type(module))
    hooks: dict[str, Any] = {name: OrderedDict() for name in HOOKS}  # hooks on the module must not see this call
    copy.__dict__.update({**module.__dict__, **hooks, "_modules": children})
    return copy


def module_at(module: nn.Module, path: str) -> nn.Module:
    """Return the module at a path inside `module`, from the registries: while tracing, attribute access returns proxies."""
    for name in path.split(".") if path else ():
        module = child_modules(module)[name]
    return module
