"""The fitted output matrix: the best one by another solver, never worse than the dense one, and announced where it is not that."""

from __future__ import annotations

import copy
import functools
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feed_forward_models import IDS, Gated, Model, Plain
from support.refusals import refused
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.errors import VerificationError
from retrofit.passes import SparseFFN
from retrofit.passes.sparse_ffn import output_fit, sparse_ffn
from retrofit.passes.sparse_ffn.output_fit import STRENGTHS, Errors, Output, fit_output, solutions
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.rewriting import apply_reported

D, D_FF, N = 16, 48, 8
WINDOWS = torch.randint(31, (96, 16), generator=torch.Generator().manual_seed(0))
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two of eight": {"active": 2},
    "gate": {"active": 2, "controller": "gate"},
    "scaled": {"active": 3, "multiply_by_controller": True, "scale": True},
}


@functools.cache
def unfitted(way: str) -> SparseFeedForward:
    """A sparse feed-forward with the dense output matrix."""
    torch.manual_seed(0)
    model = Model(D, (Plain if way == "plain" else Gated)(D, D_FF, "silu", True)).eval()
    one = SparseFFN(sparsity=N, fit_output=False, **WAYS[way])
    retrofit.apply(model, one, example_inputs={"ids": IDS}, calibration=WINDOWS, verify=False)
    return next(block for block in model.modules() if isinstance(block, SparseFeedForward))


def inputs(tokens: int, seed: int = 1, massive: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator)
    return x * torch.where(torch.rand(tokens, 1, generator=generator) < massive, 50.0, 1.0)


@torch.no_grad()
def errors_of(block: SparseFeedForward, dense: SparseFeedForward, x: torch.Tensor) -> Errors:
    """Those of what the block returns, token by token; the dense one with all its units active."""
    whole = copy.deepcopy(dense)
    whole.active, whole.factor = N, 1.0
    y, found = whole(x), block(x)
    lengths = [float(one.square().sum()) for one in y]
    middle = sorted(lengths)[(len(lengths) - 1) // 2]
    missed = [float(one.square().sum()) for one in found - y]
    weights = [min(1.0, middle / one) for one in lengths]
    parts = [sum(w * one for w, one in zip(weights, some, strict=True)) for some in (missed, lengths)]
    return Errors((parts[0] / parts[1]) ** 0.5, (sum(missed) / sum(lengths)) ** 0.5)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_each_solution_is_that_of_least_squares_with_rows_that_pull_to_the_dense_matrix(way: str) -> None:
    block, x = copy.deepcopy(unfitted(way)).eval(), inputs(700, massive=0.02)
    dense = Output.of(block)
    seen: list[torch.Tensor] = []
    block.down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    block.prefers_gather = lambda x: False  # type: ignore[method-assign]
    block(x)
    whole = copy.deepcopy(block)
    whole.active, whole.factor = N, 1.0
    y = whole(x).double()
    a = torch.cat([seen[0], torch.ones(len(x), 1)], 1).double()
    lengths = y.square().sum(1)
    weight = (lengths.median() / lengths).clamp(max=1).sqrt().unsqueeze(1)
    start = torch.cat([dense.weight, dense.bias.unsqueeze(0)]).double()  # type: ignore[union-attr]
    size = (weight * a)[:, :-1].square().sum(0).mean()
    for strength, found in zip(STRENGTHS, solutions(block, dense, x), strict=True):
        pull = (strength * size) ** 0.5 * torch.eye(D_FF + 1).double()
        best = torch.linalg.lstsq(torch.cat([weight * a, pull]), torch.cat([weight * y, pull @ start])).solution
        assert found.bias is not None
        torch.testing.assert_close(torch.cat([found.weight, found.bias.unsqueeze(0)]).double(), best, atol=2e-4, rtol=2e-3)


@torch.no_grad()
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 99), st.sampled_from(sorted(WAYS)), st.integers(20, 300), st.booleans())
def test_it_is_never_worse_than_the_dense_matrix_on_tokens_held_out(seed: int, way: str, tokens: int, massive: bool) -> None:
    dense = unfitted(way)
    block, held_out = copy.deepcopy(dense), inputs(50, seed + 1000, 0.1 * massive)
    before, after = fit_output(block, inputs(tokens, seed, 0.1 * massive), held_out)
    block.eval()
    for said, model in ((before, dense.eval()), (after, block)):
        measured = errors_of(model, dense, held_out)
        assert said.of_tokens == pytest.approx(measured.of_tokens, rel=1e-3, abs=1e-5)
        assert said.of_all == pytest.approx(measured.of_all, rel=1e-3, abs=1e-5)
    assert after.of_tokens <= before.of_tokens and after.of_all <= before.of_all
    changed = not torch.equal(block.down.weight, dense.down.weight)
    assert bool(block.fitted) == changed == (after != before)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_with_enough_tokens_it_is_better(way: str) -> None:
    block = copy.deepcopy(unfitted(way))
    before, after = fit_output(block, inputs(3000), inputs(300, 2))
    assert bool(block.fitted) and after.of_tokens < 0.97 * before.of_tokens


