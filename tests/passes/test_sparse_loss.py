"""The multiplicative layer against loops written from its formula; sparse-loss on heads of every kind."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import zoo
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passbase.method_reference import DenseModules
from retrofit.passes import AltUp, SparseLoss, sparse_loss
from retrofit.passes.multiplicative import Multiplicative, nearest_product
from retrofit.passes.sparse_loss import MultiplicativeHead
from retrofit.rewriting import apply_reported

sizes = st.integers(1, 9)


def formula(x: torch.Tensor, d: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """y[s,m] = Σ_i x_i D[i,s] E[i,m] for one token."""
    y = torch.zeros(d.shape[1], e.shape[1], dtype=x.dtype)
    for s, m, i in itertools.product(range(d.shape[1]), range(e.shape[1]), range(len(x))):
        y[s, m] += x[i] * d[i, s] * e[i, m]
    return y


@given(width=sizes, modules=sizes, size=sizes, batch=st.integers(1, 3), length=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_the_layer_is_its_formula_whichever_way_it_is_computed(
    width: int, modules: int, size: int, batch: int, length: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = Multiplicative(width, modules, size, dtype=torch.float64)
    x = torch.randn(batch, length, width, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (batch, length, modules, size)
    torch.testing.assert_close(y[-1, -1], formula(x[-1, -1], layer.d, layer.e))
    torch.testing.assert_close(layer(x[:1, :1]), y[:1, :1])  # few tokens are computed the other way


@given(modules=st.integers(1, 5), size=st.integers(1, 5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_any_permutation_can_be_represented(modules: int, size: int, seed: int) -> None:
    """Theorem 1 of the paper: D and E of zeros and ones, where feature i goes to output f(i)."""
    width = modules * size
    places = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    layer = Multiplicative(width, modules, size)
    with torch.no_grad():
        layer.d.copy_(nn.functional.one_hot(places // size, modules))
        layer.e.copy_(nn.functional.one_hot(places % size, size))
    x = torch.randn(2, width)
    assert torch.equal(layer(x).flatten(-2)[:, places], x)


@given(count=st.integers(1, 4), modules=st.integers(1, 5), size=st.integers(1, 5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_the_fit_is_the_best_rank_one_matrix(count: int, modules: int, size: int, seed: int) -> None:
    matrices = torch.randn(count, modules, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, v = nearest_product(matrices)
    error = (matrices - u.unsqueeze(-1) * v.unsqueeze(-2)).pow(2).sum((-1, -2))
    best = torch.linalg.svdvals(matrices)[:, 1:].pow(2).sum(-1)  # Eckart and Young
    total = matrices.pow(2).sum((-1, -2))
    assert torch.all(error <= best + 1e-9 * total)
    assert torch.all(error >= best - 1e-9 * total)


@pytest.mark.parametrize("bias", [True, False])
def test_the_weight_of_a_head_is_the_dense_matrix_of_its_product(bias: bool) -> None:
    head = MultiplicativeHead(6, 11, 3, nn.Parameter(torch.randn(11)) if bias else None, torch.empty(0))
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(head(x), nn.functional.linear(x, head.weight, head.bias), atol=1e-5, rtol=1e-5)
    assert "weight" not in dict(head.named_parameters())


def test_a_matrix_of_zeros_gives_zeros() -> None:
    layer = Multiplicative(4, 2, 3)
    layer.fit(torch.zeros(4, 6))
    assert torch.equal(layer(torch.randn(5, 4)), torch.zeros(5, 2, 3))


@pytest.mark.parametrize("vocabulary", [12, 13, 15])
def test_logits_beyond_the_vocabulary_are_cut_off(vocabulary: int) -> None:
    head = MultiplicativeHead(6, vocabulary, 4, None, torch.empty(0))
    assert head(torch.randn(2, 3, 6)).shape == (2, 3, vocabulary)


def test_a_matrix_that_is_multiplicative_is_fitted_exactly() -> None:
    teacher = Multiplicative(8, 3, 4)
    head = MultiplicativeHead(8, 12, 3, None, torch.empty(0))
    head.fit(teacher.matrix().detach().t())
    x = torch.randn(5, 8)
    torch.testing.assert_close(head(x), teacher(x).flatten(-2), atol=1e-4, rtol=1e-4)


# Untied and tied heads, with a bias, with a soft cap, of an encoder-decoder model.
@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name",
    [
        "causal/llama",
        "causal/gpt2",
        "causal/phi",
        "causal/gemma2",
        "masked/bert",
        pytest.param("seq2seq/t5", marks=pytest.mark.long),
        "seq2seq/bart",
    ],
)
def test_models_come_through_every_check(name: str) -> None:
    entry = zoo.entry(name)
    model = zoo.build(entry)
    applied = apply_reported(model, SparseLoss(modules=8), example_inputs=zoo.inputs(entry, model))
    assert applied.report is not None and applied.report.ok
    assert not applied.rewrites[0].exact
    head = next(module for module in model.modules() if isinstance(module, MultiplicativeHead))
    assert applied.rewrites[0].new_parameters == head.product.d.numel() + head.product.e.numel()


def test_the_embedding_of_a_tied_head_stays() -> None:
    entry = zoo.entry("causal/gpt2")
    model = zoo.build(entry)
    table = model.get_input_embeddings().weight
    before = table.detach().clone()
    retrofit.apply(model, "sparse-loss(modules=4)", verify=False)
    assert model.get_input_embeddings().weight is table and torch.equal(table, before)
    assert not any(parameter is table for parameter in model.lm_head.parameters())


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "init"),
    [
        ("causal/llama", "hop"),
        ("causal/gpt2", "lockstep"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("causal/llama", "lockstep"), ("causal/gpt2", "hop"))),
    ],
)
def test_a_head_that_altup_widened_keeps_the_weights_of_its_blocks(name: str, init: str) -> None:
    """At the exact start the fit sees the dense head, so both orders give one model's logits."""
    entry = zoo.entry(name)
    model = zoo.build(entry)
    given = zoo.inputs(entry, model)
    plain = copy.deepcopy(model)
    retrofit.apply(plain, SparseLoss(modules=8), verify=False)
    retrofit.apply(model, AltUp(k=2, init=init), SparseLoss(modules=8))
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, plain(**given).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_altup_with_a_wide_table_after_it_is_refused_with_the_remedy() -> None:
    model = zoo.build(zoo.entry("causal/llama"))
    with pytest.raises(DoesNotFitError, match="embedding=recycled"):
        retrofit.apply(model, "sparse-loss(modules=8)", "altup(k=2)", verify=False)
    retrofit.apply(model, "sparse-loss(modules=8)", "altup(k=2, embedding=recycled)")


