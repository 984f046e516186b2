"""Auxiliary losses that modules inside a model record in training, and their addition to the model's own loss.

A module deep inside a model may have a loss of its own, such as the balance loss of a mixture of experts, and no way to return it
through code that does not expect it. It calls `record_auxiliary_loss` instead. `ForwardWithAuxiliaryLosses` wraps the model's
forward and adds the losses recorded during a call to the loss that the call returns. The gradient is then that of the sum, with any
scaling or accumulation. Code that computes a loss from a model's outputs collects them with `auxiliary_losses`.

Non-reentrant checkpointing runs a layer a second time to recompute activations. The losses recorded in that run are discarded, and
the first loss keeps its gradient. Reentrant checkpointing runs a layer first without gradients, then with gradients in the backward
pass. The loss recorded first then has no graph of its own. Its gradient is computed before that of the checkpoint, which is earlier
in the forward pass. It is stored until the checkpoint runs the layer again, and enters the graph at the loss recorded second.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitWarning
from retrofit.surgery.wrappers import ForwardReplacement, own_forward, with_item

DROPPED = (
    "{} was called in training and returned no loss: its modules' losses (such as a mixture's balance loss) are dropped. "
    "Label smoothing and compute_loss_func of transformers' Trainer compute a loss from the outputs alone. "
    "Fix: collect them, `with auxiliary_losses() as losses:` around the call, and add sum(losses) to that loss (docs/shared_moe.md)"
)

# ── Recording ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording(threading.local):
    """The losses recorded in this thread, and the gradients of those that had no graph when they were recorded."""

    losses: list[Tensor] | None = None  # None if they are not collected
    needs_gradients: bool = False  # whether gradients were enabled when the collecting began
    pending: list[tuple[nn.Module, Tensor]] | None = None  # in a backward pass: module and gradient, the first recorded last


RECORDING = Recording()


def record_auxiliary_loss(value: Tensor, loss: Tensor, module: nn.Module) -> Tensor:
    """Record `loss`, which `module` computes along with `value`; return `value`, to be used in place of the argument.

    In the second run of a reentrant checkpoint nothing is recorded: there the returned tensor carries the gradient to `loss`.
    """
    if RECORDING.pending:
        gradient = pop_pending_gradient(RECORDING.pending, module)
        return value if gradient is None else LossAttached.apply(value, loss, gradient)  # type: ignore[no-any-return]
    if RECORDING.losses is not None:
        is_first_run = RECORDING.needs_gradients and not torch.is_grad_enabled()
        RECORDING.losses.append(defer_gradient(loss, module) if is_first_run else loss)
    return value


@contextlib.contextmanager
def auxiliary_losses() -> Iterator[list[Tensor]]:
    """Yield a list of the losses recorded within this context by models that have not added them to a loss of their own.

    with auxiliary_losses() as losses:
        logits = model(ids)
    loss = task_loss(logits) + sum(losses)
    """
    outer, losses = (RECORDING.losses, RECORDING.needs_gradients), []  # type: ignore[var-annotated]
    RECORDING.losses, RECORDING.needs_gradients = losses, torch.is_grad_enabled()
    try:
        yield losses
    finally:
        RECORDING.losses, RECORDING.needs_gradients = outer


# ── The gradient of a loss recorded without a graph ──────────────────────────────────────────────────────────────────────────────


def defer_gradient(loss: Tensor, module: nn.Module) -> Tensor:
    """Return `loss`; its gradient is stored for the next run of `module`."""
    with torch.enable_grad():
        return LossDeferred.apply(torch.empty(0, requires_grad=True), loss, module)  # type: ignore[no-any-return]


class LossDeferred(torch.autograd.Function):
    """A loss computed without a graph; its gradient becomes pending. `anchor` makes autograd compute one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        if RECORDING.pending is None:
            RECORDING.pending = []
            torch.autograd.Variable._execution_engine.queue_callback(discard_pending_gradients)
        RECORDING.pending.append((ctx.module, gradient))
        return None, None, None


