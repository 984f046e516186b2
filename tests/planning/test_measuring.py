"""Measurements are stored and go on, in a limited time as far as it suffices; what saves nothing is not fitted."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.plans import HEAD, QKV, TARGETS, planned, windows
from support.tiny_models import llama, t5
from torch import nn

import retrofit
from retrofit.errors import PlanningError
from retrofit.inputs.model_memory import own_bytes
from retrofit.passbase.protocol import parse_spec
from retrofit.planning import costs, measuring, planning_data
from retrofit.planning.measurements import CandidateRecord, between, spread
from retrofit.planning.model_plan import ModelPlan
from retrofit.planning.prediction import with_means
from retrofit.planning.variants import (
    short_spec,
)
from retrofit.training.teaching import hash_settings, hash_weights


@pytest.mark.long
def test_a_plan_that_was_measured_is_not_measured_again(
    found: ModelPlan, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any, **named: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "build_variant", never)
    monkeypatch.setattr(measuring, "beside", never)
    again = planned(model, TARGETS, folder=folder)
    assert [again.to_dict(one) for one in again.planned] == [found.to_dict(one) for one in found.planned]
    survey = planned(model, [], folder=folder)
    assert survey.planned == () and survey.uniform == found.uniform


@pytest.mark.long
def test_an_interrupted_plan_goes_on_to_the_same_plan_and_fits_nothing_again(
    found: ModelPlan, model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "kept")
    record = tmp_path / "kept" / "measured.json"
    kept = json.loads(record.read_text())
    lost = [name for name in kept["values"] if "alone 1" in name or "uniform" in name or "together" in name]
    assert len(lost) > 5
    kept["values"] = {name: value for name, value in kept["values"].items() if name not in lost}
    record.write_text(json.dumps(kept))

    def never(*given: Any) -> Any:
        raise AssertionError("fitted again")

    monkeypatch.setattr(measuring.Measurements, "fitted", never)
    again = planned(model, TARGETS, folder=tmp_path / "kept", measure=False)
    for one, other in zip(again.planned, found.planned, strict=True):
        assert (one.recipe, one.predicted) == (other.recipe, other.predicted)
    assert json.loads(record.read_text())["values"].keys() >= set(lost)


def test_thresholds_are_stored_and_read_again(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that needs calibration data is applied without it, and gets the values that were found with it."""
    options: dict[str, Any] = {"passes": ["activation-sparsity(level=0.4, allocation=uniform)"], "folder": tmp_path}
    found = planned(model, [], **options)
    record = tmp_path / "measured.json"
    kept = json.loads(record.read_text())
    lost = {name for name in kept["values"] if "alone 1" in name or "uniform measured" in name}
    kept["values"] = {name: value for name, value in kept["values"].items() if name not in lost}
    record.write_text(json.dumps(kept))

    def never(*given: Any) -> Any:
        raise AssertionError("fitted again")

    monkeypatch.setattr(measuring.Measurements, "fitted", never)
    again = planned(model, [], **options)
    assert len(lost) == 2 and [one.worth.distance for one in again.uniform] == [one.worth.distance for one in found.uniform]


def test_a_moment_in_which_something_else_runs_does_not_count_when_there_is_time_for_two_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {"dense": [9.0, 1.0, 1.0], "other": [9.0, 0.8, 40.0]}
    names = {name: nn.Module() for name in taken}
    monkeypatch.setattr(costs, "seconds_of", lambda _, model, *given: taken[next(k for k in names if names[k] is model)].pop(0))
    dense, (share,) = costs.beside(
        lambda: contextlib.nullcontext(names["dense"]),
        [lambda: contextlib.nullcontext(names["other"])],
        "decode",
        {},
        most_seconds=0.0,
        hurried=True,
    )
    assert (dense, share) == (1.0, 0.8)


