"""A sparse attention fitted to what the dense one returns: planted, on data, never worse, the same every time."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor, nn

from retrofit.anatomy.attention_parsing import find_attention_sites
from retrofit.anatomy.attention_sites import weights_by_letter
from retrofit.anatomy.inspection import inspect
from retrofit.passbase.method_reference import DenseModules
from retrofit.passes import SparseQKV
from retrofit.passes.sparse_qkv.fitting import SecondMoments, dense_matrices, fit, fit_to_data, scope_of
from retrofit.passes.sparse_qkv.modular_projection import ModularProjection
from retrofit.passes.sparse_qkv.reference import Part, agreement_problems
from retrofit.passes.sparse_qkv.sparse_projections import absorbed_values
from retrofit.rewriting import apply_reported


def projection(seed: int = 0) -> ModularProjection:
    torch.manual_seed(seed)
    return ModularProjection("mult-conv", 24, 4, 6, dict.fromkeys("qkv", 1), 3, torch.empty(0))


def test_moments_are_those_of_a_loop_and_no_row_decides() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    x[3] *= 1000
    moments = SecondMoments()
    moments(x)
    median = sorted(float(row @ row) for row in x)[(len(x) - 1) // 2]
    weights = [min(1.0, median / float(row @ row)) for row in x]
    expected = sum(weight * torch.outer(row, row) for weight, row in zip(weights, x, strict=True)) / sum(weights)
    torch.testing.assert_close(moments.mean(), expected, rtol=1e-3, atol=1e-4)


def test_a_matrix_that_is_modular_where_the_inputs_lie_is_found_by_data_only() -> None:
    planted = {letter: value.detach().flatten(1) for letter, value in dense_matrices(projection(1)).items()}
    basis = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(2))).Q
    hidden = basis[:, 8:] @ torch.randn(16, 24, generator=torch.Generator().manual_seed(3))
    weights = {letter: value + hidden for letter, value in planted.items()}
    moments = basis[:, :8] @ basis[:, :8].t()
    layer = projection(4)
    fit(layer, weights)
    before, after = fit_to_data(layer, weights, moments, moments)
    assert all(after[letter] < 0.7 * before[letter] for letter in "qkv")


def test_a_fit_that_is_worse_on_data_held_out_is_not_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {letter: torch.randn(24, 24, generator=generator) for letter in "qkv"}
    basis = torch.linalg.qr(torch.randn(24, 24, generator=generator)).Q
    layer = projection()
    fit(layer, weights)
    before, after = fit_to_data(layer, weights, basis[:, :4] @ basis[:, :4].t(), basis[:, 4:] @ basis[:, 4:].t())
    assert before == after
    again, _ = fit_to_data(layer, weights, torch.eye(24), basis[:, 4:] @ basis[:, 4:].t())
    assert again == before


@pytest.mark.parametrize(
    ("attention", "out", "scope"),
    [
        ("h.0.attn", "h.0.attn.o", "h.0.attn"),
        ("h.0.attn.self", "h.0.attn.output.dense", "h.0.attn"),
        ("h.0.attn", None, "h.0.attn"),
        ("attn", "out", ""),
    ],
)
def test_what_is_compared_holds_the_attention_and_its_output_layer(attention: str, out: str | None, scope: str) -> None:
    assert scope_of(attention, out) == scope


def test_where_all_heads_attend_alike_the_absorbed_values_need_no_output_layer() -> None:
    """Query heads with values of their own: the columns are what the dense values times the output layer are."""
    entry = zoo.entry("masked/bert")
    model = zoo.build(entry)
    anatomy = inspect(model)
    site = find_attention_sites(anatomy, [(anatomy.stacks[0], 0)])[0][0]
    weights = weights_by_letter(site, model)
    assert site.out is not None
    out = model.get_parameter(site.out.weight).detach().t()
    torch.testing.assert_close(absorbed_values(site, weights, model)["v"], weights["v"] @ out, rtol=1e-4, atol=1e-6)


def fitted(name: str, spec: SparseQKV) -> tuple[nn.Module, nn.Module, Tensor, tuple[Any, ...]]:
    entry = zoo.entry(name)
    model = zoo.build(entry)
    dense = copy.deepcopy(model)
    ids = zoo.inputs(entry, model, batch=16, length=12)["input_ids"]
    torch.manual_seed(0)
    one = apply_reported(model, spec, calibration=ids, verify=False, count_flops=False).rewrites[0]
    return model, dense, ids, one.notes


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "output"), [("causal/llama", "none"), ("masked/bert", "keep")])
def test_no_attention_is_worse_on_windows_held_out(name: str, output: str) -> None:
    model, dense, ids, notes = fitted(name, SparseQKV(output=output, layers="0-1"))
    results = [note.values for note in notes if note.kind.startswith("relative error of the output")]
    letters = [note.values for note in notes if "output" not in note.kind]
    assert len(results) == 2 and len(letters) == 6
    assert all(values["after"] < values["before"] for values in letters)
    assert all(values["after"] <= values["before"] for values in results) and results[0]["after"] < results[0]["before"]
    again = fitted(name, SparseQKV(output=output, layers="0-1"))[0]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(ids).logits.shape == dense(ids).logits.shape


@pytest.mark.long
def test_attentions_fitted_at_once_are_those_fitted_one_by_one() -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (2, 1):
            torch.set_num_threads(threads)
            found.append(fitted("causal/llama", SparseQKV(layers="0-1"))[0].state_dict())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


LOUD, WIDTH = 4, 16  # the input features that the model's activations have, of all


def problems(fitted: Tensor, dense: Tensor, *, calibrated: bool) -> list[Any]:
    """What is wrong with a projection by `fitted`, (d, columns), in the place of `dense`."""
    sparse = ModularProjection("mult", WIDTH, 1, WIDTH, {"q": 1}, 1, torch.empty(0))
    with torch.no_grad():  # one module: D E is any matrix
        sparse.mult_q.d.fill_(1.0)
        sparse.mult_q.e.copy_(fitted)
    generator = torch.Generator().manual_seed(0)
    anywhere, activations = torch.randn(8, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)
    activations[:, LOUD:] = 0
    observed: Any = SimpleNamespace(
        options=SimpleNamespace(kernel=1),
        dense=DenseModules(probes={"q": (anywhere, anywhere @ dense)}, products={"q": (activations, activations @ dense)}),
        is_calibrated=calibrated,
    )
    site: Any = SimpleNamespace(path="q", dense_path="q")
    part = Part(site, sparse, "mult", "q", slice(0, WIDTH), list(range(WIDTH)))
    return list(agreement_problems(part, observed))


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_fit_to_data_is_held_against_the_dense_projection_on_data(calibrated: bool) -> None:
    dense = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    fitted = 20 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
    fitted[:LOUD] = 0.9 * dense[:LOUD]  # right for the data, and far too long along what they do not have
    assert bool(problems(fitted, dense, calibrated=calibrated)) is not calibrated
    assert problems(fitted.roll(WIDTH // 2, 1), dense, calibrated=calibrated)  # columns that lie otherwise
    assert not problems(0.9 * dense, dense, calibrated=calibrated)
