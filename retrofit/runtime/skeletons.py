"""Models without weights: what a plan is carried out on."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.runtime.offloading import hooks_to_leave_out, without_hooks


def without_weights(model: nn.Module, *, keep_buffers: bool = False) -> nn.Module:
    """A copy of the model on the meta device: its tensors have shapes and no values, tied ones are tied.

    With `keep_buffers` its buffers are those of the model, with their values.
    """
    hooks = hooks_to_leave_out(model)
    memo: dict[int, Any] = dict(hooks)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer for buffer in model.buffers() if keep_buffers}
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    for tensor in (*model.buffers(), *attributes):
        memo.setdefault(id(tensor), torch.empty_like(tensor, device="meta", requires_grad=False))
    skeleton = copy.deepcopy(model, memo)
    return without_hooks(skeleton) if hooks else skeleton


def zeros_for(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of its shape and dtype on the CPU, which take memory only once they are written.

    They are the weights of a model that is rewritten before its own are loaded: uninitialised memory may hold NaN, and no start can
    be fitted to that.
    """
    count = tensor.numel() * tensor.element_size()
    return torch.from_numpy(numpy.zeros(count, numpy.uint8)).view(tensor.dtype).view(tensor.shape)


class HollowGroupedProducts(TorchDispatchMode):
    """Within this context grouped products of hollow matrices are of any dtype, as those of real ones are.

    torch 2.13 has a shape for them in bfloat16 alone.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[1].dim() == 3 and args[0].dim() == 2:
            rows, weight = args[:2]  # (rows, in), (E, in, out)
            return rows.new_empty(len(rows), weight.shape[-1])
        return function(*args, **(kwargs or {}))
