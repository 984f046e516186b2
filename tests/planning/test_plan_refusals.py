"""What cannot be planned: targets out of reach, candidates that do not fit, too little text; the reasons are told."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import row_quantizer
from support.own_models import Own
from support.plans import HEAD, QKV, TARGETS, planned, windows
from support.refusals import refused
from support.row_quantizer import RowConfig
from support.tiny_models import gpt2, llama
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import retrofit
from retrofit.emitted import graph_module
from retrofit.errors import CheckpointError, PlanningError, SpecError
from retrofit.inputs.calibration import Calibration
from retrofit.passbase.protocol import parse_spec
from retrofit.passes.activation_sparsity.masked_products import ActivationMask
from retrofit.planning import costs, measuring, planner
from retrofit.planning.model_plan import ModelPlan
from retrofit.planning.planner import Planner
from retrofit.planning.planning_data import planning_data
from retrofit.planning.quality import MeasuredWindows
from retrofit.planning.variants import (
    build_variant,
    rewritten_copy,
)


def test_a_target_out_of_reach_says_what_can_be_reached(found: ModelPlan, model: Any, folder: Path) -> None:
    with pytest.raises(PlanningError) as refused:
        planned(model, "memory 0.1x", folder=folder)
    most = min(point.worth.costs["memory"] for point in found.uniform)
    both = 1 - sum(1 - point.worth.costs["memory"] for point in found.uniform)
    assert f"memory {both:.2f}x is the most" in refused.value.why and both < most


def test_a_target_out_of_reach_does_not_cost_the_plans_for_the_others(found: ModelPlan, model: Any, folder: Path) -> None:
    both = planned(model, ["memory 0.1x", *TARGETS], folder=folder)
    assert [both.to_dict(one) for one in both.planned] == [found.to_dict(one) for one in found.planned]
    assert {str(target): error.code for target, error in both.unreached.items()} == {"memory 0.1x": "out-of-reach"}


def test_what_saves_nothing_that_is_asked_for_is_not_fitted(model: Any, tmp_path: Path) -> None:
    larger = "sparse-ffn(sparsity=8, active=4)"  # its controllers are parameters more
    with refused(PlanningError, code="no-candidate") as error:
        planned(model, "memory 0.99x", passes=[larger], folder=tmp_path / "kept")
    assert error.value.why.startswith(f"{larger}: ") and "memory takes 1." in error.value.why
    with pytest.raises(PlanningError) as caught:
        planned(model, "memory 0.99x", passes=["merge-cross-attention"], folder=tmp_path / "other")
    assert caught.value.why.count("merge-cross-attention:") == 1
    assert not list((tmp_path / "kept").glob("*.safetensors"))


@pytest.mark.long
def test_a_passs_first_setting_is_fitted_first_and_then_what_a_target_asks_for(model: Any, tmp_path: Path) -> None:
    """What reaches it with the least to spare, then what comes nearest to it; of several targets each in turn."""
    given = [f"sparse-loss(modules={count})" for count in (4, 2, 8)]

    def fitted(*targets: str) -> list[str]:
        said: list[str] = []
        with contextlib.suppress(PlanningError):  # of what cannot be reached
            planned(model, list(targets), passes=given, measure=False, progress=said.append, folder=tmp_path)
        return [stage.removesuffix(": site 1 of 1 by itself") for stage in said if stage.endswith("site 1 of 1 by itself")]

    mild = planned(model, "memory 0.99x", passes=given, measure=False)
    cost = {one.spec: one.worth.costs["memory"] for one in mild.uniform}
    first, (less, more) = given[0], sorted(given[1:], key=cost.__getitem__)
    assert cost[less] < cost[more] - 0.01
    between, below = (cost[less] + cost[more]) / 2, cost[less] - 0.01
    for targets, order in [
        ((0.99,), [more, less]),
        ((between,), [less, more]),
        ((below,), [less, more]),
        ((0.99, below), [more, less]),
        ((below, 0.99), [less, more]),
    ]:
        assert fitted(*(f"memory {one:.4f}x" for one in targets)) == [first, *order]


@pytest.mark.parametrize(
    ("given", "targets", "says"),
    [
        (windows(3, 200), "memory 0.9x", "3 windows"),
        ("a few words", "memory 0.9x", "bytes|window"),
    ],
)
def test_too_little_text_is_refused(given: Any, targets: str, says: str) -> None:
    with pytest.raises(retrofit.RetrofitError, match=says):
        retrofit.plan(llama(vocab_size=200), given, targets, passes=[QKV])


def test_a_model_that_was_rewritten_is_refused() -> None:
    rewritten = retrofit.apply(llama(vocab_size=256), "sum", verify=False)
    with refused(PlanningError, "sum()", code="rewritten"):
        retrofit.plan(rewritten, windows(), "memory 0.9x", passes=[QKV])


def test_a_quantized_model_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    row_quantizer.register()
    llama(vocab_size=256).save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=RowConfig())
    stages: list[str] = []
    with refused(CheckpointError, "dequantize", code="quantized"):
        retrofit.plan(packed, windows(), "decode 1.1x", passes=["activation-sparsity"], progress=stages.append)
    assert stages == []


def test_where_no_candidate_fits_the_reasons_are_told() -> None:
    with refused(PlanningError, "d_ff", code="no-candidate"):
        retrofit.plan(llama(vocab_size=256), windows(), "memory 0.9x", passes=["sparse-ffn(sparsity=7)"], seconds=0.02)


@pytest.mark.parametrize(
    ("target", "says"), [("decode 1.1x", "every input zero, decode would take 1.30"), ("memory 0.9x", "no memory")]
)
def test_masks_that_save_nothing_when_everything_is_masked_are_refused_without_a_fit(
    target: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One time stands for all settings of the same layers."""
    times = []

    def share(self: measuring.Measurements, replacements: Any, quantity: str) -> float:
        masks = [part for one in replacements for module in one.modules.values() for part in module.modules()]
        times.append({float(part.threshold) for part in masks if isinstance(part, ActivationMask)})
        return 1.3

    def never(*given: Any) -> Any:
        raise AssertionError("fitted")

    monkeypatch.setattr(measuring.Measurements, "share", share)
    monkeypatch.setattr(measuring.Measurements, "fitted", never)
    with refused(PlanningError, says, code="no-candidate"):
        specs = [f"activation-sparsity(level={level}, allocation=uniform)" for level in (0.2, 0.9)]
        retrofit.plan(llama(vocab_size=256), windows(), target, passes=specs)
    assert times == ([{math.inf}] if "decode" in target else [])


