"""Products with a masked input: entries below a threshold are zero, and their columns of W are not needed.

    x̃ = x · 1(|x| ≥ τ)                          y = W x̃
    x̃ = m + (x − m) · 1(|x − m| ≥ τ)            centred on m: y = W (x̃ − m) + W m

In training the forward is masked and the gradient is not: ∂x̃/∂x = 1 (straight-through), so that an entry below the threshold can
grow. The layer and its weights stay as they are: at τ = 0 it computes the dense function.

A module that multiplies by one matrix is wrapped. If a module's code computes several products, as that of experts does,
`MaskedProducts` masks the inputs of each weight's products while that code runs.

A product with a sparse input reads only the columns of the weight for nonzero entries:

    y[t] = Σ_i x[t, i] W[:, i] + b          over the i for which x[t, i] ≠ 0

A column is contiguous only if W is stored by columns. So the weight of a linear layer is rearranged in place when the layer is
first called in evaluation, without gradient and with a threshold: the parameter, its shape and its values stay the same, and there
is no second copy. Training, and removing the mask, rearrange it by rows again. Few tokens read columns, on a CPU compiled if there
is a C++ compiler (`compiled_products.py`), on CUDA by a Triton kernel (`indexed_rows.py`); more use the dense product (`FEW`). The
dense product is also used in export, with gradients, on other devices, for packed weights, and for layers with hooks or of other
classes.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrofit.passes.compiled_products import compiled_functions, sums_of_columns
from retrofit.passes.indexed_rows import HAS_TRITON, thresholded_sums
from retrofit.sdk import ArgumentPlace, Wrapper, find_argument
from retrofit.sdk.modules import child_modules, is_exporting, is_transposed, weights_are_mapped
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

    def least(self, dtype: torch.dtype) -> Tensor:
        """Return the threshold, times its share."""
        threshold = self.threshold.to(dtype)
        return threshold if self.share == 1.0 else self.share * threshold

    def forward(self, x: Tensor) -> Tensor:
        threshold = self.least(x.dtype)
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

    If retrofit is installed, a call with few tokens reads only the columns that it needs (`column_product`).
    """

    column_product: ClassVar[Callable[[Any, Tensor], Tensor | None] | None] = None
    by_columns: ClassVar[Callable[[Any], bool] | None] = None
    by_rows: ClassVar[Callable[[Any], None] | None] = None

    def __init__(self, layer: nn.Module, stream_in: ArgumentPlace, mask: ActivationMask) -> None:
        super().__init__(layer)
        self.stream_in, self.mask = stream_in, mask

    @property
    def is_by_entry(self) -> bool:  # type: ignore[override]
        """Return whether no entry has a centre of its own."""
        return self.mask.centre is None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        container, key = find_argument(self.stream_in, given, kwargs)
        y = None if self.column_product is None else self.column_product(container[key])
        if y is not None:
            return y
        container[key] = self.mask(container[key])
        return self.layer(*given, **kwargs)

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

    @property
    def is_by_entry(self) -> bool:  # type: ignore[override]
        """Return whether no entry has a centre of its own."""
        return all(mask.centre is None for mask in self.masks)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, that of `layer` if it has one: code around it may reset a state that its own code keeps."""
        layer = self.__dict__.get("_modules", {}).get("layer")
        if layer is not None and name in vars(layer) and name not in ("training", "weights", "masks"):
            setattr(layer, name, value)
        else:
            super().__setattr__(name, value)

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
    """A dial of the thresholds: at 0 they are zero, which gives the dense function; at 1 they are those of the method.

    At infinity they are infinite, for good: every input is masked.
    """

    name: str = "the thresholds"

    def fits(self, site: nn.Module) -> bool:
        """Return whether the site has masks."""
        return any(isinstance(module, ActivationMask) for module in site.modules())

    def turn(self, site: nn.Module, share: float) -> None:
        """Multiply the thresholds by `share`."""
        for module in site.modules():
            if isinstance(module, ActivationMask):
                module.share = share
                if share == math.inf:  # times thresholds that may be zero yet
                    module.threshold.fill_(share)


# ── Products with sparse inputs ───────────────────────────────────────────────────────────────────────────────────────────────────


# Columns are faster than the dense product within these limits, at a level of 0.4 (benchmarks/activation_sparsity.py). On CUDA they
# are estimates: another launch adds the parts of a sum, and four tokens need nearly every column.
SMALLEST = {"cpu": 1 << 16, "cuda": 1 << 22}  # entries of a weight: a call costs as much
UNCOMPILED = {torch.float32: 1 << 19, torch.bfloat16: 1 << 18}  # for each thread, the same on a CPU without a C++ compiler
FEW = {"cpu": 4, "cuda": 2}  # tokens
DTYPES = {"cpu": tuple(UNCOMPILED), "cuda": (torch.float32, torch.bfloat16, torch.float16) if HAS_TRITON else ()}
# On a CPU two to four tokens in bfloat16 take longer by columns (one by one or densely) than densely by rows, so batches keep rows.
OFTEN_BATCHED = ("cpu", torch.bfloat16)
LOCK = threading.Lock()


def column_product(module: MaskedProjection, x: Tensor) -> Tensor | None:
    """Return the layer's output for x̃ from the columns that it needs; None if mask and layer must be called."""
    children: Any = child_modules(module)
    layer, mask = children["layer"], children["mask"]
    transposed = is_transposed(layer)
    if not (transposed or type(layer) is nn.Linear) or not reads_columns(module, layer, mask, x):
        return None
    weight, bias = layer.weight, layer.bias
    columns = weight if transposed else weight.t()
    compiling = torch.compiler.is_compiling()
    if not columns.is_contiguous():
        is_batch = x.dim() > 2 and x.shape[0] > 1
        if compiling or (is_batch and (x.device.type, x.dtype) == OFTEN_BATCHED) or not lay_out(module):
            return None
        columns = weight.t()
    inputs, outputs = columns.shape
    if is_many(x, FEW[x.device.type] * inputs):
        return None
    # Opaque to a compiler, because the number of zeros is known only at run time.
    sums = torch.ops.retrofit.masked_product if compiling else masked_product
    y = sums(x.reshape(-1, inputs), columns, mask.least(x.dtype))
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], outputs)


