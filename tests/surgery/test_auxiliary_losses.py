"""Losses recorded inside a model: who collects them, and when they become part of the loss that the model returns."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.mixtures import D, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses, auxiliary_losses, batch_fraction, record_auxiliary_loss


@dataclasses.dataclass(frozen=True)
class Fields:
    y: Tensor
    loss: Tensor


class Named(NamedTuple):
    y: Tensor
    loss: Tensor


class Model(nn.Module):
    """Two calls of a mixture, and a loss in one of the forms in which models return it."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.moe, self.hidden = make(balance=0.1)
        self.returns = returns

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.moe(x + self.moe(x, self.hidden), self.hidden)
        loss = y.square().mean()
        answers = {"number": loss, "dict": {"loss": loss, "y": y}, "tuple": (loss, y), "none": y, "empty": {"loss": None, "y": y}}
        answers |= {"fields": Fields(y, loss), "named": Named(y, loss)}
        return answers[self.returns]


@pytest.mark.parametrize("returns", ["number", "dict", "tuple", "fields", "named"])
def test_the_loss_contains_the_recorded_losses_in_training(returns: str) -> None:
    def loss(output: Any) -> Tensor:
        if returns in ("fields", "named"):
            return output.loss
        return output if returns == "number" else output["loss"] if returns == "dict" else output[0]

    model, x = Model(returns), torch.randn(10, D)
    with auxiliary_losses() as losses:
        plain = loss(model(x, labels=x))
    assert len(losses) == 2
    model.forward = ForwardWithAuxiliaryLosses(model)
    with auxiliary_losses() as left_over:
        torch.testing.assert_close(loss(model(x, labels=x)), plain + sum(losses))
        with torch.no_grad():
            torch.testing.assert_close(loss(model(x, labels=x)), plain)
        torch.testing.assert_close(loss(model.eval()(x, labels=x)), plain)
    assert len(left_over) == 2, "without gradients nothing is added, and the losses are left to the code that collects them"


@pytest.mark.parametrize("returns", ["none", "empty"])
def test_a_model_without_a_loss_leaves_the_losses_to_the_code_that_collects_them(returns: str) -> None:
    model = Model(returns)
    model.forward = ForwardWithAuxiliaryLosses(model)
    with auxiliary_losses() as losses:
        model(torch.randn(10, D))
    assert len(losses) == 2
    assert all(loss.requires_grad for loss in losses)


class Penalized(nn.Module):
    """A linear map that records the mean square of its output, times 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return record_auxiliary_loss(y, 3 * y.square().mean(), self)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_recorded_loss_gets_its_gradient_once_however_activations_are_kept(reentrant: bool | None) -> None:
    """Against autograd on the sum, written out: three calls, of which two are in one checkpoint."""
    torch.manual_seed(0)
    module, x = Penalized(), torch.randn(5, 4, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return module(module(x).tanh())

    with auxiliary_losses() as losses:
        y = twice(module(x)) if reentrant is None else checkpoint(twice, module(x), use_reentrant=reentrant)
    (y.sum() + losses[0] + 10 * losses[1] + 100 * losses[2]).backward()
    assert len(losses) == 3 and x.grad is not None
    w, b = (one.detach().clone().requires_grad_() for one in (module.layer.weight, module.layer.bias))
    z = x.detach().clone().requires_grad_()
    first = z @ w.t() + b
    second = first @ w.t() + b
    third = second.tanh() @ w.t() + b
    total = third.sum() + 3 * (first.square().mean() + 10 * second.square().mean() + 100 * third.square().mean())
    total.backward()
    for ours, theirs in ((x, z), (module.layer.weight, w), (module.layer.bias, b)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_nothing_is_recorded_where_nobody_collects() -> None:
    module, x = Penalized(), torch.randn(5, 4)
    assert torch.equal(module(x), module.layer(x))
    with auxiliary_losses() as outer:
        with auxiliary_losses() as inner:
            module(x)
        module(x)
    assert (len(outer), len(inner)) == (1, 1)


def test_after_an_error_in_the_model_nothing_is_recorded() -> None:
    model = Model("number")
    model.forward = ForwardWithAuxiliaryLosses(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(10, D + 1))
    with auxiliary_losses() as losses:
        pass
    model.moe(torch.randn(3, D), model.hidden)
    assert losses == []


def test_a_call_of_an_accumulated_batch_counts_with_its_fraction_of_the_labels() -> None:
    causal = SimpleNamespace(loss_type="ForCausalLM", config=SimpleNamespace(is_encoder_decoder=False))
    masked = SimpleNamespace(loss_type="ForMaskedLM")
    labels = torch.tensor([[1, 2, 3, -100], [1, 2, -100, -100]])
    assert batch_fraction(causal, {"labels": labels}) == 1.0
    assert float(batch_fraction(causal, {"labels": labels, "num_items_in_batch": 12})) == pytest.approx(3 / 12)
    assert float(batch_fraction(masked, {"labels": labels, "num_items_in_batch": torch.tensor(10)})) == pytest.approx(5 / 10)