class LossAttached(torch.autograd.Function):
    """Returns `value` unchanged; in the backward pass `loss` receives `gradient`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, of_value: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return of_value, gradient, None


def pop_pending_gradient(pending: list[tuple[nn.Module, Tensor]], module: nn.Module) -> Tensor | None:
    """Remove from `pending` the gradient of the first loss that `module` recorded, and return it; None if there is none."""
    index = next((index for index in reversed(range(len(pending))) if pending[index][0] is module), None)
    return None if index is None else pending.pop(index)[1]


def discard_pending_gradients() -> None:
    """Discard the pending gradients; called at the end of a backward pass."""
    RECORDING.pending = None


# ── Adding them to the model's loss ──────────────────────────────────────────────────────────────────────────────────────────────


class ForwardWithAuxiliaryLosses(ForwardReplacement):
    """Replaces a model's `forward`: in training, the loss that it returns includes the losses recorded during the call."""

    def __init__(self, module: nn.Module, number_is_loss: bool = False) -> None:
        super().__init__(module)
        self.inner = own_forward(module)
        self.number_is_loss = number_is_loss  # whether a single number in a tuple of outputs is the loss
        self.has_warned = False  # that a loss of its modules was dropped

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner) if self.inner is not None else super().__signature__

    def run(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return self.run_inner(module, args, kwargs)
        outer, needs_gradients, recorded = RECORDING.losses, RECORDING.needs_gradients, []  # type: ignore[var-annotated]
        RECORDING.losses, RECORDING.needs_gradients = recorded, True
        try:
            output = self.run_inner(module, args, kwargs)
        finally:
            RECORDING.losses, RECORDING.needs_gradients = outer, needs_gradients
        key, loss = loss_in(output, labelled=kwargs.get("labels") is not None, number_is_loss=self.number_is_loss)
        if loss is not None:
            weight = batch_fraction(module, kwargs)
            return with_item(output, key, loss + sum(weight * recorded_loss.to(loss) for recorded_loss in recorded))
        if outer is not None:
            outer.extend(recorded)
        elif recorded and not self.has_warned and not torch.compiler.is_compiling():
            self.has_warned = True
            warnings.warn(DROPPED.format(type(module).__name__), RetrofitWarning, stacklevel=2)
        return output

    def run_inner(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the wrapped forward."""
        if isinstance(self.inner, ForwardReplacement):
            return self.inner.run(module, args, kwargs)
        return type(module).forward(module, *args, **kwargs) if self.inner is None else self.inner(*args, **kwargs)


def batch_fraction(module: nn.Module, arguments: Mapping[str, Any]) -> Tensor | float:
    """Return the fraction of the batch's labels in this call: below 1 if a trainer accumulates gradients over several calls.

    transformers' Trainer then passes `num_items_in_batch`, the number of labels in all the calls, without the first label of each
    sequence if the model's loss shifts the labels.
    """
    total, labels = arguments.get("num_items_in_batch"), arguments.get("shift_labels", arguments.get("labels"))
    if total is None or labels is None:
        return 1.0
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss  # deferred: it imports scipy

    shifts = LOSS_MAPPING.get(getattr(module, "loss_type", "")) is ForCausalLMLoss
    decodes = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    counted = labels[..., 1:] if shifts and not decodes and "shift_labels" not in arguments else labels
    return counted.ne(-100).sum() / total  # type: ignore[no-any-return]


def loss_in(output: Any, *, labelled: bool, number_is_loss: bool = False) -> tuple[int | str | None, Tensor | None]:
    """Return the key of the loss in a model's output and the loss; (None, None) if there is none.

    The loss is the item or field called `loss`, a scalar returned by itself, the first item of a tuple if the model got labels, or,
    with `number_is_loss`, the only number with a gradient in a tuple.
    """
    if isinstance(output, Tensor):
        return None, output if output.dim() == 0 else None
    if isinstance(output, Mapping):
        return "loss", output.get("loss")
    if not isinstance(output, (tuple, list)):
        return "loss", getattr(output, "loss", None)
    if "loss" in getattr(output, "_fields", ()):
        return output._fields.index("loss"), output.loss  # type: ignore[union-attr]
    if labelled and isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return 0, output[0]
    numbers = [
        (index, value)
        for index, value in enumerate(output)
        if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad
    ]
    return numbers[0] if number_is_loss and len(numbers) == 1 else (None, None)
