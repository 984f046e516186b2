"""The start of a mixture on calibration data: planted layers are told apart, the experts are chosen by what they compute."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import zoo
from torch import Tensor

from retrofit.errors import DoesNotFitError, RetrofitError, SpecError
from retrofit.numerics.distances import token_weights, weighted_error
from retrofit.passes import SharedMoE
from retrofit.passes.shared_moe.mixture_fit import Products, choose_sources, combination_errors, fit_mixture, fit_router, gates_of
from retrofit.passes.shared_moe.mixture_of_experts import MoEBlock
from retrofit.rewriting import apply_reported

WIDTH, TOKENS = 6, 40


def planted(outputs: Tensor, seed: int = 0, huge: float = 1.0) -> tuple[Products, list[Tensor], list[Tensor]]:
    """The products of layers whose feed-forward j multiplies by `outputs[j]`, and whose inputs lie around a point of their own.

    Returned with the inputs of each layer, and what each feed-forward computes for them, (tokens, n, d). One token is `huge`.
    """
    generator = torch.Generator().manual_seed(seed)
    n = len(outputs)
    centres = 4 * torch.randn(n, WIDTH, generator=generator)
    inputs = [centre + torch.randn(TOKENS, WIDTH, generator=generator) for centre in centres]
    inputs[0][3] *= huge
    computed = [torch.stack([x @ one for one in outputs], 1) for x in inputs]
    grams = []
    for layer, y in enumerate(computed):
        weights = token_weights(y[:, layer])
        grams.append(y @ y.mT * (weights / (y[:, layer].square().sum(-1) @ weights)).view(-1, 1, 1))
    layer = torch.arange(n).repeat_interleave(TOKENS)
    return Products(torch.cat(inputs), layer, torch.cat(grams)), inputs, computed


def drawn(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_the_error_is_that_of_the_weighted_outputs() -> None:
    """Against the outputs of the mixture themselves, token by token."""
    products, _, computed = planted(drawn(3), huge=100.0)
    sources = torch.tensor([2, 0])
    gates = torch.rand(len(products.x), 2, generator=torch.Generator().manual_seed(2))
    found = products.errors(sources, gates).sqrt()
    for layer, y in enumerate(computed):
        mixed = torch.einsum("te,ted->td", gates[products.layer == layer], y[:, sources])
        assert float(found[layer]) == pytest.approx(float(weighted_error(mixed, y[:, layer])), rel=1e-4)


def test_the_best_combination_is_that_of_a_fine_grid() -> None:
    products, _, computed = planted(drawn(3))
    found = combination_errors(products, 2)
    for layer, (i, j) in itertools.product(range(3), itertools.product(range(3), range(3))):
        y = computed[layer]
        grid = [float(weighted_error(a * y[:, i] + (1 - a) * y[:, j], y[:, layer])) ** 2 for a in torch.linspace(0, 1, 201)]
        assert float(found[layer, i, j]) == pytest.approx(min(grid), rel=1e-3, abs=1e-4)
    alone = combination_errors(products, 1)
    for layer, i in itertools.product(range(3), range(3)):
        expected = float(weighted_error(computed[layer][:, i], computed[layer][:, layer])) ** 2
        assert float(alone[layer, i, i]) == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("k", [1, 2])
def test_the_chosen_experts_are_the_best_of_all_choices(k: int) -> None:
    products, _, _ = planted(drawn(5))
    errors = combination_errors(products, k)

    def total(chosen: tuple[int, ...]) -> float:
        return sum(min(float(errors[layer, i, j]) for i in chosen for j in chosen) for layer in range(5))

    best = min(itertools.combinations(range(5), 2), key=total)
    assert total(tuple(choose_sources(products, 2, k))) == pytest.approx(total(best), rel=1e-5)


def test_layers_that_compute_the_same_need_one_expert() -> None:
    """Spread evenly over the depth, both experts would be the first kind's or the error would be large."""
    kinds = drawn(2)
    products, _, _ = planted(kinds[[0, 0, 0, 1]])
    chosen = choose_sources(products, 2, 1)
    assert 3 in chosen
    start = fit_mixture(products, planted(kinds[[0, 0, 0, 1]], seed=0)[0], (0, 2), 0.02 * torch.ones(2, WIDTH), 1, True)
    assert 3 in start.sources
    assert max(start.after) < 0.2 < max(start.before)


