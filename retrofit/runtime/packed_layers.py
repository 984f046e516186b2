"""Layers whose weights are packed into an object of torch's engine, as `torch.ao.quantization.quantize_dynamic` makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofit.errors import RetrofitError, first_few


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that hold such an object and say what it stands for: `weight()` is a method of theirs; by path."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if callable(getattr(module, "weight", None)) and any(holds_object(one) for one in module.modules())
    }


def holds_object(module: nn.Module) -> bool:
    return any(type(one) is torch.ScriptObject for one in vars(module).values())


def unpacked_linear(layer: Any) -> nn.Linear:
    """The linear layer whose weight is what the packed one stands for, in float32: such layers compute in nothing else."""
    weight, bias = layer.weight().detach().dequantize().float(), layer.bias()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")  # no random number is drawn
    linear.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float().clone())
    return linear.train(layer.training)


def refuse_packed_layers(model: nn.Module, error: type[RetrofitError], done: str, because: str) -> None:
    """Raises `error` where the model has such layers and is to be `done`; `because` goes on about their objects."""
    if found := list(packed_layers(model)):
        raise error(
            f"{type(model).__name__} is quantized and cannot be {done}",
            why=f"{first_few(found, 1)}: weights in an object of torch's engine, {because}",
            remedy="unpack it first: retrofit.dequantize(model) (docs/quantization.md); what comes of it can be quantized again",
        )
