"""Packed weights: layers that hold an object of torch's engine, and tensors of their own class.

`torch.ao.quantization.quantize_dynamic` creates the former. The latter list their parts (integers, their scales, their zero points)
by `__tensor_flatten__`, the protocol by which torch.compile takes tensor subclasses apart. If each part has one row per row of the
matrix, single rows can be read: as a small matrix of the same class, which unpacks itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from retrofit.errors import RetrofitError, first_few

APART: Any = WeakIdKeyDictionary()  # for each packed matrix tested so far, whether single rows can be read


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, the layers with such an object and a method `weight()` that returns the matrix."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if callable(getattr(module, "weight", None))
        and any(type(value) is torch.ScriptObject for part in module.modules() for value in vars(part).values())
    }


def unpacked_linear(layer: Any) -> nn.Linear:
    """Return a linear layer with the packed one's weight in float32, the only dtype in which such layers compute."""
    weight, bias = layer.weight().detach().dequantize().float(), layer.bias()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")  # draws no random numbers
    linear.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float().clone())
    return linear.train(layer.training)


def refuse_packed_layers(model: nn.Module, error: type[RetrofitError], done: str, because: str) -> None:
    """Raises `error` if the model has such layers and is to be `done`; `because` describes what their objects prevent."""
    if found := list(packed_layers(model)):
        raise error(
            f"{type(model).__name__} is quantized and cannot be {done}",
            why=f"{first_few(found, 1)}: weights in an object of torch's engine, {because}",
            remedy="dequantize it first: retrofit.dequantize(model) (docs/quantization.md); the result can be quantized again",
            code="quantized",
        )


def is_packed_tensor(weight: Tensor) -> bool:
    """Return whether the tensor has a class of its own and consists of other tensors."""
    return type(weight.detach()) is not Tensor and hasattr(weight, "__tensor_flatten__") and hasattr(weight, "dequantize")


def unpacked(weight: Tensor) -> Tensor:
    """Return the values that a packed matrix represents, or a plain matrix itself."""
    return weight.dequantize() if is_packed_tensor(weight) else weight


def has_rows_apart(weight: Tensor) -> bool:
    """Return whether `rows_at` reads the same rows as unpacking the whole matrix; tested once for each matrix."""
    if weight not in APART:
        APART[weight] = is_packed_tensor(weight) and weight.dim() == 2 and agrees_by_rows(weight)
    return bool(APART[weight])


@torch.no_grad()
def agrees_by_rows(weight: Tensor) -> bool:
    """Return whether a few rows, read alone, equal those of the whole matrix."""
    parts, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined] # of tensors with a class of their own
    if any(getattr(weight, name).dim() == 0 or len(getattr(weight, name)) != len(weight) for name in parts):
        return False
    tried = torch.linspace(0, len(weight) - 1, 5, device=weight.device).long()
    try:
        return torch.equal(rows_at(weight, tried), weight.dequantize().index_select(0, tried))
    except Exception:  # of any type: a class may not support it
        return False


def rows_at(weight: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of a packed matrix with these indices, unpacked: (indices, columns)."""
    parts, rest = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    read = {name: getattr(weight, name).index_select(0, indices) for name in parts}
    shape = torch.Size((len(indices), *weight.shape[1:]))
    few: Tensor = type(weight.detach()).__tensor_unflatten__(read, rest, shape, None)  # type: ignore[attr-defined]
    return few.dequantize()