def test_as_many_experts_as_layers_recover_every_layer() -> None:
    """Inputs of different layers lie apart: a router that was drawn mixes the experts, a fitted one sends each layer to its own."""
    products, _, _ = planted(drawn(3), huge=1000.0)
    router = 0.02 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3))
    start = fit_mixture(products, products, (0, 1, 2), router, 2, True)
    assert min(start.before) > 0.4
    assert max(start.after) < 0.1
    again = fit_mixture(products, products, (0, 1, 2), router, 2, True)
    assert torch.equal(start.router, again.router)


def test_a_start_that_is_worse_for_some_layer_is_not_taken() -> None:
    """The held-out tokens are routed the other way round: what was learnt is wrong for them."""
    products, _, _ = planted(drawn(2))
    centred = products.x - products.x.mean(0)
    products = Products(centred, products.layer, products.gram)
    mirrored = Products(-centred, products.layer, products.gram)
    router = torch.zeros(2, WIDTH)
    start = fit_mixture(products, mirrored, (0, 1), router, 2, True)
    assert start.before == start.after and torch.equal(start.router, router)


@pytest.mark.first(1)
@pytest.mark.parametrize(("k", "renormalize"), [(1, False), (2, True)])
def test_gates_are_those_of_the_mixture(k: int, renormalize: bool) -> None:
    """Against `MixtureOfExperts.route` of a rewritten model."""
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry)
    apply_reported(model, SharedMoE(groups=1, experts=3, k=k, renormalize=renormalize), verify=False, count_flops=False)
    block = next(module for module in model.modules() if isinstance(module, MoEBlock))
    x = torch.randn(5, block.width, generator=torch.Generator().manual_seed(0))
    gates, selected = block.moe.eval().route(x)
    whole = torch.zeros(5, 3).scatter(1, selected, gates)
    torch.testing.assert_close(gates_of(block.moe.router(x), k, renormalize), whole)


def test_the_router_learns_nothing_from_a_token_of_huge_outputs_alone() -> None:
    """With it and without it, the other tokens are routed alike."""
    routers = []
    for huge in (1.0, 1000.0):
        products, _, _ = planted(drawn(2), huge=huge)
        products.x[3] = products.x[4]  # its input is an ordinary one: only what is computed there is huge
        sources = torch.tensor([0, 1])
        routers.append(fit_router(products, sources, torch.zeros(2, WIDTH), 1, False, torch.ones(2)))
    x, layer = products.x, products.layer
    assert all(bool(((x @ router.t()).argmax(-1) == layer).float().mean() > 0.95) for router in routers)


def test_the_recipe_keeps_the_layers_that_were_chosen() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry)
    ids = zoo.inputs(entry, model, batch=16, length=24)["input_ids"]
    one = apply_reported(model, SharedMoE(groups=2, experts=2, k=1), calibration=ids, verify=False, count_flops=False).rewrites[0]
    assert "sources=" in one.spec and "sources=spread" not in one.spec
    fitted = [note.values for note in one.notes if note.kind == "relative error on tokens held out"]
    assert len(fitted) == len(model.model.layers)
    assert all(values["after"] <= values["before"] for values in fitted)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sources": "0+1"}, SpecError),
        ({"sources": "a"}, SpecError),
        ({"sources": "0+1/0+1", "experts": 2}, DoesNotFitError),
        ({"sources": "0+9", "experts": 2}, DoesNotFitError),
    ],
)
def test_sources_that_are_not_there_are_refused(options: dict[str, object], error: type[RetrofitError]) -> None:
    with pytest.raises(error) as refused:
        apply_reported(zoo.build(zoo.entry("causal/llama")), SharedMoE(**options), verify=False, count_flops=False)
    assert refused.value.option == "sources"
