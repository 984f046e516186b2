"""Models that came through one of transformers' quantizers: is anything about them quantized now; the traces removed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from retrofit.runtime.state_preservation import preserve_random_state
from retrofit.surgery.edit import Edit

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRACES = ("hf_quantizer", "is_quantized", "quantization_method")  # what transformers leaves on the model


def quantization_of(model: Any) -> Any:
    """`config.quantization_config`, None where there is none."""
    return getattr(getattr(model, "config", None), "quantization_config", None)


def came_through_quantizer(model: Any) -> bool:
    """Whether the config or the model itself says so; unpacking weights makes transformers forget the one and not the other."""
    return quantization_of(model) is not None or any(name in vars(model) for name in TRACES)


def is_packed(parameter: Any) -> bool:
    """Whether a parameter is anything but plain floating-point numbers."""
    return isinstance(parameter, nn.Parameter) and (type(parameter) is not nn.Parameter or parameter.dtype not in FLOATS)


def has_plain_weights(model: Any) -> bool:
    """Whether the model, loaded through a quantizer, is the ordinary model of its class again.

    Every parameter is a plain float tensor, and either the quantizer was told to unpack the weights or the model has the modules,
    parameters and buffers that its class makes of the config alone.
    """
    if any(is_packed(one) for one in model.parameters()):
        return False
    config = quantization_of(model)
    unpacked = config.get("dequantize") if isinstance(config, dict) else getattr(config, "dequantize", False)
    return bool(unpacked) or structure_of(model) == structure_of(skeleton_of(model))


def skeleton_of(model: Any) -> nn.Module:
    """The model that the class makes of the config without the quantization, on the meta device."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    with preserve_random_state(), torch.device("meta"):
        return type(model)(config)


def transpose_again(model: nn.Module, paths: Iterable[str]) -> None:
    """The layers at `paths` hold their weights transposed, as before a quantizer replaced them: it unpacks them to linear ones."""
    for path in paths:
        linear = model.get_submodule(path)
        if type(linear) is nn.Linear:
            with torch.device("meta"):  # no random number is drawn
                layer = Conv1D(linear.out_features, linear.in_features)
            layer.weight = nn.Parameter(linear.weight.detach().t().contiguous(), linear.weight.requires_grad)
            layer.bias = linear.bias if linear.bias is not None else nn.Parameter(linear.weight.new_zeros(linear.out_features))
            layer.train(linear.training)
            model.set_submodule(path, layer)


def transposed_layers(model: nn.Module) -> list[str]:
    """The paths of transformers' linear layers that hold their weight transposed, (inputs, outputs)."""
    return [path for path, module in model.named_modules() if type(module) is Conv1D]


def structure_of(model: nn.Module) -> tuple[dict[str, type], dict[str, torch.Size]]:
    """The classes of the modules and the shapes of the parameters and buffers."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {path: type(module) for path, module in model.named_modules()}, {name: tensor.shape for name, tensor in tensors}


def forget_quantization(model: Any, edit: Edit | None = None) -> None:
    """Nothing on a model with plain weights says any more that it came through a quantizer; `edit` can undo it."""
    edit = edit or Edit(model)
    edit.delete_attribute(model.config, "quantization_config")
    for name in TRACES:
        edit.delete_attribute(model, name)
