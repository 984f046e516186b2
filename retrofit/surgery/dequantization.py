"""Models that came quantized, made plain: packed weights are floating-point numbers again, and a pass can rewrite them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from retrofit.errors import CheckpointError, first_line
from retrofit.runtime.packed_rows import is_packed_tensor, unpacked
from retrofit.surgery.transformers_quantization import came_through_quantizer, forget_quantization, has_plain_weights, is_packed


def dequantize(model: Any) -> Any:
    """`model`, every weight of it the floating-point numbers that its quantization represents; a recipe in its config stays.

    Raises `CheckpointError` where a quantizer cannot unpack what it packed.
    """
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
        try:
            model.dequantize()
        except Exception as error:  # whatever a quantizer raises
            raise unpackable(model, first_line(error)) from error
    if left := [name for name, one in model.named_parameters() if is_packed(one)]:
        raise unpackable(model, f"still packed: {', '.join(left[:5])}")
    return model


def plain_parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(unpacked(weight.detach()).to(weight.dtype).contiguous())


def unpackable(model: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{type(model).__name__} cannot be unpacked",
        why=why,
        remedy="take the model that it was quantized from, where there is one",
    )