def test_a_head_that_is_sparse_already_is_refused_and_left_alone() -> None:
    model = zoo.build(zoo.entry("causal/llama"))
    retrofit.apply(model, SparseLoss(modules=8), verify=False)
    before, state = retrofit.recipe(model), {name: value.clone() for name, value in model.state_dict().items()}
    with refused(DoesNotFitError, "lm_head", code="rewritten") as error:
        retrofit.apply(model, SparseLoss(modules=8), verify=False)
    assert "once" in error.value.remedy
    assert retrofit.recipe(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_head_whose_weight_is_computed_is_refused() -> None:
    model = zoo.build(zoo.entry("causal/llama"))
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with refused(DoesNotFitError, "lm_head", code="computed", site="lm_head"):
        retrofit.apply(model, SparseLoss(modules=8), verify=False)


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SpecError) as out_of_range:
        SparseLoss(modules=0)
    assert out_of_range.value.option == "modules"
    model = zoo.build(zoo.entry("causal/llama"), intermediate_size=256)  # so that other matrices are larger than the vocabulary
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.apply(model, SparseLoss(modules=200))
    assert "some modules would have no output" in refused.value.why


@pytest.mark.parametrize("fitted", [True, False])
def test_a_head_fitted_to_data_of_few_dimensions_is_held_to_these(fitted: bool) -> None:
    """Along inputs that no data have, a fit may be of any length: that is no reason to say that it was not made."""
    torch.manual_seed(0)
    head = MultiplicativeHead(8, 12, 3, None, torch.empty(0))
    weight = torch.randn(8, 12)
    with torch.no_grad():
        head.product.d.normal_(std=10.0)
        head.product.e.normal_()
        if fitted:
            head.product.d[0], head.product.e[0] = 1.0, torch.tensor([1.0, -2.0, 3.0, 0.5])
            weight[0] = head.product.e[0].repeat(3)
    random, data = torch.randn(16, 8), torch.zeros(16, 8)
    data[:, 0] = torch.randn(16)
    sites = [SimpleNamespace(path="head", dense_path="head", module=head)]
    dense = DenseModules(probes={"head": (random, random @ weight)}, products={"head": (data, data @ weight)})
    observed: Any = SimpleNamespace(sites=sites, options=SparseLoss(modules=3), is_calibrated=True, dense=dense)
    problems = list(sparse_loss.start(observed))
    assert (problems == []) == fitted, problems
    assert fitted or "it was not fitted" in problems[0][1]


@pytest.mark.parametrize("blocks", [(1.0, 0.0), (0.5, 0.5)], ids=["hop", "lockstep"])
@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize("wrong", [True, False])
def test_a_head_that_was_widened_is_held_to_what_the_dense_one_computes(
    blocks: tuple[float, float], is_calibrated: bool, wrong: bool
) -> None:
    """Its rows are the dense head's, divided among the blocks."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 12), torch.randn(16, 8)
    head = MultiplicativeHead(16, 12, 3, None, torch.empty(0))
    head.fit(torch.cat([share * weight for share in blocks]).t())
    if wrong:
        with torch.no_grad():
            head.product.e[:8] = -head.product.e[:8] if is_calibrated else head.product.e[:8].flip(0)
    sites = [SimpleNamespace(path="head", dense_path="head", module=head)]
    known = {"head": (x, x @ weight)}
    dense = DenseModules(probes=known, products=known, features={"head": ([0, 3, 7], weight[[0, 3, 7]])})
    observed: Any = SimpleNamespace(sites=sites, options=SparseLoss(modules=3), is_calibrated=is_calibrated, dense=dense)
    assert bool(list(sparse_loss.start(observed))) == wrong


@pytest.mark.long
def test_a_head_that_gets_its_weight_as_an_argument_is_replaced_like_others() -> None:
    entry = zoo.entry("masked/perceiver")
    model = zoo.build(entry)
    applied = apply_reported(model, SparseLoss(modules=2), example_inputs=zoo.inputs(entry, model), count_flops=False)  # verified
    assert [site.name for site in applied.rewrites[0].sites] == ["embedding_decoder"]