class Clock:
    """A clock that goes on only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def never_ending(spec: str, clock: Clock) -> Any:
    """`build_variant`, which for one candidate computes on, and takes what stops it for a failure of its own if it can."""
    build = measuring.build_variant

    def built(dense: nn.Module, candidate: Any, *given: Any, **named: Any) -> Any:
        endless = candidate == parse_spec(spec) and named.get("fit", True)
        while endless:
            clock.now += 0.01
            with contextlib.suppress(Exception):
                torch.ones(8).sum()
        return build(dense, candidate, *given, **named)

    return built


def test_minutes_limit_the_whole_plan_and_what_they_do_not_suffice_for_is_left_out(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(measuring, "build_variant", never_ending(QKV, clock))
    monkeypatch.setattr(costs, "monotonic", clock.monotonic)
    found = planned(model, "memory 0.98x", minutes=0.8, folder=tmp_path / "kept")
    assert 0 < clock.now < 48
    assert found.left_out[short_spec(parse_spec(QKV))].startswith(measuring.NOT_TRIED)
    assert [one.spec for one in found.uniform] == [short_spec(parse_spec(HEAD))]
    assert found.planned[0].predicted.costs["memory"] <= 0.98


@pytest.mark.long
def test_a_candidate_of_which_some_sites_were_measured_can_be_chosen(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = measuring.Measurements.measure_alone

    def one_only(self: measuring.Measurements, record: CandidateRecord, index: int) -> dict[str, Any]:
        if record.candidate.name == "sparse-qkv" and index:
            raise costs.OutOfTime
        return alone(self, record, index)

    monkeypatch.setattr(measuring.Measurements, "measure_alone", one_only)
    found = planned(model, "memory 0.98x", minutes=10, folder=tmp_path / "kept", measure=False)
    assert found.left_out.keys() == {short_spec(parse_spec(QKV))}
    assert [one.sampled for one in found.uniform] == [(0, 0), (0, 0)]  # both were measured in all layers
    monkeypatch.undo()
    assert planned(model, "memory 0.98x", folder=tmp_path / "kept", measure=False).left_out == {}


@pytest.mark.long
def test_a_plan_without_a_limit_goes_on_from_a_limited_one(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tokens that were measured on, and it says so; with `force` it starts over."""
    monkeypatch.setattr(planning_data, "seconds_of_run", lambda *given: 1.0)  # 48 of the tokens are affordable
    limited = planned(model, "memory 0.98x", minutes=400 / 60, folder=tmp_path / "kept", measure=False)
    before = stored(tmp_path / "kept")
    assert before["tokens"] == [96, 48, 96] and limited.notes == ()
    whole = planned(model, "memory 0.98x", folder=tmp_path / "kept", measure=False)
    assert len(whole.notes) == 1 and "--force" in whole.notes[0]
    assert before.items() <= stored(tmp_path / "kept").items() and whole.left_out == {}
    anew = planned(model, "memory 0.98x", folder=tmp_path / "kept", measure=False, force=True)
    assert anew.notes == () and stored(tmp_path / "kept")["tokens"][1] > 48


def stored(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "measured.json").read_text())["values"]
    return values


@pytest.mark.long
def test_times_of_few_rounds_are_measured_again_where_time_is_not_limited(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def share(self: measuring.Measurements, replacements: Any, quantity: str) -> float:
        timed.append(len(replacements))
        self.store.measure(f"dense {quantity}", lambda: 1.0)
        return 1 - 0.1 * len(replacements)

    monkeypatch.setattr(measuring.Measurements, "share", share)
    counts = []
    for limit in ({"minutes": 5, "seconds": 600}, {"minutes": 5, "seconds": 600}, {}, {}):
        planned(model, "decode 1.2x", passes=[QKV], folder=tmp_path / "kept", measure=False, **limit)
        counts.append(len(timed))
    assert 0 < counts[0] == counts[1] < counts[2] == counts[3]


def test_a_forward_of_a_window_decides_on_how_many_tokens_is_measured(model: Any) -> None:
    window = {"input_ids": windows(1)}
    assert 0 < planning_data.seconds_of_run(model, window) < 5
    for seconds in (100.0, 1000.0):
        counts = planning_data.TokenCounts.in_time(model, None, seconds, window)
        assert counts.held_out >= counts.measured > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning_data, "seconds_of_run", lambda *given: 0.6)
        found = [planning_data.TokenCounts.in_time(model, tokens, 500.0, window) for tokens in (None, 7)]
    assert [(one.fitted, one.measured, one.held_out) for one in found] == [(200, 100, 200), (7, 100, 200)]