@torch.no_grad()
def test_massive_tokens_do_not_decide() -> None:
    """One that points elsewhere, thousands of times as long: the others are fitted no worse than without it."""
    x, held_out = inputs(2000), inputs(300, 2)
    massive = x.clone()
    massive[::500] = 1000 * torch.ones(D)
    errors = [fit_output(copy.deepcopy(unfitted("plain")), one, held_out)[1].of_tokens for one in (x, massive)]
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize("how", [{"fit_output": False}, {"active": N}, {"calibration": None}])
def test_without_data_and_where_it_is_not_wanted_the_matrix_is_the_dense_one(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model(D, Plain(D, D_FF, "relu", True)).eval()
    old = model.layers[0].f.b.weight.detach().clone()
    given = {"calibration": WINDOWS} | how
    calibration = given.pop("calibration")
    retrofit.apply(model, SparseFFN(sparsity=N, **given), example_inputs={"ids": IDS}, calibration=calibration, verify=False)
    block = model.layers[0].f
    assert not block.fitted and torch.equal(block.down.weight, old.t()[block.order])


def test_it_is_announced_and_the_dense_model_keeps_its_own() -> None:
    torch.manual_seed(0)
    model = Model(D, Gated(D, D_FF, "relu", True)).eval()
    old = [model.layers[0].f.b.weight, model.layers[0].f.b.bias]
    before = [one.detach().clone() for one in old]
    one = SparseFFN(sparsity=N, active=2, controller="gate")
    applied = apply_reported(model, one, example_inputs={"ids": IDS}, calibration=WINDOWS, count_flops=False)
    assert applied.report is not None and "2 fitted" in applied.report["parameters"].measured
    assert all(torch.equal(now, then) for now, then in zip(old, before, strict=True))
    (note,) = [one for one in applied.rewrites[0].notes if getattr(one, "kind", "") == sparse_ffn.OUTPUT]
    fitted, dense = note.values.values()
    assert fitted < dense


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", ["reversed", "not fitted", "negative"])
def test_the_check_method_reports_a_matrix_that_was_not_fitted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(block: SparseFeedForward, x: torch.Tensor, held_out: torch.Tensor) -> tuple[Errors, Errors]:
        dense = Output.of(block)
        found = output_fit.fit_output(block, x, held_out)
        weight = block.down.weight
        wrong = {"reversed": weight.flip(0), "not fitted": dense.weight, "negative": 2 * dense.weight - weight}[fault]
        weight.copy_(wrong.clone())
        if fault == "not fitted":
            dense.put(block)
        return found

    monkeypatch.setattr(sparse_ffn, "fit_output", faulty)
    torch.manual_seed(0)
    model = Model(D, Plain(D, D_FF, "relu", True)).eval()
    with refused(VerificationError, "method") as error:
        retrofit.apply(model, SparseFFN(sparsity=N), example_inputs={"ids": IDS}, calibration=WINDOWS)
    assert "output matrix" in error.value.report["method"].why


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("text", [20_000, 2_500], ids=["long", "short"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", [{"active": 4}, {"active": 2}, {"active": 2, "controller": "gate"}], ids=str)
def test_the_check_method_leaves_matrices_alone_that_were_fitted_to_text(way: dict[str, Any], seed: int, text: int) -> None:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    words = " ".join(topics[name] for name in sorted(topics))[:text]
    spec = SparseFFN(sparsity=8, **way)
    applied = apply_reported(model, spec, calibration=[words], checks=("method",), count_flops=False)
    assert applied.report is not None and applied.report["method"].status == "passed"
