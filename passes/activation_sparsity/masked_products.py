"""Products with a masked input: entries below a threshold are zero, and their columns of W are not needed.

    x̃ = x · 1(|x| ≥ τ)                          y = W x̃
    x̃ = m + (x − m) · 1(|x − m| ≥ τ)            centred on m: y = W (x̃ − m) + W m

In training the forward is masked and the gradient is not: ∂x̃/∂x = 1 (straight-through), so that an entry below the threshold can
grow. The layer and its weights stay as they are: at τ = 0 it computes the dense function.

A module that multiplies by one matrix is wrapped. If a module's code computes several products, as that of experts does,
`MaskedProducts` masks the inputs of each weight's products while that code runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrofit.sdk import ArgumentPlace, Wrapper, find_argument
from retrofit.sdk.modules import child_modules, is_exporting
from retrofit.sdk.program import ADDED_PRODUCT, is_product, op_name


class ActivationMask(nn.Module):
    """x̃ of the formula above: τ is the buffer `threshold`, m the buffer `centre`, if there is one."""

    threshold: Tensor
    centre: Tensor | None

    def __init__(self, like: Tensor, width: int | None = None) -> None:
        super().__init__()
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        self.share = 1.0  # factor of the threshold, set by `Thresholds`
        self.register_buffer("threshold", torch.zeros((), dtype=dtype, device=like.device))
        self.register_buffer("centre", None if width is None else torch.zeros(width, dtype=dtype, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        threshold = self.threshold.to(x.dtype)
        threshold = threshold if self.share == 1.0 else self.share * threshold
        if self.centre is None:
            kept = x.masked_fill(x.abs() < threshold, 0.0)
        else:
            centre = self.centre.to(x.dtype)
            kept = torch.where((x - centre).abs() < threshold, centre, x)
        if torch.is_grad_enabled() and x.requires_grad and not is_exporting():
            return kept.detach() + (x - x.detach())
        return kept

    def extra_repr(self) -> str:
        return "centred" if self.centre is not None else ""


class MaskedProjection(Wrapper):
    """Calls `layer`, which multiplies its argument at `stream_in` by one matrix, with that argument masked.

    If retrofit is installed, a call with few tokens reads only the columns that it needs (`column_products.py`).
    """

    column_product: ClassVar[Callable[[Any, Tensor], Tensor | None] | None] = None
    by_columns: ClassVar[Callable[[Any], bool] | None] = None
    by_rows: ClassVar[Callable[[Any], None] | None] = None

    def __init__(self, layer: nn.Module, stream_in: ArgumentPlace, mask: ActivationMask) -> None:
        super().__init__(layer)
        self.stream_in, self.mask = stream_in, mask

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        container, key = find_argument(self.stream_in, given, kwargs)
        container[key] = self.mask(container[key])
        y = None if self.column_product is None else self.column_product(container[key])
        return self.layer(*given, **kwargs) if y is None else y

    def train(self, mode: bool = True) -> MaskedProjection:
        if mode:
            self.release()
        super().train(mode)
        return self

    def arrange(self) -> None:
        if self.by_columns is not None:
            self.by_columns()

    def release(self) -> None:
        if self.by_rows is not None:
            self.by_rows()


class MaskedCode(Wrapper):
    """Calls `layer`, whose own code multiplies by its parameters `weights`, with the inputs of these products masked."""

    def __init__(self, layer: nn.Module, weights: Sequence[str], masks: Sequence[ActivationMask]) -> None:
        super().__init__(layer)
        self.weights = tuple(weights)
        self.masks = nn.ModuleList(masks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = child_modules(self)["layer"]
        found = {name: parameter_at(layer, name) for name in self.weights}
        masks = dict(zip(self.weights, child_modules(self)["masks"].children(), strict=True))
        with MaskedProducts([(weight, masks[name]) for name, weight in found.items()]):
            return layer(*args, **kwargs)


def parameter_at(module: nn.Module, name: str) -> Any:
    """Return the parameter, or the value that replaces it while tracing, which need not be a parameter."""
    *path, last = name.split(".")
    for step in path:
        module = child_modules(module)[step]
    return module.__dict__["_parameters"].get(last, getattr(module, last, None))


class MaskedProducts(TorchFunctionMode):
    """Within this context the input of each product with one of the weights, or with a part or view of one, is masked.

    A part is the result of an operation that reads no other floating-point tensor: an expert's matrix, the transposed weight.
    """

    def __init__(self, masked: Sequence[tuple[Tensor, nn.Module]]) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, nn.Module]] = {id(weight): (weight, mask) for weight, mask in masked}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = numbers_in((args, kwargs))
        weight = next((value for value in given if id(value) in self.known), None)
        if weight is None:
            return function(*args, **kwargs)
        mask = self.known[id(weight)][1]
        if is_product(function):
            args, kwargs = self.masked(function, mask, args, kwargs)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if all(id(value) in self.known for value in given):
            self.known.update({id(part): (part, mask) for part in numbers_in(result)})
        return result

    def masked(self, function: Any, mask: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments of a product with its first operand that is no weight masked."""
        skipped = args[:1] if op_name(function).strip("_") in ADDED_PRODUCT else ()  # the term added to the product
        others = (value for value in numbers_in((args[len(skipped) :], kwargs)) if id(value) not in self.known)
        operand = next(others, None)
        if operand is None:
            return args, kwargs
        x = mask(operand)
        return pytree.tree_map(lambda value: x if value is operand else value, (tuple(args), dict(kwargs)))


def numbers_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors among nested values."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """A dial of the thresholds: at 0 they are zero, which gives the dense function; at 1 they are those of the method."""

    name: str = "the thresholds"

    def fits(self, site: nn.Module) -> bool:
        """Return whether the site has masks."""
        return any(isinstance(module, ActivationMask) for module in site.modules())

    def turn(self, site: nn.Module, share: float) -> None:
        """Multiply the thresholds by `share`."""
        for module in site.modules():
            if isinstance(module, ActivationMask):
                module.share = share
