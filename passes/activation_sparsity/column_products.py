"""Products with sparse inputs: only the columns of the weight for nonzero entries are read.

    y[t] = Σ_i x[t, i] W[:, i] + b          over the i for which x[t, i] ≠ 0

A column is contiguous only if W is stored by columns. So the weight of a linear layer is rearranged in place when the layer is
first called on a CPU in evaluation, without gradient and with a threshold: the parameter, its shape and its values stay the same,
and there is no second copy. Training, and removing the mask, rearrange it by rows again. Few tokens read columns; more use the
dense product (`FEW`). The dense product is also used in export, with gradients, on other devices, for packed weights, and for
layers with hooks or of other classes.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from retrofit.passes.activation_sparsity.masked_products import MaskedProjection
from retrofit.passes.sparse_ffn.indexed_rows import indexed_sums
from retrofit.sdk.modules import child_modules, is_exporting, weights_are_mapped

# Columns are faster than the dense product within these limits, at a level of 0.4 (benchmarks/activation_sparsity.py):
SMALLEST = 1 << 18  # entries of a weight
FEW = {torch.float32: 3, torch.bfloat16: 4}  # tokens
# In bfloat16 two to four tokens take longer by columns (one by one or densely) than densely by rows, so batches keep the rows.
OFTEN_BATCHED = (torch.bfloat16,)
LOCK = threading.Lock()
FIRST = torch.zeros(1, dtype=torch.long, device="cpu")  # start of the only bag


def column_product(module: MaskedProjection, x: Tensor) -> Tensor | None:
    """Return the layer's output for x, which is masked, from the columns that it needs; None if the layer must be called."""
    layer: Any = child_modules(module)["layer"]
    if type(layer) not in (nn.Linear, Conv1D) or layer.weight.numel() < SMALLEST or not reads_columns(module, layer, x):
        return None
    weight, bias = layer.weight, layer.bias
    columns = weight if type(layer) is Conv1D else weight.t()
    if not columns.is_contiguous():
        is_batch = x.dim() > 2 and x.shape[0] > 1
        if torch.compiler.is_compiling() or (is_batch and x.dtype in OFTEN_BATCHED) or not lay_out(module):
            return None
        columns = weight.t()
    inputs, outputs = columns.shape
    if x.numel() > FEW[x.dtype] * inputs or not x.numel():
        return None
    tokens = x.reshape(-1, inputs)
    # Opaque to a compiler, because the number of zeros is known only at run time.
    sums = torch.ops.retrofit.sums_of_columns if torch.compiler.is_compiling() else sums_of_columns
    y = sums(tokens, columns)
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], outputs)


def reads_columns(module: MaskedProjection, layer: Any, x: Tensor) -> bool:
    """Return whether the layer only multiplies, by a plain weight, and nothing traces, hooks or differentiates the call."""
    weight = layer.weight
    return not (
        module.training
        or torch.is_grad_enabled()
        or module.mask.centre is not None
        or module.mask.share == 0.0
        or x.device.type != "cpu"
        or weight.device.type != "cpu"
        or x.dtype not in FEW
        or weight.dtype != x.dtype
        or type(weight) is not nn.Parameter
        or (type(x) is not Tensor and not torch.compiler.is_compiling())
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or "forward" in vars(layer)
        or is_exporting()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
    )


def sums_of_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return x W from the rows of `columns` for which x is nonzero: (tokens, inputs) by (inputs, outputs)."""
    if len(x) == 1:
        return sum_of_columns(x.view(-1), columns)
    return torch.cat([sum_of_columns(token, columns) for token in x])


def sum_of_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the same for one token, as one bag of rows: (inputs) to (1, outputs)."""
    kept = x.nonzero().view(-1)
    if not len(kept):
        return columns.new_zeros(1, columns.shape[1])
    if torch.get_num_threads() > 1:
        return indexed_sums(x[kept].unsqueeze(0), kept.unsqueeze(0), columns)
    return torch.embedding_bag(columns, kept, FIRST, False, 0, False, x.index_select(0, kept))[0]


OPERATIONS = torch.library.Library("retrofit", "FRAGMENT")  # `custom_op` takes 8 µs a call, as long as half of a small product
OPERATIONS.define("sums_of_columns(Tensor x, Tensor columns) -> Tensor")
OPERATIONS.impl("sums_of_columns", sums_of_columns, "CPU")


@torch.library.register_fake("retrofit::sums_of_columns", lib=OPERATIONS)
def shaped_sums(x: Tensor, columns: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], columns.shape[1])


def lay_out(module: MaskedProjection, *, at_once: bool = False) -> bool:
    """Store the weight of a linear layer by columns; return False if it is left as it is.

    It is left if there is no threshold, if it is small or of another layout, or if others share its memory; with `at_once`, before
    the layer's inputs are known, also if columns would slow down batches.
    """
    if module.mask.centre is not None:
        return False
    layer: Any = child_modules(module)["layer"]
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or layer.weight.numel() < SMALLEST:
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype not in FEW or not weight.is_contiguous():
        return False
    if at_once and weight.dtype in OFTEN_BATCHED:
        return False
    if weight.is_inference() or weight.is_shared() or weights_are_mapped() or not float(module.mask.threshold) > 0:
        return False
    with LOCK:
        return weight.t().is_contiguous() or rearrange(weight, by_columns=True)


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
