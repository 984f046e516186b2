"""Dequantization: the weights of a quantized model become floating-point numbers again, and a pass can rewrite it.

The attributes that transformers' quantizers leave on the model are removed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from retrofit.errors import CheckpointError, first_few, first_line
from retrofit.inputs.model_state import preserve_random_state
from retrofit.inputs.packed_weights import is_packed_tensor, packed_layers, unpacked, unpacked_linear
from retrofit.inputs.usable_models import require_torch_module
from retrofit.provenance import provenance_of
from retrofit.surgery import Edit
from retrofit.surgery.transformers_bookkeeping import forget_packed_reading

METHOD = "retrofit"  # the name in transformers' table of quantizers, and `quant_method` in config.json
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRACES = ("hf_quantizer", "is_quantized", "quantization_method")  # attributes that transformers leaves on the model


def quantization_of(model: Any) -> Any:
    """Return `config.quantization_config`; None if there is none."""
    return getattr(getattr(model, "config", None), "quantization_config", None)


def field_of(quantization_config: Any, name: str) -> Any:
    """Return a field of `config.quantization_config`, a dict or an object; None if it has no such field."""
    if isinstance(quantization_config, dict):
        return quantization_config.get(name)
    return getattr(quantization_config, name, None)


def came_through_quantizer(model: Any) -> bool:
    """Return whether the config or the model has a trace of a quantizer; after unpacking, transformers removes only one of them."""
    return quantization_of(model) is not None or any(name in vars(model) for name in TRACES)


def is_packed(parameter: Any) -> bool:
    """Return whether a parameter is anything but a plain floating-point tensor."""
    return isinstance(parameter, nn.Parameter) and (type(parameter) is not nn.Parameter or parameter.dtype not in FLOATS)


def has_plain_weights(model: Any) -> bool:
    """Return whether the model, loaded through a quantizer, is again an ordinary model of its class.

    That is: every parameter is a plain float tensor, and either the quantizer was configured to dequantize, or the model has
    exactly the modules, parameters and buffers that its class creates from the config.
    """
    if any(is_packed(parameter) for parameter in model.parameters()):
        return False
    config = quantization_of(model)
    return bool(field_of(config, "dequantize")) or structure_of(model) == structure_of(skeleton_of(model))


def skeleton_of(model: Any) -> nn.Module:
    """Return the model that the class creates from the config without the quantization, on the meta device."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    with preserve_random_state(), torch.device("meta"):
        return type(model)(config)


def transpose_again(model: nn.Module, paths: Iterable[str]) -> None:
    """Restore the transposed layers at `paths`: a quantizer unpacks them to linear layers."""
    from transformers.pytorch_utils import Conv1D  # deferred: slow to import

    for path in paths:
        linear = model.get_submodule(path)
        if type(linear) is nn.Linear:
            with torch.device("meta"):  # draws no random numbers
                layer = Conv1D(linear.out_features, linear.in_features)
            layer.weight = nn.Parameter(linear.weight.detach().t().contiguous(), linear.weight.requires_grad)
            layer.bias = linear.bias if linear.bias is not None else nn.Parameter(linear.weight.new_zeros(linear.out_features))
            layer.train(linear.training)
            model.set_submodule(path, layer)


def transposed_layers(model: nn.Module) -> list[str]:
    """Return the paths of transformers' linear layers with a transposed weight, (inputs, outputs)."""
    return [path for path, module in model.named_modules() if is_transposed(module)]


