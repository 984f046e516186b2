"""Plans of tiny models: what is predicted is what is rewritten, an interrupted plan goes on, refusals say why."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.plans import FFN, HEAD, QKV, TARGETS, planned, windows
from support.refusals import refused
from support.tiny_models import llama, t5
from torch import Tensor, nn

import retrofit
from retrofit.anatomy.inspection import inspect
from retrofit.cli import main
from retrofit.errors import PlanningError
from retrofit.inputs.calibration import Calibration
from retrofit.inputs.model_memory import own_bytes
from retrofit.passbase.protocol import parse_spec
from retrofit.planning import costs, measuring
from retrofit.planning.model_plan import ModelPlan
from retrofit.planning.planner import Planner
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
from retrofit.training.teaching import hash_settings, hash_weights

# ── What is predicted and what is ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_recipe_keeps_the_target_and_its_memory_is_what_was_predicted(found: ModelPlan, model: Any) -> None:
    for one, most in zip(found.planned, (0.98, 0.74), strict=True):
        rewritten = retrofit.apply(copy.deepcopy(model), *one.passes, calibration=windows(), verify=False)
        counted = own_bytes(rewritten) / own_bytes(model)
        assert counted <= most
        assert one.predicted.costs["memory"] == pytest.approx(counted, abs=1e-12)
        assert one.measured is not None and one.measured.costs["memory"] == pytest.approx(counted, abs=1e-12)
    mild, hard = (one.predicted for one in found.planned)
    assert mild.distance < hard.distance


def test_what_was_measured_together_is_not_predicted_otherwise(found: ModelPlan, folder: Path) -> None:
    """The last choice was measured before it became the plan."""
    kept = json.loads((folder / "measured.json").read_text())["values"]
    together = [value["distance"] for name, value in kept.items() if name.startswith("together ")]
    assert all(one.predicted.distance in together for one in found.planned)


def test_a_plan_loses_no_more_than_a_setting_in_all_layers_that_reaches_its_target(
    found: ModelPlan, model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the solver chooses badly."""
    shutil.copytree(folder, tmp_path / "kept")
    monkeypatch.setattr(Planner, "choice", lambda self, target: frozenset(range(len(self.sites))))
    least = min(found.uniform, key=lambda one: one.worth.distance)
    (one,) = planned(model, "memory 0.99x", folder=tmp_path / "kept", measure=False).planned
    assert least.worth.costs["memory"] <= 0.99
    assert one.predicted.distance == pytest.approx(least.worth.distance)