def test_what_gives_no_numbers_together_is_no_plan(
    found: ModelPlan, model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads((folder / "measured.json").read_text())
    kept["values"] = {name: value for name, value in kept["values"].items() if "uniform" not in name and "together" not in name}
    shutil.copytree(folder, tmp_path / "kept")
    (tmp_path / "kept" / "measured.json").write_text(json.dumps(kept))
    quality = measuring.Measurements.quality

    def overflowing(self: Any, replacements: Any, windows: Any, **named: Any) -> Any:
        measured = quality(self, replacements, windows, **named)
        return measured if len(replacements) == 1 else dataclasses.replace(measured, distance=math.nan, loss=math.nan)

    monkeypatch.setattr(measuring.Measurements, "quality", overflowing)
    made = planned(model, TARGETS, folder=tmp_path / "kept", measure=False)
    assert [str(one.target) for one in made.planned] == TARGETS[:1]
    assert math.isfinite(made.planned[0].predicted.distance) and len(made.planned[0].layers) == 1
    assert [(str(target), "NaN" in error.why) for target, error in made.unreached.items()] == [(TARGETS[1], True)]


def test_a_candidate_that_does_not_fit_is_named_once() -> None:
    with refused(PlanningError, code="no-candidate") as error:
        planned(llama(vocab_size=256), TARGETS, passes=["merge-cross-attention"], measure=False)
    assert error.value.why.count("merge-cross-attention:") == 1


@pytest.mark.long
def test_a_candidate_that_gives_no_numbers_is_left_out_with_the_reason(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quality = measuring.Measurements.quality

    def overflowing(self: Any, *given: Any, **named: Any) -> Any:
        return dataclasses.replace(quality(self, *given, **named), distance=math.inf)

    monkeypatch.setattr(measuring.Measurements, "quality", overflowing)
    with refused(PlanningError, code="no-candidate") as error:
        planned(model, TARGETS, passes=[QKV], measure=False)
    assert QKV in error.value.why and "2 of its 2 sites" in error.value.why and "NaN" in error.value.why


@pytest.mark.long
def test_a_recipe_that_cannot_be_applied_does_not_cost_the_plans_for_the_others(
    found: ModelPlan, model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mild, hard = (one.recipe for one in found.planned)

    def refusing(dense: Any, passes: Any, *given: Any) -> Any:
        if tuple(one.spec() for one in passes) == hard:
            raise SpecError("it is refused")
        return rewritten_copy(dense, passes, *given)

    kept = Planner.rewritten_worth

    def anew(self: Any, recipe: Any) -> Any:
        self.measurements.store.values.pop(f"rewritten {'; '.join(one.spec() for one in recipe)}", None)
        return kept(self, recipe)

    monkeypatch.setattr(planner, "rewritten_copy", refusing)
    monkeypatch.setattr(Planner, "rewritten_worth", anew)
    shutil.copytree(folder, tmp_path / "kept")
    made = planned(model, TARGETS, folder=tmp_path / "kept")
    assert [one.recipe for one in made.planned] == [mild]
    assert [type(error) for error in made.unreached.values()] == [PlanningError]


def test_ids_that_are_no_windows_are_refused() -> None:
    with refused(SpecError, "shape", option="calibration"):
        retrofit.plan(llama(vocab_size=256), windows().flatten(), "memory 0.9x", passes=[QKV])
    with refused(SpecError, "shape", option="calibration"):
        retrofit.plan(llama(vocab_size=256), windows()[:, :0], "memory 0.9x", passes=[QKV])


def test_why_there_is_no_loss_is_told() -> None:
    batches = [{"input_ids": windows(size=61), "labels": windows(size=61)}]
    for given, why in ((windows(size=61), "bytes"), (batches, "batches")):
        with refused(PlanningError, why, code="no-loss"):
            retrofit.plan(llama(), given, "loss +0.1", passes=[QKV])


@pytest.mark.long
def test_ids_are_given_by_the_name_that_a_model_of_ones_own_has_for_them() -> None:
    model = Own(tokens=256).eval()
    assert "x" in planning_data(model, windows()).window
    found = planned(model, ["memory 0.999x", "train 0.001x"], passes=[HEAD])
    (error,) = found.unreached.values()
    assert found.planned[0].measured is not None and found.planned[0].measured.added_loss is not None
    assert "train" in found.dense_seconds and "train" in error.what


def test_a_graph_has_the_logits_of_the_table_that_it_looks_ids_up_in() -> None:
    graph = graph_module(Own(tokens=256).eval(), {"x": windows(2)})
    measured = MeasuredWindows.of(graph, [{"x": windows(2), "labels": windows(2)}], (), 0)
    assert measured.are_logits and measured.dense_loss is not None


class Branching(Own):
    """A model whose caller says which way its code takes; a feed-forward of it fits as a graph only."""

    def forward(self, x: Tensor, *, plain: bool = True) -> Tensor:
        return super().forward(x) if plain else super().forward(x).relu()


@pytest.mark.long
def test_a_graph_is_not_tried_on_arguments_that_it_does_not_have() -> None:
    model, batches = Branching(tokens=256).eval(), [{"x": part, "plain": True} for part in windows().split(4)]
    with refused(PlanningError, "plain", "graph"):
        retrofit.plan(model, batches, "memory 0.999x", passes=["sparse-ffn(sparsity=8)"], seconds=0.02)
    data = Calibration(({"x": windows(2)},))
    assert build_variant(model, parse_spec("sparse-ffn(sparsity=8)"), data, {}, 0, fit=False)[0].model is not None


def test_another_text_inside_of_a_container_is_another_text() -> None:
    class Inside(Own):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["x"])

    model, inputs = Inside(tokens=256), {"batch": {"x": windows(2)}}
    one, other = ([{"batch": {"x": part}} for part in windows(seed=seed).split(4)] for seed in (0, 1))
    prints = [planning_data(model, given, inputs=inputs).fingerprint for given in (one, other, one)]
    assert prints[0] == prints[2] != prints[1]


@pytest.mark.parametrize(("positions", "tokens"), [(16, 15), (4, 3)])
def test_a_model_of_few_positions_is_timed_within_them(positions: int, tokens: int) -> None:
    model = gpt2(n_positions=positions)
    window = {"input_ids": windows(1, 61)[:, :positions]}
    assert "decode" in costs.measurable(model, window) and costs.decoded_tokens(model) == tokens
    assert costs.seconds_of_token(model, window) > 0
    assert "decode" not in costs.measurable(gpt2(n_positions=3), {"input_ids": windows(1, 61)[:, :3]})


@pytest.mark.long
def test_outputs_that_are_no_logits_are_compared_by_their_error() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    torch.manual_seed(0)
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=256, **sizes)).eval()
    for target, says in (("decode 1.5x", "does not generate"), ("loss +0.1", "error")):
        with pytest.raises(PlanningError) as refused:
            retrofit.plan(encoder, windows(), target, passes=[QKV])
        assert says in str(refused.value)
    one = retrofit.plan(encoder, windows(), "memory 0.99x", passes=[QKV], seconds=0.02, measure=False).planned[0]
    assert one.predicted.added_loss is None and "decode" not in one.predicted.costs
    with hybrid_of(encoder, one.recipe) as rewritten:
        ids = windows(8, seed=9)
        y, z = encoder(ids).last_hidden_state, rewritten(ids).last_hidden_state
    relative = float((y - z).norm() / y.norm())
    assert one.predicted.distance == pytest.approx(relative, rel=0.5)


def hybrid_of(model: nn.Module, recipe: tuple[str, ...]) -> Any:
    import contextlib

    return contextlib.nullcontext(retrofit.apply(copy.deepcopy(model), *recipe, calibration=windows(24), verify=False))