@pytest.mark.long
def test_a_candidate_fitted_in_a_few_layers_is_planned_in_others_like_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit takes 20 seconds a layer: of eight layers four fit into the time, and what they lose tells what the others do."""
    clock, build = Clock(), measuring.build_variant
    fitted: list[int] = []

    def built(dense: nn.Module, candidate: Any, *given: Any, **named: Any) -> Any:
        found = build(dense, candidate, *given, **named)
        if named.get("fit", True):
            fitted.append(len(found))
            clock.now += 20 * len(found)
        return found

    monkeypatch.setattr(measuring, "build_variant", built)
    monkeypatch.setattr(costs, "monotonic", clock.monotonic)
    monkeypatch.setattr(measuring, "monotonic", clock.monotonic)
    deep = llama(vocab_size=256, num_hidden_layers=8)
    found = planned(deep, "memory 0.96x", passes=[QKV], minutes=4, folder=tmp_path / "kept", measure=False)
    assert fitted == [4] and clock.now <= 240
    (one,), (setting,) = found.planned, found.uniform
    assert one.predicted.costs["memory"] <= 0.96 and len(one.layers[0].depths) > 4
    assert (setting.sampled, setting.held_out) == ((4, 8), None)
    assert setting.worth.distance > one.predicted.distance > 0
    rewritten = retrofit.apply(copy.deepcopy(deep), *one.passes, calibration=windows(), verify=False)
    assert one.predicted.costs["memory"] == pytest.approx(own_bytes(rewritten) / own_bytes(deep), abs=1e-12)
    whole = planned(deep, "memory 0.96x", passes=[QKV], folder=tmp_path / "kept", measure=False)
    assert whole.uniform[0].held_out is not None and whole.left_out == {}
    assert whole.uniform[0].worth.distance == pytest.approx(setting.worth.distance, rel=0.5)


@pytest.mark.long
def test_what_takes_more_than_its_share_of_the_time_is_tried_again_with_what_is_left(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, build = Clock(), measuring.build_variant
    began: list[str] = []

    def built(dense: nn.Module, candidate: Any, *given: Any, **named: Any) -> Any:
        if named.get("fit", True):
            began.append(candidate.name)
            clock.now += 180 if candidate.name == "sparse-qkv" else 1  # its share is 173 of 432, and 207 are left after the others
        return build(dense, candidate, *given, **named)

    monkeypatch.setattr(measuring, "build_variant", built)
    monkeypatch.setattr(costs, "monotonic", clock.monotonic)
    monkeypatch.setattr(measuring, "monotonic", clock.monotonic)
    heads = [f"sparse-loss(modules={count})" for count in (4, 2, 8)]
    found = planned(model, "memory 0.98x", passes=[QKV, *heads], minutes=10, folder=tmp_path / "kept", measure=False)
    assert began.count("sparse-qkv") == 2 and found.left_out == {}


@pytest.mark.long
def test_a_target_out_of_reach_names_what_the_candidates_take_and_lose(model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanningError) as refused:
        planned(model, "memory 0.01x", folder=tmp_path / "kept", measure=False)
    assert all(short_spec(parse_spec(spec)) in refused.value.why for spec in (QKV, HEAD))


def test_values_between_those_known_are_on_a_line_of_logarithms() -> None:
    assert between({0: 1.0, 4: 16.0}, 2) == pytest.approx(4.0)
    assert between({1: 2.0, 3: 8.0}, 7) == pytest.approx(8.0)
    assert math.isnan(between({}, 1))


def test_sites_that_were_not_measured_have_the_mean_cosine_of_those_that_were() -> None:
    cosines = numpy.eye(5)
    cosines[0, 1] = cosines[1, 0] = 0.5
    cosines[0, 3] = cosines[3, 0] = 0.25
    found = with_means(cosines, [0, 0, 0, 1, 1], [0, 1, 3])
    assert found[0, 2] == found[2, 1] == 0.5 and numpy.allclose(found.diagonal(), 1.0)
    assert found[2, 3] == found[0, 4] == pytest.approx(0.125) and found[3, 4] == 0.0
    assert numpy.array_equal(found, found.T)


@pytest.mark.long
def test_a_time_that_suffices_for_nothing_is_an_error_and_the_same_plan_goes_on(model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanningError) as refused:
        planned(model, "memory 0.98x", minutes=1e-6, folder=tmp_path / "kept")
    assert (refused.value.code, refused.value.option) == ("no-time", "minutes")
    assert planned(model, "memory 0.98x", folder=tmp_path / "kept", measure=False).planned


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_sites_are_measured_far_from_those_before(count: int) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    assert count < 4 or sorted(order[:4]) == [0, 8, 16, 24]


def test_measurements_of_something_else_are_not_taken(found: ModelPlan, folder: Path, tmp_path: Path) -> None:
    other = llama(num_hidden_layers=1, vocab_size=256)
    with pytest.raises(PlanningError) as refused:
        planned(other, "memory 0.9x", folder=folder)
    assert refused.value.code == "exists" and "model" in refused.value.why and "--force" in refused.value.remedy
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(PlanningError) as refused:
        planned(other, "memory 0.9x", folder=tmp_path)
    assert refused.value.code == "occupied"


def test_measurements_of_another_arithmetic_are_not_taken(found: ModelPlan, model: Any, folder: Path) -> None:
    """The same values in another dtype, or with another kernel, take other times and other bytes."""
    half = copy.deepcopy(model).bfloat16()
    wide = copy.deepcopy(half).float()
    assert hash_weights(half) == hash_weights(wide) and hash_settings(half) != hash_settings(wide)
    wide.config._name_or_path = "elsewhere"
    assert hash_settings(wide) == hash_settings(model)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    with pytest.raises(PlanningError) as refused:
        planned(other, "memory 0.9x", folder=folder)
    assert refused.value.why == "it differs in settings"


def test_measurements_on_more_of_the_text_are_not_taken(found: ModelPlan, model: Any, folder: Path) -> None:
    with pytest.raises(PlanningError) as refused:
        planned(model, "memory 0.9x", folder=folder, tokens=64)
    assert refused.value.why == "it differs in text, or in how many of its tokens are used"


def test_a_decoder_is_timed_where_its_config_names_no_first_token() -> None:
    model = t5()
    model.generation_config.decoder_start_token_id = None
    ids = windows(2, model.config.vocab_size)
    assert costs.seconds_of("decode", model, {"input_ids": ids, "decoder_input_ids": ids}) > 0