def test_a_choice_that_later_timings_put_just_out_of_reach_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six layers reach the first target, until four are timed for the second and each is found to save a little less."""
    shares = {6: 0.4, 2: 0.8, 4: 0.64, 5: 0.55}
    timed: list[int] = []

    def share(self: measuring.Measurements, replacements: Any, quantity: str) -> float:
        timed.append(len(replacements))
        self.kept.measure(f"dense {quantity}", lambda: 1.0)
        return shares[len(replacements)]

    monkeypatch.setattr(measuring.Measurements, "share", share)
    deep = llama(vocab_size=256, num_hidden_layers=6)
    mild, hard = planned(deep, ["decode 1.25x", "decode 1.66x"], passes=[QKV], measure=False).planned
    assert [len(one.layers[0].depths) for one in (mild, hard)] == [3, 5]
    assert 3 not in timed
    assert mild.predicted.costs["decode"] <= 0.8


def test_the_tables_and_the_file_say_the_same(found: ModelPlan, tmp_path: Path) -> None:
    one = found.planned[0]
    found.save(one, tmp_path / "plan.json")
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["recipe"] == list(one.recipe)
    assert kept["notes"]["predicted"]["costs"] == dict(one.predicted.costs)
    assert [point["spec"] for point in kept["notes"]["uniform"]] == [short_spec(parse_spec(spec)) for spec in (QKV, HEAD)]
    assert all(spec in str(found) for spec in one.recipe)
    assert f"{one.predicted.distance:.4f} predicted, {one.measured.distance:.4f} measured" in str(found)  # type: ignore[union-attr]


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


# ── Going on ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── A limited time ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def never_ending(spec: str) -> Any:
    """`build_variant`, which for one candidate computes on, and takes what stops it for a failure of its own if it can."""
    build = measuring.build_variant

    def built(dense: nn.Module, candidate: Any, *given: Any, **named: Any) -> Any:
        while candidate.spec() == parse_spec(spec).spec() and named.get("fit", True):
            with contextlib.suppress(Exception):
                torch.ones(8).sum()
        return build(dense, candidate, *given, **named)

    return built


def test_minutes_limit_the_whole_plan_and_what_they_do_not_suffice_for_is_left_out(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "build_variant", never_ending(QKV))
    began = time.monotonic()
    found = planned(model, "memory 0.98x", minutes=0.8, folder=tmp_path / "kept")
    assert time.monotonic() - began < 48
    assert found.left_out[short_spec(parse_spec(QKV))].startswith(measuring.NOT_TRIED)
    assert [one.spec for one in found.uniform] == [short_spec(parse_spec(HEAD))]
    assert found.planned[0].predicted.costs["memory"] <= 0.98


def test_a_candidate_of_which_some_sites_were_measured_can_be_chosen(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = measuring.Measurements.measure_alone

    def one_only(self: measuring.Measurements, number: int, index: int) -> dict[str, Any]:
        if self.candidates[number].name == "sparse-qkv" and index:
            raise costs.OutOfTime
        return alone(self, number, index)

    monkeypatch.setattr(measuring.Measurements, "measure_alone", one_only)
    found = planned(model, "memory 0.98x", minutes=10, folder=tmp_path / "kept", measure=False)
    assert found.left_out.keys() == {short_spec(parse_spec(QKV))}
    assert [one.sampled for one in found.uniform] == [(0, 0), (0, 0)]  # both were measured in all layers
    monkeypatch.undo()
    assert planned(model, "memory 0.98x", folder=tmp_path / "kept", measure=False).left_out == {}


class Clock:
    """A clock that goes on only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


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
    whole = planned(deep, "memory 0.96x", passes=[QKV], minutes=1e9, folder=tmp_path / "kept", measure=False)
    assert whole.uniform[0].held_out is not None and whole.left_out == {}
    assert whole.uniform[0].worth.distance == pytest.approx(setting.worth.distance, rel=0.5)


def test_a_target_out_of_reach_names_what_the_candidates_take_and_lose(model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanningError) as refused:
        planned(model, "memory 0.01x", folder=tmp_path / "kept", measure=False)
    assert all(short_spec(parse_spec(spec)) in refused.value.why for spec in (QKV, HEAD))


def test_values_between_those_known_are_on_a_line_of_logarithms() -> None:
    assert measuring.between({0: 1.0, 4: 16.0}, 2) == pytest.approx(4.0)
    assert measuring.between({1: 2.0, 3: 8.0}, 7) == pytest.approx(8.0)
    assert math.isnan(measuring.between({}, 1))


def test_sites_that_were_not_measured_have_the_mean_cosine_of_those_that_were() -> None:
    cosines = numpy.eye(5)
    cosines[0, 1] = cosines[1, 0] = 0.5
    cosines[0, 3] = cosines[3, 0] = 0.25
    found = measuring.with_means(cosines, [0, 0, 0, 1, 1], [0, 1, 3])
    assert found[0, 2] == found[2, 1] == 0.5 and numpy.allclose(found.diagonal(), 1.0)
    assert found[2, 3] == found[0, 4] == pytest.approx(0.125) and found[3, 4] == 0.0
    assert numpy.array_equal(found, found.T)


def test_a_time_that_suffices_for_nothing_is_an_error_and_the_same_plan_goes_on(model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanningError) as refused:
        planned(model, "memory 0.98x", minutes=1e-6, folder=tmp_path / "kept")
    assert "minutes" in refused.value.remedy
    assert planned(model, "memory 0.98x", folder=tmp_path / "kept", measure=False).planned


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_sites_are_measured_far_from_those_before(count: int) -> None:
    order = measuring.spread(count)
    assert sorted(order) == list(range(count))
    assert count < 4 or sorted(order[:4]) == [0, 8, 16, 24]


