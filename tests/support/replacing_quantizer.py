"""A quantizer for tests that replaces linear layers with its own, which keep more than a weight and may arrange it anew to compute.

What it does stands for bitsandbytes: its numbers are read by a conversion without an inverse, and a layer that has computed holds
its weight in another order until it is saved.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "layers-for-tests"


class WholeNumbers(nn.Module):
    """y = x (weight ⊙ scale)ᵀ + b, of whole numbers with a scale a row; `arranged` is whether the columns are in reverse."""

    loses_order = False  # whether it forgets to put them back

    def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None, transposed: bool, packed: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.transposed = inputs, outputs, transposed
        dtype = torch.int8 if packed else torch.float32  # as it lies in the file
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device="meta"), False)
        self.scale: Tensor | None = None  # (outputs, 1), in files next to the weight
        self.register_parameter("bias", bias)
        self.arranged = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.arranged:
            self.weight.data, self.arranged = self.weight.data.flip(1), True
        return F.linear(x.flip(-1), self.numbers(), self.bias)

    def numbers(self) -> Tensor:
        assert self.scale is not None
        return self.weight * self.scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.arranged and not self.loses_order:
            self.weight.data = self.weight.data.flip(1)
        self.arranged = False
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale is not None:
            destination[f"{prefix}scale"] = self.scale


@dataclasses.dataclass
class LayersConfig(QuantizationConfigMixin):
    quant_method: Any = METHOD


class Pack(ConversionOps):
    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: Any, full_layer_name: Any = None, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        ((name, value),) = input_dict.items()
        value = value[0] if isinstance(value, list) else value
        module = model.get_submodule(name.rpartition(".")[0])
        value = value.T if module.transposed else value
        module.scale = value.abs().amax(1, keepdim=True) / 127
        module._is_hf_initialized = True
        return {name: nn.Parameter((value / module.scale).round().to(torch.int8).contiguous(), False)}


class Read(ConversionOps):
    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: Any, full_layer_name: Any = None, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        if len(input_dict) == 1:
            return input_dict  # type: ignore[no-any-return]
        weight, scale = (one[0] if isinstance(one, list) else one for one in (input_dict["weight"], input_dict["scale"]))
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        module.scale, module._is_hf_initialized = scale, True
        return {"weight": nn.Parameter(weight, False)}


class LayersQuantizer(HfQuantizer):
    """Replaces every linear layer but the head."""

    serialized_names = {"weight": ["weight", "scale"]}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for path, module in list(model.named_modules()):
            if (type(module) is nn.Linear or isinstance(module, Conv1D)) and module is not model.get_output_embeddings():
                transposed = isinstance(module, Conv1D)
                inputs, outputs = module.weight.shape if transposed else module.weight.shape[::-1]
                model.set_submodule(path, WholeNumbers(inputs, outputs, module.bias, transposed, self.pre_quantized))

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, leaf = param_name.rpartition(".")
        return isinstance(model.get_submodule(path), WholeNumbers) and leaf == "weight"

    def get_quantize_ops(self) -> Pack:
        return Pack(self)

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": Read}

    def get_weight_conversions(self) -> list[Any]:  # transformers 5.17 asks for these alone
        from transformers.core_model_loading import WeightConverter

        return [WeightConverter(["weight", "scale"], "weight", [Read(self)])] if self.pre_quantized else []

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for path, module in list(model.named_modules()):
            if isinstance(module, WholeNumbers):
                layer = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                layer.weight, layer.bias = nn.Parameter(module.numbers().to(dtype)), module.bias
                model.set_submodule(path, layer)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(LayersConfig)
        auto.register_quantizer(METHOD)(LayersQuantizer)