def is_many(x: Tensor, most: int) -> bool:
    """Return whether x has more numbers than `most`; in code compiled for any number of tokens, whether it surely has."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # deferred: slow to import

        return statically_known_true(x.numel() > most)
    return x.numel() > most


def masked_product(x: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    """Return x̃ W, for few tokens from the columns of W that they need: (tokens, inputs) by (inputs, outputs)."""
    if not 0 < len(x) <= FEW[x.device.type]:
        return torch.where(x.abs() < threshold, 0.0, x) @ columns
    return (sums_of_columns if x.device.type == "cpu" else thresholded_sums)(x, columns, threshold)


OPERATIONS = torch.library.Library("retrofit", "FRAGMENT")  # `custom_op` takes 8 µs a call, as long as half of a small product
OPERATIONS.define("masked_product(Tensor x, Tensor columns, Tensor threshold) -> Tensor")
OPERATIONS.impl("masked_product", masked_product, "CPU")
OPERATIONS.impl("masked_product", masked_product, "CUDA")


@torch.library.register_fake("retrofit::masked_product", lib=OPERATIONS)
def shaped_product(x: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], columns.shape[1])


def reads_columns(module: MaskedProjection, layer: Any, mask: Any, x: Tensor) -> bool:
    """Return whether the layer only multiplies, by a plain weight, and nothing traces, observes, hooks or differentiates the call.

    A mode that observes operations must see the comparison with the threshold, which is a choice.
    """
    weight, device = layer.weight, x.device.type
    return not (
        module.training
        or torch.is_grad_enabled()
        or mask.centre is not None
        or mask.share == 0.0
        or weight.device != x.device
        or x.dtype not in DTYPES.get(device, ())
        or weight.numel() < SMALLEST[device]
        or weight.dtype != x.dtype
        or type(weight) is not nn.Parameter
        or (type(x) is not Tensor and not torch.compiler.is_compiling())
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or mask._forward_hooks
        or mask._forward_pre_hooks
        or "forward" in vars(layer)
        or is_exporting()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled(device)
        or (not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0)
    )


def lay_out(module: MaskedProjection, *, at_once: bool = False) -> bool:
    """Store the weight of a linear layer by columns; return False if it is left as it is.

    It is left if there is no threshold, if it is small or of another layout, or if others share its memory; with `at_once`, before
    the layer's inputs are known, also if columns would slow down batches.
    """
    if module.mask.centre is not None:
        return False
    layer: Any = child_modules(module)["layer"]
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    weight, device = layer.weight, layer.weight.device.type
    if weight.dtype not in DTYPES.get(device, ()) or not weight.is_contiguous() or weight.numel() < smallest(weight):
        return False
    if at_once and (device, weight.dtype) == OFTEN_BATCHED:
        return False
    if weight.is_inference() or (weight.is_shared() and device == "cpu") or weights_are_mapped():
        return False
    if (device == "cuda" and torch.cuda.is_current_stream_capturing()) or not float(module.mask.threshold) > 0:
        return False
    with LOCK:
        return weight.t().is_contiguous() or rearrange(weight, by_columns=True)


def smallest(weight: Tensor) -> int:
    """Return the number of entries from which a weight is read by columns."""
    if weight.device.type == "cpu" and not compiled_functions():
        return UNCOMPILED[weight.dtype] * torch.get_num_threads()
    return SMALLEST[weight.device.type]


def lay_out_by_rows(module: MaskedProjection) -> None:
    """Store the weight of a linear layer by rows, as torch does."""
    weight = getattr(child_modules(module)["layer"], "weight", None)
    with LOCK:
        if type(weight) is nn.Parameter and weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous():
            rearrange(weight, by_columns=False)


@torch.inference_mode(False)
@torch.no_grad()
def rearrange(weight: nn.Parameter, *, by_columns: bool) -> bool:
    """Store the weight by columns or by rows; return False, without a change, if a mode of torch makes copies of another kind."""
    copy = weight.detach().t().contiguous().t() if by_columns else weight.detach().contiguous()
    if type(copy) is not Tensor or copy.dtype != weight.dtype:
        return False
    weight.data = copy
    return True


def use_columns() -> None:
    """Let masked layers read columns; in a bundle, which has only the definitions of modules, they use the dense product."""
    MaskedProjection.column_product, MaskedProjection.by_columns = column_product, lay_out
    MaskedProjection.by_rows = lay_out_by_rows


use_columns()
