"""What the method check says of starts: optima computed once more, calibrated starts, and comparisons that cannot be made."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.method_verdicts import verdict
from support.tiny_models import bert, gpt2, llama

import retrofit
from retrofit.passbase.method_reference import DenseModules
from retrofit.passes import multiplicative
from retrofit.passes.sequence_altup.arguments import EvenAnchors
from retrofit.passes.sparse_ffn import reference as sparse_ffn_reference
from retrofit.passes.sparse_ffn import unit_choice
from retrofit.passes.sparse_ffn.controller_fit import Contributions
from retrofit.passes.sparse_qkv import fitting

WINDOWS = torch.randint(3, 60, (32, 16), generator=torch.Generator().manual_seed(1))


# ── No false alarms ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_fitted_router_is_not_held_to_the_spread_of_one_that_is_not() -> None:
    model = llama(num_hidden_layers=4)
    found = verdict(model, "shared-moe(experts=2, groups=2)", calibration=WINDOWS)
    routers = [value for name, value in model.named_parameters() if name.endswith("router.weight")]
    assert any(float(one.std()) > 0.04 for one in routers)  # they were fitted
    assert found.status == "passed", found.why


def test_experts_that_are_named_are_held_to_what_they_are_taken_from() -> None:
    found = verdict(llama(num_hidden_layers=4), "shared-moe(experts=2, groups=1, sources=3+0)")
    assert found.status == "passed", found.why


@pytest.mark.parametrize("method", ["average-pooling", "stride-and-skip"])
def test_padding_on_both_sides_leaves_slots_that_no_anchor_fills(method: str) -> None:
    found = verdict(bert(), f"sequence-altup(k=3, layers=all, method={method})")
    assert found.status == "passed", found.why
    assert not found.why


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_relaxation_is_a_number_where_logits_are_extreme(k: int) -> None:
    logits = torch.tensor([[9e4, 3.0, -9e4, 1.0], [2e3, 1e3, 0.0, -1e3]], dtype=torch.float64)
    found = sparse_ffn_reference.relaxed(logits, k)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.sum(-1), torch.full((2,), float(k), dtype=torch.float64))
    torch.testing.assert_close(found, unit_choice.relaxed_indicator(logits, k))


@pytest.mark.long
def test_values_that_absorb_an_output_layer_are_not_held_to_the_dense_values() -> None:
    found = verdict(llama(), "sparse-qkv", calibration=WINDOWS)
    assert found.status == "passed", found.why
    assert "values may do the work of the output layer" in found.why


def test_what_an_earlier_rewrite_put_there_is_not_held_to_a_start() -> None:
    model = retrofit.apply(llama(), "shared-moe", verify=False)  # trains on, or is saved and loaded, before the second rewrite
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    found = verdict(model, "sum")
    assert found.status == "passed", found.why
    assert "3 modules" in found.measured


def test_the_new_columns_of_a_table_of_zeros_are_zeros() -> None:
    model = retrofit.apply(llama(), "sum", verify=False)
    found = verdict(model, "altup(k=2)")
    assert found.status == "passed", found.why


# ── Optima ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_one_fit_is_held_against_the_largest_singular_value() -> None:
    rows = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(torch.nn.functional.pad(rows, (0, 3)).view(3, 3, 5), full_matrices=False)
    d, e = u[:, :, 0] * s[:, :1].sqrt(), v[:, 0] * s[:, :1].sqrt()
    assert multiplicative.fit_problem(d, e, [0, 1, 2], rows) == ""
    assert "should be equally long" in multiplicative.fit_problem(2 * d, e / 2, [0, 1, 2], rows)
    second = torch.stack([e[0], v[1, 1] * s[1, 1].sqrt(), e[2]])
    assert "input feature 1" in multiplicative.fit_problem(d, second, [0, 1, 2], rows)


def test_the_contributions_of_standard_normal_inputs_are_integrated() -> None:
    """Gauss-Hermite quadrature against many draws, for a gated feed-forward: units of two directions."""
    model = llama()
    verdict(model, "sparse-ffn(sparsity=8)")
    block: Any = model.get_submodule("model.layers.0.mlp")
    with torch.no_grad():
        means, slopes = sparse_ffn_reference.standard_normal_moments(block)
        x = torch.randn(200_000, block.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        _, h = sparse_ffn_reference.hidden_units(block, x)
        c = h.abs() * block.down.weight.double().norm(dim=1)
    torch.testing.assert_close(c.mean(0), means, atol=0.03 * float(means.max()), rtol=0)
    torch.testing.assert_close(x.T @ c / len(x), slopes, atol=0.03 * float(slopes.abs().max()), rtol=0)


def signed(self: Contributions, *z: torch.Tensor) -> torch.Tensor:
    return self.hidden(*z) * self.lengths


def second_product(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    root = s[:, 1:2].sqrt()
    return u[:, :, 1] * root, v[:, 1] * root


STARTS = {
    "a rank-1 fit to the second singular value": (multiplicative, "nearest_product", second_product, "sparse-loss(modules=4)"),
    "a controller that predicts values, not contributions": (Contributions, "of_ports", signed, "sparse-ffn(sparsity=8)"),
    "least squares that never solve for E": (fitting, "best_e", lambda d, *_: torch.ones(len(d), 4), "sparse-qkv"),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_is_not_the_best_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, spec = STARTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    found = verdict(llama(), spec)
    assert (found.status == "failed" and "energy" in found.why) or "explains" in found.why, found.why


# ── What is not compared ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    forward = model.forward

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            raise ValueError("it needs two tokens")
        return forward(*args, **kwargs)

    refusing.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", refusing)
    found = verdict(model, "sequence-altup(k=2, layers=all)")
    assert found.status == "passed", found.why
    assert "no module was compared on one token (and 1 more like it): " in found.why
    assert "it needs two tokens" in found.why


def test_what_the_dense_model_does_and_the_rewritten_one_cannot_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    own = EvenAnchors.pick

    def pick(self: EvenAnchors, x: torch.Tensor) -> torch.Tensor:
        return x[:, [self.first, self.first + self.k]] if x.shape[1] == 1 else own(self, x)

    monkeypatch.setattr(EvenAnchors, "pick", pick)
    found = verdict(gpt2(), "sequence-altup(k=6, layers=all)")
    assert found.status == "failed"
    assert "it does not run on one token, and the dense model does: IndexError" in found.why


def test_a_start_without_a_dense_counterpart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.checks.method.dense_modules", lambda *_: DenseModules())
    found = verdict(llama(), "sparse-loss(modules=4)")
    assert found.status == "passed", found.why
    assert "lm_head was not compared with the dense module at its start" in found.why
