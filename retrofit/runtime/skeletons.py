"""Models without weights: what a plan is carried out on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from retrofit.runtime.offloading import hooks_to_leave_out, without_hooks


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: its tensors have shapes and no values, tied ones are tied."""
    hooks = hooks_to_leave_out(model)
    memo: dict[int, Any] = dict(hooks)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    for tensor in (*model.buffers(), *attributes):
        memo.setdefault(id(tensor), torch.empty_like(tensor, device="meta", requires_grad=False))
    skeleton = copy.deepcopy(model, memo)
    return without_hooks(skeleton) if hooks else skeleton
