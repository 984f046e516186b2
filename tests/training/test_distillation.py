"""The divergence from a teacher is that of the formula, in value and gradient, however the tokens are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.training import distillation
from retrofit.training.distillation import divergence_from_teacher, sum_over_chunks


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 9), st.floats(0.5, 4.0), st.integers(0, 999))
def test_value_and_gradient_are_those_of_torch(batch: int, length: int, vocabulary: int, temperature: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(batch, length, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))
    expected_of = student.clone().requires_grad_()
    expected = (
        temperature**2
        * F.kl_div((expected_of / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="none")
        .sum(-1)
        .mean()
    )
    expected.backward()
    found_of = student.float().requires_grad_()
    found = divergence_from_teacher(
        found_of, {"row": torch.arange(batch)}, lambda window: teacher[window["row"]].float(), temperature
    )
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(found_of.grad, expected_of.grad.float(), rtol=1e-3, atol=1e-5)  # type: ignore[union-attr]


def test_tokens_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = torch.randn(2, 7, 5), torch.randn(2, 7, 5)

    def gradient() -> Tensor:
        leaf = student.clone().requires_grad_()
        (given,) = torch.autograd.grad(
            divergence_from_teacher(leaf, {"row": torch.arange(2)}, lambda one: teacher[one["row"]]), leaf
        )
        return given

    whole = gradient()
    sizes: list[int] = []
    original = Tensor.log_softmax

    def recorded(value: Tensor, *rest: Any) -> Tensor:
        sizes.append(value.numel())
        return original(value, *rest)

    monkeypatch.setattr(distillation, "CHUNK", 10)
    monkeypatch.setattr(Tensor, "log_softmax", recorded)
    torch.testing.assert_close(gradient(), whole)
    assert max(sizes) <= 10


def test_gradients_of_half_precision_parameters_are_summed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many terms of one sign, of which each is less than what bfloat16 can add to the sum."""
    monkeypatch.setattr(distillation, "CHUNK", 3)
    weight = nn.Parameter(torch.ones(3, 8, dtype=torch.bfloat16))
    x = torch.rand(2000, 8, dtype=torch.bfloat16)
    sum_over_chunks(lambda some, rows: (some @ weight.t()).float().sum(), x, 3, (weight,)).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad.double(), x.double().sum(0).expand(3, 8), rtol=1e-2, atol=0.0)
