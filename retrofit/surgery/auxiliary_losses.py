"""Losses that modules add to their model's own, on their way there."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from retrofit.surgery.keyword_injection import ForwardInPlace
from retrofit.surgery.wrappers import with_item


class Noted(threading.local):
    """Where mixtures note their balance losses: a list for as long as somebody collects them in this thread, else None."""

    losses: list[Tensor] | None = None
    trains: bool = False  # whether gradients were wanted where the collecting began
    due: list[tuple[nn.Module, Tensor]] | None = None  # in a backward pass: gradients of losses noted without one, the first last


NOTED = Noted()


def record_auxiliary_loss(gates: Tensor, loss: Tensor, mixture: nn.Module) -> Tensor:
    """`gates`; whoever collects the balance losses has `loss`.

    Reentrant checkpointing runs a layer without gradients, and once more in the backward pass. What is noted first then waits
    for its gradient, and the second time the gates hand that on to the loss.
    """
    if NOTED.due:
        gradient = taken(NOTED.due, mixture)
        return gates if gradient is None else HandOn.apply(gates, loss, gradient)  # type: ignore[no-any-return]
    if NOTED.losses is not None:
        later = NOTED.trains and not torch.is_grad_enabled()
        NOTED.losses.append(waiting(loss, mixture) if later else loss)
    return gates


def waiting(loss: Tensor, mixture: nn.Module) -> Tensor:
    """`loss`, whose gradient is kept for the call of `mixture` that makes it again."""
    with torch.enable_grad():
        return Await.apply(torch.empty(0, requires_grad=True), loss, mixture)  # type: ignore[no-any-return]


def taken(due: list[tuple[nn.Module, Tensor]], mixture: nn.Module) -> Tensor | None:
    """The gradient that is due to the next call of `mixture`, no longer due."""
    place = next((place for place in reversed(range(len(due))) if due[place][0] is mixture), None)
    return None if place is None else due.pop(place)[1]


class Await(torch.autograd.Function):
    """A loss computed without gradients; its own comes before that of the checkpoint around it, which began earlier."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, mixture: nn.Module) -> Tensor:
        ctx.mixture = mixture
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        if NOTED.due is None:
            NOTED.due = []
            torch.autograd.Variable._execution_engine.queue_callback(forget)
        NOTED.due.append((ctx.mixture, gradient))
        return None, None, None


def forget() -> None:
    """At the end of a backward pass nothing is due any more."""
    NOTED.due = None


class HandOn(torch.autograd.Function):
    """The gates as they are; in the backward pass `loss` gets `gradient` with theirs."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, of_gates: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return of_gates, gradient, None


@contextlib.contextmanager
def auxiliary_losses() -> Iterator[list[Tensor]]:
    """The balance losses, times λ, of the mixtures that train within this context and whose model has not added them to its loss.

    with balance_losses() as losses:
        logits = model(ids)
    loss = task_loss(logits) + sum(losses)
    """
    before, found = (NOTED.losses, NOTED.trains), []  # type: ignore[var-annotated]
    NOTED.losses, NOTED.trains = found, torch.is_grad_enabled()
    try:
        yield found
    finally:
        NOTED.losses, NOTED.trains = before


class ForwardWithAuxiliaryLosses(ForwardInPlace):
    """In place of a model's `forward`: in training, the loss it returns contains the balance losses of the call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inner = vars(module).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner) if self.inner is not None else super().__signature__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.run(*args, **kwargs)
        before, trains, found = NOTED.losses, NOTED.trains, []  # type: ignore[var-annotated]
        NOTED.losses, NOTED.trains = found, True
        try:
            output = self.run(*args, **kwargs)
        finally:
            NOTED.losses, NOTED.trains = before, trains
        key, loss = loss_of(output, labelled=kwargs.get("labels") is not None)
        if loss is not None:
            part = part_of_batch(self.module, kwargs)
            return with_item(output, key, loss + sum(part * one.to(loss) for one in found))
        if before is not None:
            before.extend(found)
        return output

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs) if self.inner is None else self.inner(*args, **kwargs)


def part_of_batch(module: nn.Module, given: Mapping[str, Any]) -> Tensor | float:
    """What part of the batch that a loss is the mean over a call has: less than 1 where a trainer accumulates gradients.

    transformers' Trainer then hands over `num_items_in_batch`, the labels of all the calls; it does not count the first of a
    sequence where the model's loss shifts them.
    """
    total, labels = given.get("num_items_in_batch"), given.get("shift_labels", given.get("labels"))
    if total is None or labels is None:
        return 1.0
    shifts = LOSS_MAPPING.get(getattr(module, "loss_type", "")) is ForCausalLMLoss
    decodes = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    counted = labels[..., 1:] if shifts and not decodes and "shift_labels" not in given else labels
    return counted.ne(-100).sum() / total  # type: ignore[no-any-return]


def loss_of(output: Any, *, labelled: bool) -> tuple[int | str | None, Tensor | None]:
    """The loss that a model returns and its key in the output, None for both where there is none.

    It is what the model calls so, a number returned by itself, or the first of a tuple of a model that was given labels.
    """
    if isinstance(output, Tensor):
        return None, output if output.dim() == 0 else None
    if isinstance(output, Mapping):
        return "loss", output.get("loss")
    if labelled and isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return 0, output[0]
    return None, None
