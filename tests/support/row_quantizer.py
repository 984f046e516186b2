"""A quantizer for tests, registered with transformers as anybody's may be: int8 rows packed in place, a class of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "rows-for-tests"
KEPT = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default}


class RowScaled(Tensor):
    """A matrix of whole numbers with a scale a row; `unpacked` lists the shapes that were unpacked."""

    unpacked: list[tuple[int, ...]] = []

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> RowScaled:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def packing(cls, matrix: Tensor) -> RowScaled:
        scale = matrix.abs().amax(1, keepdim=True) / 127
        return cls((matrix / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["whole", "scale"], {}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], rest: dict[str, Any], size: Any, stride: Any) -> RowScaled:
        return cls(parts["whole"], parts["scale"])

    def dequantize(self) -> Tensor:
        RowScaled.unpacked.append(tuple(self.whole.shape))
        return self.whole.to(self.scale.dtype) * self.scale

    def __repr__(self) -> str:
        return f"RowScaled{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            return cls(args[0].whole, args[0].scale)
        if func is torch.ops.aten.equal.default:
            raise NotImplementedError("as torchao's classes do not compare")
        plain = pytree.tree_map_only(RowScaled, RowScaled.dequantize, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@dataclasses.dataclass
class RowConfig(QuantizationConfigMixin):
    quant_method: Any = METHOD
    keep: list[str] = dataclasses.field(default_factory=list)  # the modules that are not packed


class PackRows(ConversionOps):
    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: Any, full_layer_name: Any = None, missing_keys: Any = None, **kwargs: Any) -> dict[str, Any]:
        (value,) = input_dict.values()
        return {full_layer_name: nn.Parameter(RowScaled.packing(value[0] if isinstance(value, list) else value), False)}


class RowQuantizer(HfQuantizer):
    """Packs the weights of linear layers, but of those named in its config and the head; files hold the numbers they stand for."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, leaf = param_name.rpartition(".")
        module = model.get_submodule(path)
        head = module is model.get_output_embeddings()
        return isinstance(module, nn.Linear) and leaf == "weight" and not head and path not in self.quantization_config.keep

    def get_quantize_ops(self) -> PackRows:
        return PackRows(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for name, parameter in list(model.named_parameters()):
            if type(parameter) is nn.Parameter and self.param_needs_quantization(model, name):
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, nn.Parameter(RowScaled.packing(parameter.detach()), False))

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        return {name: one.dequantize() if isinstance(one, RowScaled) else one for name, one in model.state_dict().items()}, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(RowConfig)
        auto.register_quantizer(METHOD)(RowQuantizer)