def is_transposed(layer: nn.Module) -> bool:
    """Return whether it is a `Conv1D`, transformers' linear layer with a transposed weight, without importing transformers."""
    return type(layer) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def structure_of(model: nn.Module) -> tuple[dict[str, type], dict[str, torch.Size]]:
    """Return the classes of the modules and the shapes of the parameters and buffers."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {path: type(module) for path, module in model.named_modules()}, {name: tensor.shape for name, tensor in tensors}


def forget_quantization(model: Any, edit: Edit | None = None) -> None:
    """Remove, undoably through `edit`, all signs that a model with plain weights was loaded through a quantizer."""
    edit = edit or Edit(model)
    edit.delete_attribute(model.config, "quantization_config")
    for name in TRACES:
        edit.delete_attribute(model, name)


ROUNDING = 0.15  # relative error of a product that packing the inputs to 8 or 4 bits may cause; weights in wrong places cause more


def dequantize(model: Any) -> Any:
    """Return `model` with every weight replaced by the floating-point values that its quantization represents; keeps a recipe.

    Raises `CheckpointError` if a quantizer cannot unpack its weights, or unpacks other weights than it has computed with.
    """
    require_torch_module(model)
    unpack_layers(model)
    packed = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if is_packed(parameter)}
    if not packed and (not came_through_quantizer(model) or has_plain_weights(model)):
        return model
    quantizer = getattr(model, "hf_quantizer", None)
    if packed and all(is_packed_tensor(tensor) for tensor in packed.values()):
        made: dict[int, nn.Parameter] = {}
        for name, tensor in packed.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made.setdefault(id(tensor), plain_parameter(tensor)))
        quantizer.remove_quantization_config(model) if quantizer is not None else forget_quantization(model)
    elif quantizer is not None:
        paths, dtype = dict.fromkeys(name.rpartition(".")[0] for name in packed), model.dtype
        before = {path: product(model.get_submodule(path), dtype) for path in paths}
        if isinstance(model.config.dtype, str):  # transformers' own save_pretrained leaves it so, and no quantizer accepts it
            model.config.dtype = getattr(torch, model.config.dtype)
        model.state_dict()  # makes layers that have rearranged their weights for this processor restore the order
        try:
            model.dequantize()
        except Exception as error:  # of any type, from the quantizer
            raise unpackable(model, first_line(error)) from error
        forget_packed_reading(model)
        if not provenance_of(model).recipe:  # with a recipe, `quantized_recipes` does this
            transpose_again(model, transposed_layers(skeleton_of(model)))
        require_same_products(model, before, dtype)
    if left := [name for name, parameter in model.named_parameters() if is_packed(parameter)]:
        raise unpackable(model, f"still packed: {first_few(left)}")
    with torch.no_grad():
        for module in model.modules():  # values derived from the weights were computed from the packed ones
            if hasattr(module, "rebuild_buffers"):
                module.rebuild_buffers()
    return model


def unpack_layers(model: nn.Module) -> None:
    """Make the layers that torch's own quantization packed linear again. Raises `CheckpointError` if one is not a linear layer."""
    linear: dict[int, nn.Linear] = {}
    layers = packed_layers(model)
    for path, layer in layers.items():
        before = product(layer, torch.float32)
        if before is None:
            raise unpackable(model, f"{path} is not a linear layer of floating-point inputs")
        if id(layer) not in linear:
            linear[id(layer)] = unpacked_linear(layer)
            require_same_products(nn.ModuleDict({"layer": linear[id(layer)]}), {"layer": before}, torch.float32)
    for path, layer in layers.items():
        model.set_submodule(path, linear[id(layer)])


def product(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """Return the output of a linear layer for fixed random numbers; None if it cannot run, for example without its kernels.

    A copy of the layer runs: a forward may rearrange its weights.
    """
    width = getattr(layer, "in_features", getattr(layer, "nx", None))
    if not isinstance(width, int):
        return None
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    device = next((parameter.device for parameter in layer.parameters()), x.device)
    try:
        with torch.no_grad():
            return cast(Tensor, copy.deepcopy(layer)(x.to(device, dtype)).float())
    except Exception:  # of any type, from a kernel
        return None


def require_same_products(model: nn.Module, products: Mapping[str, Tensor | None], dtype: torch.dtype) -> None:
    """Raises `CheckpointError` if a layer's output differs from that before it was unpacked."""
    for path, expected in products.items():
        if expected is None or (found := product(model.get_submodule(path), dtype)) is None:
            continue
        off = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
        if not off < ROUNDING:
            raise CheckpointError(
                f"{path} of {type(model).__name__} was dequantized to other weights than it computed with",
                why=f"on random numbers the results differ by {off:.0%}; bitsandbytes 0.50 does so on some processors, with 4 bits "
                "and after a forward pass",
                remedy="load the model again and dequantize it before its first forward (for bitsandbytes, or load it with "
                "bnb_4bit_use_double_quant=True)",
                code="differs",
                site=path,
            )


def plain_parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(unpacked(weight.detach()).to(weight.dtype).contiguous())


def unpackable(model: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{type(model).__name__} cannot be dequantized",
        why=why,
        remedy="use the model that it was quantized from",
        code="packed",
    )


def is_recipe(quantization_config: Any) -> bool:
    """Return whether `config.quantization_config` holds a recipe and not a quantization."""
    return bool(field_of(quantization_config, "quant_method") == METHOD)


def stored_quantization(quantization_config: Any) -> Any:
    """Return the quantization that a config holds besides its recipe; None if there is none."""
    return field_of(quantization_config, "quantization") if is_recipe(quantization_config) else None


def is_quantized(model: Any) -> bool:
    """Return whether the model is quantized: its config says so, and its weights have not been unpacked since."""
    found = quantization_of(model)
    recipe_alone = is_recipe(found) and stored_quantization(found) is None
    return came_through_quantizer(model) and not recipe_alone and not has_plain_weights(model)


def refuse_packed(model: Any, done: str) -> None:
    """Raises `CheckpointError` if the model's weights are packed by a quantizer; `done` is what was to be done with it."""
    if is_quantized(model):
        present = quantization_of(model)
        present = stored_quantization(present) or present
        method = present.get("quant_method") if isinstance(present, dict) else getattr(present, "quant_method", present)
        raise CheckpointError(
            f"{type(model).__name__} is quantized ({getattr(method, 'value', method)}) and cannot be {done}",
            why="its weights are packed; new ones are computed from the dequantized values",
            remedy="dequantize it first: retrofit.dequantize(model), or `retrofit apply --dequantize` (docs/quantization.md)",
            code="quantized",
        )
