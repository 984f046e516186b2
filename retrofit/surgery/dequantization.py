"""Models that came quantized, made plain: packed weights are floating-point numbers again, and a pass can rewrite them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from retrofit.errors import CheckpointError, first_few, first_line
from retrofit.runtime.packed_layers import packed_layers, unpacked_linear
from retrofit.runtime.packed_rows import is_packed_tensor, unpacked
from retrofit.runtime.usable_models import require_torch_module
from retrofit.surgery.transformers_bookkeeping import forget_packed_reading
from retrofit.surgery.transformers_quantization import (
    came_through_quantizer,
    forget_quantization,
    has_plain_weights,
    is_packed,
    skeleton_of,
    transpose_again,
    transposed_layers,
)

ROUNDING = 0.15  # of a product's length: what packing the inputs, to 8 or 4 bits, may do; weights in the wrong places do more


def dequantize(model: Any) -> Any:
    """`model`, every weight of it the floating-point numbers that its quantization represents; a recipe in its config stays.

    Raises `CheckpointError` where a quantizer cannot unpack what it packed, or unpacks other weights than it has computed with.
    """
    require_torch_module(model)
    unpack_layers(model)
    packed = {name: one for name, one in model.named_parameters(remove_duplicate=False) if is_packed(one)}
    if not packed and (not came_through_quantizer(model) or has_plain_weights(model)):
        return model
    quantizer = getattr(model, "hf_quantizer", None)
    if packed and all(is_packed_tensor(one) for one in packed.values()):
        made: dict[int, nn.Parameter] = {}
        for name, one in packed.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made.setdefault(id(one), plain_parameter(one)))
        quantizer.remove_quantization_config(model) if quantizer is not None else forget_quantization(model)
    elif quantizer is not None:
        paths, dtype = dict.fromkeys(name.rpartition(".")[0] for name in packed), model.dtype
        before = {path: product(model.get_submodule(path), dtype) for path in paths}
        if isinstance(model.config.dtype, str):  # as transformers' own save_pretrained leaves it, and no quantizer takes it
            model.config.dtype = getattr(torch, model.config.dtype)
        model.state_dict()  # layers that have arranged their weights for this processor arrange them back to save them
        try:
            model.dequantize()
        except Exception as error:  # whatever a quantizer raises
            raise unpackable(model, first_line(error)) from error
        forget_packed_reading(model)
        if not getattr(model, "retrofit_recipe", ()):  # with a recipe, `quantized_recipes` has seen to it
            transpose_again(model, transposed_layers(skeleton_of(model)))
        require_same_products(model, before, dtype)
    if left := [name for name, one in model.named_parameters() if is_packed(one)]:
        raise unpackable(model, f"still packed: {first_few(left)}")
    with torch.no_grad():
        for module in model.modules():  # what follows from the weights was measured on the packed ones
            if hasattr(module, "rebuild_buffers"):
                module.rebuild_buffers()
    return model


def unpack_layers(model: nn.Module) -> None:
    """Layers that torch's own quantization has packed are linear again; raises `CheckpointError` where one is none."""
    linear: dict[int, nn.Linear] = {}
    layers = packed_layers(model)
    for path, layer in layers.items():
        before = product(layer, torch.float32)
        if before is None:
            raise unpackable(model, f"{path} is no linear layer that takes floating-point numbers")
        if id(layer) not in linear:
            linear[id(layer)] = unpacked_linear(layer)
            require_same_products(nn.ModuleDict({"layer": linear[id(layer)]}), {"layer": before}, torch.float32)
    for path, layer in layers.items():
        model.set_submodule(path, linear[id(layer)])


def product(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """What a linear layer makes of the same random numbers every time; None where it cannot be asked, as without its kernels here.

    A copy of it is asked: what a layer computes may change how it holds its weights.
    """
    width = getattr(layer, "in_features", getattr(layer, "nx", None))
    if not isinstance(width, int):
        return None
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    device = next((one.device for one in layer.parameters()), x.device)
    try:
        with torch.no_grad():
            return cast(Tensor, copy.deepcopy(layer)(x.to(device, dtype)).float())
    except Exception:  # whatever a kernel raises
        return None


def require_same_products(model: nn.Module, products: Mapping[str, Tensor | None], dtype: torch.dtype) -> None:
    """Raises `CheckpointError` where a layer gives something else than before it was unpacked."""
    for path, expected in products.items():
        if expected is None or (found := product(model.get_submodule(path), dtype)) is None:
            continue
        off = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
        if not off < ROUNDING:
            raise CheckpointError(
                f"{path} of {type(model).__name__} was unpacked to other weights than it has computed with",
                why=f"on random numbers the results differ by {off:.0%}; bitsandbytes 0.50 does so on some processors, with 4 bits "
                "and after a forward pass",
                remedy="load the model again and unpack it before it computes anything (for bitsandbytes, or load it with "
                "bnb_4bit_use_double_quant=True)",
            )


def plain_parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(unpacked(weight.detach()).to(weight.dtype).contiguous())


def unpackable(model: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{type(model).__name__} cannot be unpacked",
        why=why,
        remedy="take the model that it was quantized from, where there is one",
    )