def test_measurements_of_something_else_are_not_taken(found: ModelPlan, folder: Path, tmp_path: Path) -> None:
    other = llama(num_hidden_layers=1, vocab_size=256)
    with refused(PlanningError, code="exists") as error:
        planned(other, "memory 0.9x", folder=folder)
    assert "model" in error.value.why and "--force" in error.value.remedy
    (tmp_path / "note.txt").write_text("mine")
    with refused(PlanningError, str(tmp_path), code="occupied"):
        planned(other, "memory 0.9x", folder=tmp_path)


def test_measurements_of_another_arithmetic_are_not_taken(found: ModelPlan, model: Any, folder: Path) -> None:
    """The same values in another dtype, or with another kernel, take other times and other bytes."""
    half = copy.deepcopy(model).bfloat16()
    wide = copy.deepcopy(half).float()
    assert hash_weights(half) == hash_weights(wide) and hash_settings(half) != hash_settings(wide)
    wide.config._name_or_path = "elsewhere"
    assert hash_settings(wide) == hash_settings(model)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    with refused(PlanningError, code="exists") as error:
        planned(other, "memory 0.9x", folder=folder)
    assert "settings" in error.value.why and "text" not in error.value.why


def test_measurements_on_more_of_the_text_are_not_taken(found: ModelPlan, model: Any, folder: Path) -> None:
    with refused(PlanningError, code="exists") as error:
        planned(model, "memory 0.9x", folder=folder, tokens=64)
    assert "text" in error.value.why and "settings" not in error.value.why


# ── Candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_decoder_is_timed_where_its_config_names_no_first_token() -> None:
    model = t5()
    model.generation_config.decoder_start_token_id = None
    ids = windows(2, model.config.vocab_size)
    assert costs.seconds_of("decode", model, {"input_ids": ids, "decoder_input_ids": ids}) > 0


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


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_the_command_writes_a_recipe_that_apply_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrofit.save(llama(vocab_size=256, max_position_embeddings=24), tmp_path / "model.pt")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"the {number}th line says {number * number}." for number in range(60)))
    given = [str(tmp_path / "model.pt"), "--calibrate", str(text)]
    arguments = ["plan", *given, "--target", "memory 0.99x", "--pass", "sparse-qkv", "--variant", "mult", "--output", "keep"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "memory 0.99x" in out and "measured" in out and "model.plan.json" in out
    assert (tmp_path / "model.plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*arguments, "--json", "--force"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["recipe"] == json.loads((tmp_path / "model.plan.json").read_text())["recipe"]
    assert (
        main(["apply", *given, "--recipe", str(tmp_path / "model.plan.json"), "--no-verify", "-o", str(tmp_path / "out.pt")]) == 0
    )
    applied = retrofit.recipe(retrofit.load(tmp_path / "out.pt"))
    assert applied is not None and [one.spec() for one in applied] == data["recipe"]
    assert main([*arguments, "--target", "memory 0.1x", "--force"]) == 2
    told = capsys.readouterr()
    assert "'memory 0.1x'" in told.err and "model.plan.memory-0.99x.json" in told.out
    assert json.loads((tmp_path / "model.plan.memory-0.99x.json").read_text())["recipe"] == data["recipe"]
    assert not (tmp_path / "model.plan.memory-0.1x.json").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--target", "decode 0x"], "above zero"),
        (["--target", "memory 0.9x", "--minutes", "0"], "--minutes 0"),
        (["--target", "memory 0.9x", "--tokens", "0"], "--tokens 0"),
        (["--target", "memory 0.9x", "--pass", "sparse-fnn"], "did you mean sparse-ffn"),
    ],
)
def test_bad_usage_is_told_before_any_work(more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    (tmp_path / "text.txt").write_text("text")
    assert main(["plan", str(tmp_path / "model.pt"), "--calibrate", str(tmp_path / "text.txt"), *more]) == 2
    assert says in capsys.readouterr().err
