"""`benchmarks/learning/pays.py` at a tiny size: it goes on where it was stopped, runs nothing twice, and its page says what ran."""

from __future__ import annotations

import dataclasses
import json
import site
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest
from sweeping import read_page

from retrofit.passbase.replaying import added_parameters

ROOT = Path(__file__).parent.parent
ONLY = ("--only", "dense", "dense, 1.25*", "altup(k=2)")


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("benchmarks", "benchmarks/learning"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import pays

    return pays


@pytest.fixture
def rehearse(pays: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(folder: str, start: str, *more: str) -> dict[str, Any]:
        """The figures after a call with a text of its own."""
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "sources.txt").write_text("\0".join(topics[name] for name in sorted(topics)))
        pays.main([start, "--rehearse", "--seeds", "1", "--rounds", "2", "--folder", str(place), *more])
        return json.loads((place / "results.json").read_text())

    return run


def losses(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (found["steps"], found["curve"], found["loss"])
        for key, found in figures.items()
        if "loss" in found and "steps" in found
    }


@pytest.mark.long
def test_it_goes_on_where_it_was_stopped(
    pays: Any, rehearse: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rehearse("whole", "demo", *ONLY)
    assert len(losses(whole)) == 3
    import pays_starts

    steps = 0

    def ending() -> float:
        """The time, which is over after some steps."""
        nonlocal steps
        steps += 1
        return time.monotonic() + (1e6 if steps > 30 else 0)  # in the first run, which follows the 16 steps of the dense model

    clock = SimpleNamespace(monotonic=ending, process_time=time.process_time)
    monkeypatch.setattr(pays_starts, "time", clock)
    monkeypatch.setattr(pays, "time", clock)
    stopped = rehearse("stopped", "demo", "--hours", "1", *ONLY)
    assert not losses(stopped)
    (checkpoint,) = (tmp_path / "stopped/demo").glob("*.run/checkpoint-*")
    assert 0 < int(checkpoint.name.partition("-")[2]) < 16 and checkpoint.parent.name != "dense.run"
    steps = -(10**6)
    # Killed after the last step, before the figures are kept.
    monkeypatch.setattr(pays, "trained", lambda *given: pays_starts.trained(*given)["no such figure"])
    with pytest.raises(KeyError):
        rehearse("stopped", "demo", "--only", "dense")
    monkeypatch.setattr(pays, "trained", pays_starts.trained)
    assert losses(rehearse("stopped", "demo", *ONLY)) == losses(whole)
    assert not [*(tmp_path / "stopped/demo").glob("*.run/checkpoint-*")][1:]  # but for the dense model's, nothing is left
    # Nothing is run again, and a page of what there is can be made.
    monkeypatch.setattr(pays, "trained", None)
    page = tmp_path / "page.json"
    assert losses(rehearse("stopped", "demo", *ONLY, "-o", str(page))) == losses(whole)
    rows = [line for line in read_page(page).splitlines() if line.startswith("| `altup(k=2)` | 1 |")]
    assert len(rows) == 1 and f"{whole['demo | altup(k=2) | seed 0']['loss']:.4f}" in rows[0]
    (tmp_path / "stopped/sources.txt").write_text("\0".join(topics[name] * 2 for name in sorted(topics)))
    with pytest.raises(SystemExit):  # of another text
        pays.main(["demo", "--rehearse", "--folder", str(tmp_path / "stopped")])


@pytest.mark.long
def test_runs_take_as_many_seconds_as_the_dense_one(
    pays: Any, rehearse: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to run on a GPU: a tokenizer, bfloat16, runs that are shortened by what their steps take."""
    monkeypatch.setitem(pays.STARTS, "SmolLM2", dataclasses.replace(pays.STARTS["tokens"], equal_seconds=True, bf16=True))
    monkeypatch.setattr(pays.Runs, "step_time", lambda self, model: 1.6 if added_parameters(model) else 1.0)
    figures = rehearse("tokens", "SmolLM2", "--only", "dense", pays.NGRAMS)
    dense, ngrams = (figures[f"SmolLM2 | {arm} | seed 0"] for arm in ("dense", pays.NGRAMS))
    assert (dense["steps"], ngrams["steps"]) == (16, 10) and ngrams["curve"][-1][0] == 10
    assert dense["curve"][0] == ngrams["curve"][0]  # an exact start, in bfloat16 too
    assert ngrams["new at"] and not dense["new at"]  # as the pass proposes
    (ahead,) = pays.Figures("SmolLM2", figures).ahead_in_time(pays.Arm(pays.NGRAMS))
    assert ahead == pytest.approx(dense["loss"] - ngrams["loss"]) and ahead


@pytest.mark.parametrize(("time", "ahead"), [(1.1, [0.01]), (1.0, [0.05]), (0.9, [0.05]), (1.6, [])])
def test_the_dense_loss_at_equal_time_is_between_two_runs(pays: Any, time: float, ahead: list[float]) -> None:
    arm, dense, longer = pays.Arm("altup(k=2)"), pays.Arm(seeds=3), pays.Arm(longer=1.25, seeds=3)
    run = {"spec": "", "steps": 1}
    values = {
        pays.key_of("demo", dense, 0): {**run, "loss": 1.0},
        pays.key_of("demo", longer, 0): {**run, "loss": 0.9},
        pays.key_of("demo", arm, 0): {**run, "spec": arm.spec, "loss": 0.95},
        pays.cost_key("demo", arm.spec): {"time": time},
    }
    assert pays.Figures("demo", values).ahead_in_time(arm) == pytest.approx(ahead)


def test_a_seed_without_a_longer_dense_run_takes_what_that_brings_the_others(pays: Any) -> None:
    dense, longer = pays.Arm(seeds=3), pays.Arm(longer=1.25, seeds=3)
    ends = {(dense, 0): 1.0, (longer, 0): 0.9, (dense, 1): 1.2, (longer, 1): 1.0, (dense, 2): 1.1}
    values = {pays.key_of("demo", arm, seed): {"spec": "", "steps": 1, "loss": loss} for (arm, seed), loss in ends.items()}
    found = pays.Figures("demo", values).dense
    assert found[0] == {1.0: 1.0, 1.25: 0.9} and found[2] == pytest.approx({1.0: 1.1, 1.25: 0.95})


def test_the_page_compares_the_default_with_the_best(pays: Any) -> None:
    losses = {"": 1.0, pays.NGRAMS: 0.9, "memory(lookup=ngram, heads=2)": 0.88, "memory": 0.97}
    values: dict[str, Any] = {}
    for spec, loss in losses.items():
        arm = next(arm for arm in pays.ARMS["demo"] if arm.spec == spec and arm.new is None)
        values[pays.key_of("demo", arm, 0)] = {"spec": spec, "steps": 1, "loss": loss}
        values[pays.cost_key("demo", spec)] = {"time": 1.0}
    text = " ".join(pays.verdict(pays.Figures("demo", values)))
    assert "heads=2" in text and "+0.1200" in text and "+0.0200" in text


def test_the_best_two_are_of_two_kinds(pays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"memory": 1.0, "altup(k=2)": 1.3, "memory(layers=1)": 0.9, "altup(k=4)": 1.2}
    monkeypatch.setitem(
        pays.ARMS, "demo", (pays.Arm(), *map(pays.Arm, losses), pays.Arm("altup(k=2)", new=9), pays.Arm(pays.BEST_TWO))
    )
    values = {pays.key_of("demo", pays.Arm(spec), 0): {"spec": spec, "loss": loss} for spec, loss in losses.items()}
    assert pays.best_two("demo", values) == ["memory(layers=1)", "altup(k=4)"]
    values.pop(pays.key_of("demo", pays.Arm("altup(k=2)"), 0))
    assert pays.best_two("demo", values) is None  # not all have run


def test_copies_are_left_out_of_the_sources(pays: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import texts

    lines = [f"value_{number} = compute_something({number})" for number in range(60)]
    kept = {"one.py": lines, "other.py": [f"# {line} is another line" for line in lines]}
    left = {
        "copy.py": [*lines[:40], *(f"print({number}, 'of its own')" for number in range(20))],
        "short.py": lines[:3],
        "table.py": [*lines[:1], "x" * 500, *(line.upper() for line in lines)],
        "__editable___project.py": [line[::-1] for line in lines],
    }
    for folder, files in {"lib": kept, "lib/site-packages": {"again.py": lines}, "site": left}.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, content in files.items():
            (tmp_path / folder / name).write_text("\n".join(content))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
    found = dict(texts.environment_files())
    assert len(found) == 2 and "other.py" in found and set(found) & {"one.py", "copy.py"}
    assert list(found) == [name for name, _ in texts.environment_files()]
