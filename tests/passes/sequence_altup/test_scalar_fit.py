"""The scalars of strided layers fitted to data: against a plain loop, a planted layer, and the dense model's predictions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from retrofit.numerics.distances import token_weights
from retrofit.passes import SequenceAltUp
from retrofit.passes.sequence_altup.scalar_fit import START, error_of, linear, moved, solve
from retrofit.passes.sequence_altup.strided_layers import SequenceAltUpLayer
from retrofit.rewriting import apply_reported

WIDTH = 5


def drawn(tokens: int, seed: int, huge: float = 1.0) -> Tensor:
    """The terms of y: x, its anchor's x, its anchor's ỹ; the first token's are `huge`."""
    terms = torch.randn(3, tokens, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    terms[:, 0] *= huge
    return terms.float()


def output(terms: Tensor, scalars: tuple[float, float, float]) -> Tensor:
    """The formula of the layer, y = ŷ + b (ỹ − ŷ of the anchor)."""
    a1, a2, b = scalars
    x, anchor, computed = terms
    return (a1 * x + a2 * anchor) + b * (computed - (a1 * anchor + a2 * anchor))


@pytest.mark.parametrize("scalars", [(0.8, 0.15, 0.6), (1.1, -0.2, 1.3)])
def test_planted_scalars_are_recovered_though_one_token_is_huge(scalars: tuple[float, float, float]) -> None:
    terms = drawn(1000, 0, huge=1000.0)
    y = output(terms, scalars)
    y[0] = 0  # what the huge token wants is something else
    assert linear(solve(terms, y)) == pytest.approx(linear(scalars), abs=0.02)


def test_the_solution_is_that_of_lstsq_on_every_feature_of_every_token() -> None:
    """a1, c and b by a plain loop over rows and torch's own least squares."""
    terms, y = drawn(30, 1), drawn(30, 2)[0]
    weights = token_weights(y, *terms)
    rows, wanted = [], []
    for t in range(30):
        for i in range(WIDTH):
            rows.append([float(weights[t].sqrt() * terms[part, t, i]) for part in range(3)])
            wanted.append(float(weights[t].sqrt() * y[t, i]))
    expected = torch.linalg.lstsq(torch.tensor(rows), torch.tensor(wanted).unsqueeze(1)).solution.flatten()
    torch.testing.assert_close(torch.tensor(linear(solve(terms, y))), expected, rtol=1e-2, atol=2e-3)


def test_near_the_pole_b_is_one() -> None:
    terms = drawn(50, 3)
    y = 0.7 * (terms[0] - terms[1]) + terms[2]
    a1, a2, b = solve(terms, y)
    assert (a2, b) == (0.0, 1.0) and a1 == pytest.approx(0.7, abs=0.01)


def test_half_of_the_way_is_half_of_what_is_linear() -> None:
    end = (0.6, 0.3, 0.5)
    half = linear(moved(START, end, 0.5))
    assert half == pytest.approx([(one + other) / 2 for one, other in zip(linear(START), linear(end), strict=True)])
    assert moved(START, end, 1.0) == pytest.approx(end)


def strided(spec: SequenceAltUp, calibrated: bool) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    entry = zoo.entry("seq2seq/t5")
    model = zoo.build(entry)
    ids = zoo.inputs(entry, model, batch=16, length=24)["input_ids"]
    one = apply_reported(model, spec, calibration=ids if calibrated else None, verify=False, count_flops=False).rewrites[0]
    return model, one.notes


def scalars_of(model: torch.nn.Module) -> dict[str, list[float]]:
    layers = {path: one for path, one in model.named_modules() if isinstance(one, SequenceAltUpLayer)}
    return {path: [one.get_parameter(name).item() for name in ("a1", "a2", "b")] for path, one in layers.items()}


@pytest.mark.long
def test_a_calibrated_start_is_nearer_and_worse_in_no_layer() -> None:
    model, notes = strided(SequenceAltUp(k=2), calibrated=True)
    assert any(one != [1.0, 0.0, 1.0] for one in scalars_of(model).values())
    whole, *layers = notes
    before, after = (float(part) for part in whole.split(": ")[1].split(" → "))
    assert after < before
    assert {note.site for note in layers} == scalars_of(model).keys()
    assert all(note.values["after"] <= note.values["before"] for note in layers)


@pytest.mark.long
def test_the_fit_is_the_same_every_time() -> None:
    one, other = (strided(SequenceAltUp(k=3), calibrated=True)[0] for _ in range(2))
    assert scalars_of(one) == scalars_of(other)


@pytest.mark.long
@pytest.mark.parametrize("spec", [SequenceAltUp(k=1), SequenceAltUp(k=2, method="stride-and-skip")])
def test_where_there_is_nothing_to_fit_nothing_is_fitted(spec: SequenceAltUp) -> None:
    model, notes = strided(spec, calibrated=True)
    assert not notes and all(one == [1.0, 0.0, 1.0] for one in scalars_of(model).values())


def test_the_model_is_left_as_it_was_but_for_its_scalars() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry)
    before = copy.deepcopy(model.state_dict())
    ids = zoo.inputs(entry, model, batch=8, length=16)["input_ids"]
    apply_reported(model, SequenceAltUp(k=2), calibration=ids, verify=False, count_flops=False)
    after = {name.replace(".layer.", "."): value for name, value in model.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_an_error_counts_the_dtype_of_the_layer() -> None:
    layer = SequenceAltUpLayer(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), 2)
    terms = drawn(20, 4)
    y = output(terms, (0.8, 0.1, 0.7))
    rounded = tuple(float(torch.tensor(one).bfloat16()) for one in (0.8, 0.1, 0.7))
    weights = token_weights(y, *terms)
    missed = (output(terms, rounded) - y).square().sum(-1) @ weights / (y.square().sum(-1) @ weights)  # type: ignore[arg-type]
    assert error_of(layer, (0.8, 0.1, 0.7), terms, y) == pytest.approx(float(missed.sqrt()), rel=1e-3)
