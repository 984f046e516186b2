"""The multiplicative head fitted to data: against general solvers, planted factors, and the predictions of the dense head."""

from __future__ import annotations

import pytest
import torch
from support import zoo
from torch import Tensor

from retrofit.numerics.distances import token_weights
from retrofit.passes import SparseLoss
from retrofit.passes.multiplicative import Multiplicative, product
from retrofit.passes.sparse_loss import DenseHead, fit_to_data, lower_squared_error
from retrofit.rewriting import apply_reported

WIDTH, MODULES, SIZE = 8, 3, 5


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def start(weight: Tensor) -> Multiplicative:
    """The layer as it is without data."""
    layer = Multiplicative(WIDTH, MODULES, SIZE)
    layer.fit(weight)
    return layer


def within_subspace(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A multiplicative matrix, the same matrix with more where no input lies, and inputs."""
    planted = product(drawn(WIDTH, MODULES, seed=seed), drawn(WIDTH, SIZE, seed=seed + 1))
    basis = torch.linalg.qr(drawn(WIDTH, WIDTH, seed=seed + 2)).Q
    x = drawn(tokens, 5, seed=seed + 3) @ basis[:, :5].t()
    return planted, planted + 3 * basis[:, 5:] @ drawn(3, MODULES * SIZE, seed=seed + 4), x


def test_what_the_inputs_do_not_show_is_not_fitted() -> None:
    """The weights are far from multiplicative, the logits of the inputs are not: the data finds what the weights hide."""
    _, weight, x = within_subspace(300, 0)
    layer = start(weight)
    before = (x @ layer.matrix() - x @ weight).norm() / (x @ weight).norm()
    centred = weight - weight.mean(1, keepdim=True)
    factors = lower_squared_error((layer.d.detach(), layer.e.detach()), weight, x)
    after = (x @ product(*factors) - x @ centred).norm() / (x @ centred).norm()
    assert before > 0.5 and after < 0.5 * before
    before, after = fit_to_data(layer, DenseHead(weight, None), x, x[:50])  # type: ignore[assignment]
    assert after < 0.2 * before


def test_each_half_of_the_alternation_is_a_least_squares_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one sweep E is what `lstsq` finds for D on the weighted logits, written out as one linear map."""
    monkeypatch.setattr("retrofit.passes.sparse_loss.SWEEPS", 1)
    monkeypatch.setattr("retrofit.passes.sparse_loss.RIDGE", 1e-7)
    weight, x = drawn(WIDTH, MODULES * SIZE, seed=1), drawn(60, WIDTH, seed=2)
    d, e = lower_squared_error((drawn(WIDTH, MODULES, seed=3), drawn(WIDTH, SIZE, seed=4)), weight, x)
    root = token_weights(x).sqrt().unsqueeze(1)
    wanted = root * (x @ (weight - weight.mean(1, keepdim=True)))
    columns = []
    for i in range(WIDTH):
        for m in range(SIZE):
            unit = torch.zeros(WIDTH, SIZE)
            unit[i, m] = 1
            columns.append((root * (x @ product(d, unit))).flatten())
    expected = torch.linalg.lstsq(torch.stack(columns, 1), wanted.flatten().unsqueeze(1)).solution.view(WIDTH, SIZE)
    torch.testing.assert_close(e, expected, rtol=1e-2, atol=1e-2)


def test_the_divergence_is_that_of_a_plain_loop() -> None:
    head = DenseHead(drawn(WIDTH, 14, seed=0), drawn(14, seed=1))
    factors, x = (drawn(WIDTH, MODULES, seed=2), drawn(WIDTH, SIZE, seed=3)), drawn(6, WIDTH, seed=4)
    x[2] *= 100
    found, weights = 0.0, token_weights(x)
    for t in range(6):
        p = (x[t] @ head.weight + head.bias).softmax(-1)
        q = (x[t] @ product(*factors)[:, :14] + head.bias).softmax(-1).clamp_min(1e-38)
        found += float(weights[t] * sum(float(a) * (float(a.log()) - float(b.log())) for a, b in zip(p, q, strict=True) if a > 0))
    assert head.mean_divergence(x, factors) == pytest.approx(found / float(weights.sum()), rel=0.05)


def test_a_huge_token_does_not_decide() -> None:
    _, weight, x = within_subspace(300, 5)
    x[7] = 1000 * drawn(WIDTH, seed=9)  # it alone shows the directions in which the weights are far from the planted ones
    layer = start(weight)
    fit_to_data(layer, DenseHead(weight, None), x, x[:50])
    others = torch.cat([x[:7], x[8:]])
    alone = start(weight)
    fit_to_data(alone, DenseHead(weight, None), others, others[:50])
    head = DenseHead(weight, None)
    with_it, without = (head.mean_divergence(others, (one.d.detach(), one.e.detach())) for one in (layer, alone))
    assert with_it < 3 * without + 0.05


def test_what_is_worse_on_tokens_held_out_is_not_taken() -> None:
    """The inputs to fit on show directions that no input held out has."""
    weight = product(drawn(WIDTH, MODULES, seed=0), drawn(WIDTH, SIZE, seed=1))
    x, held_out = drawn(20, WIDTH, seed=2), drawn(20, WIDTH, seed=3)
    layer = start(weight)  # exact already
    begin = layer.d.detach().clone(), layer.e.detach().clone()
    before, after = fit_to_data(layer, DenseHead(weight, None), x, held_out)
    assert after <= before < 1e-4
    assert before > after or all(torch.equal(one, other) for one, other in zip(begin, (layer.d, layer.e), strict=True))


def test_a_model_is_nearer_where_it_was_calibrated_and_the_same_every_time() -> None:
    entry = zoo.entry("causal/llama")
    heads = []
    for _ in range(2):
        model = zoo.build(entry)
        ids = zoo.inputs(entry, model, batch=16, length=16)["input_ids"]
        one = apply_reported(model, SparseLoss(modules=4), calibration=ids, verify=False, count_flops=False).rewrites[0]
        heads.append(model.get_submodule("lm_head").product.d.detach())
        before, after = (float(part) for part in one.notes[-1].split(": ")[1].split(" → "))
        assert after < before
    assert torch.equal(*heads)
