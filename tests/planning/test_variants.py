"""Candidates applied to a model and taken apart: a hybrid is what the recipe makes, and recalled layers change nothing."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.plans import FFN, HEAD, windows
from torch import Tensor, nn

import retrofit
from retrofit.anatomy.inspection import inspect
from retrofit.inputs.calibration import Calibration
from retrofit.inputs.model_memory import own_bytes
from retrofit.passbase.protocol import parse_spec
from retrofit.planning import quality
from retrofit.planning.costs import Interrupted, OutOfTime
from retrofit.planning.quality import MeasuredWindows, PrefixCache
from retrofit.planning.variants import (
    Replacement,
    added_bytes,
    build_variant,
    candidates_of,
    changed_modules,
    depths_text,
    hybrid,
    layers_by_depth,
    short_spec,
)


@pytest.fixture(scope="module")
def variant(model: Any) -> tuple[Replacement, ...]:
    calibration = Calibration(({"input_ids": windows(8)},))
    return build_variant(model, parse_spec(FFN), calibration, layers_by_depth(inspect(model)), seed=0)


def test_a_hybrid_is_the_model_that_the_recipe_makes_bit_for_bit(model: Any, variant: tuple[Replacement, ...]) -> None:
    assert [one.depths for one in variant] == [(0,), (1,)]
    expected = retrofit.apply(
        copy.deepcopy(model), "sparse-ffn(sparsity=8, active=4, layers=1)", calibration=windows(8), verify=False
    )
    ids = windows(3, seed=5)
    dense = model(ids).logits
    with hybrid(model, variant[1:]) as mixed:
        assert torch.equal(mixed(ids).logits, expected(ids).logits)
        assert own_bytes(mixed) == own_bytes(expected)
    assert not torch.equal(dense, expected(ids).logits)
    assert torch.equal(model(ids).logits, dense)
    assert added_bytes(model, variant[1]) == own_bytes(expected) - own_bytes(model)


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_is_dense_again_when_time_runs_out_in_a_hybrid(model: Any, inside: bool) -> None:
    """Masked products keep their weights by columns: that is undone by calls of torch, each of which says that time is over."""
    layers = layers_by_depth(inspect(model))
    calibration = Calibration(({"input_ids": windows(8)},))
    variant = build_variant(model, parse_spec("activation-sparsity(level=0.5)"), calibration, layers, seed=0)
    modules = list(model.named_modules())
    strides = {name: weight.stride() for name, weight in model.named_parameters()}
    with suppress(OutOfTime), Interrupted(math.inf) as limit, hybrid(model, variant):
        limit.until = 0.0
        if inside:
            model(windows(1))
    assert list(model.named_modules()) == modules
    assert {name: weight.stride() for name, weight in model.named_parameters()} == strides


def test_where_a_model_was_loaded_from_is_no_change_of_it(model: Any) -> None:
    loaded = copy.copy(model)
    vars(loaded).update(quantization_method="gguf", is_quantized=False, name_or_path="a/place")
    assert changed_modules(loaded, copy.deepcopy(model)) == {}
    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.is_causal = "other"
    assert list(changed_modules(loaded, other)) == ["model.layers.1.self_attn"]


def test_layers_before_the_change_are_recalled_and_nothing_is_different(model: Any, variant: tuple[Replacement, ...]) -> None:
    batches = [{"input_ids": part, "labels": part} for part in windows(4, seed=7).split(2)]
    layers = [path for paths in layers_by_depth(inspect(model)).values() for path in paths]
    recalled, whole = (MeasuredWindows.of(model, batches, paths, shift=1) for paths in (layers, []))
    runs: list[str] = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *known: runs.append("layer 0"))
    try:
        with hybrid(model, variant[1:]) as mixed:
            one = recalled.measure(mixed, variant[1].paths, sketch=True)
            assert not runs
            other = whole.measure(mixed, variant[1].paths, sketch=True)
            assert runs
    finally:
        handle.remove()
    assert (one.distance, one.loss) == (other.distance, other.loss)
    assert one.sketch is not None and other.sketch is not None and torch.equal(one.sketch, other.sketch)
    assert 0.5 * float(one.sketch.square().sum()) == pytest.approx(one.distance, rel=0.5)
    with hybrid(model, variant[1:]) as mixed, torch.no_grad():
        logits = mixed(torch.cat([batch["input_ids"] for batch in batches])).logits
        labels = torch.cat([batch["labels"] for batch in batches])
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert one.loss == pytest.approx(float(expected), rel=1e-5)


def test_tokens_are_compared_some_at_a_time(model: Any, variant: tuple[Replacement, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = windows(3, seed=7)
    seen = MeasuredWindows.of(model, [{"input_ids": ids, "labels": ids}], [], shift=1)
    with hybrid(model, variant) as mixed:
        at_once = seen.measure(mixed, sketch=True)
        monkeypatch.setattr(quality, "PART", 7 * seen.batches[0].dense.shape[1])
        in_parts = seen.measure(mixed, sketch=True)
    assert in_parts.figures == pytest.approx(at_once.figures)
    assert at_once.sketch is not None and in_parts.sketch is not None
    assert torch.allclose(in_parts.sketch, at_once.sketch, atol=1e-6)


class Remembering(nn.Module):
    """Its second layer reads what the first one leaves beside what it returns."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(8, 8)

        def forward(self, x: Tensor, left: dict[str, Tensor]) -> Tensor:
            left["keys"] = left.get("keys", x) + x
            found: Tensor = x + self.product(left["keys"])
            return found

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x, left = self.table(ids), dict[str, Tensor]()
        for layer in self.layers:
            x = layer(x, left)
        return x


def test_layers_that_leave_more_than_they_return_are_not_recalled() -> None:
    model = Remembering().eval()
    batches = [{"ids": torch.arange(11)[None]}]
    paths = [f"layers.{depth}" for depth in range(3)]
    seen = PrefixCache(model, paths, batches)
    with torch.no_grad(), seen.recalled(0, ["layers.2"]):
        found = model(**batches[0])
    assert torch.equal(found, model(**batches[0]))
    assert seen.calls == [[]]


def test_one_candidate_needs_no_list() -> None:
    assert candidates_of("sparse-loss") == candidates_of(["sparse-loss"])
    assert candidates_of(parse_spec(HEAD)) == (parse_spec(HEAD),)


def test_a_pass_by_its_name_is_the_family_that_it_proposes() -> None:
    kind = type(parse_spec("sparse-ffn"))
    family = candidates_of(["sparse-ffn"])
    assert len(family) == len(kind.candidates) > 2 and {one.name for one in family} == {"sparse-ffn"}
    assert candidates_of(["sparse-ffn()"]) == (parse_spec("sparse-ffn"),)
    assert [one.name for one in candidates_of(["sum"])] == ["sum"]
    every = candidates_of(None)
    assert {one.name for one in every} >= {"sparse-ffn", "sparse-qkv", "sparse-loss"} and "sum" not in {one.name for one in every}


def test_depths_are_written_as_the_option_reads_them() -> None:
    assert depths_text([8, 0, 1, 2, 5, 4]) == "0-2+4-5+8"
    assert short_spec(parse_spec("sparse-ffn(sparsity=8, active=1)")) == "sparse-ffn(sparsity=8)"
