"""The mutants of `benchmarks/mutants` are sound: each finds its place in the sources, and faults that checks see are reported."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutant import ROOT, Mutant, on
from mutants_table import CONTROL, MUTANTS, ORDER, Results, mutant_keys, ordered, page, score, verdict
from sweeping import write_page

from retrofit.passbase.protocol import pass_names

REPORTED = {  # by the check that is to report it
    "altup: the hop goes to the block that the layer works on already": "method",
    "altup: the coefficients of every layer are frozen": "parameters",
    "memory: V begins with ones, not with zeros": "method",
    "sparse-qkv: the convolution's bias is left out": "method",
}


@pytest.mark.parametrize("method", ORDER)
def test_each_mutant_finds_its_text_once(method: str) -> None:
    for mutant in MUTANTS:
        if mutant.method == method:
            assert mutant.mutated() != (ROOT / mutant.path).read_text(encoding="utf-8")


def test_there_are_mutants_of_every_pass_each_with_a_name_of_its_own() -> None:
    assert sorted({mutant.method for mutant in MUTANTS}) == sorted(ORDER) == pass_names()
    assert len(MUTANTS) >= 120
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert all(mutant.trials for mutant in MUTANTS)


def test_a_test_that_is_named_exists() -> None:
    for mutant in MUTANTS:
        if mutant.test:
            path, _, name = mutant.test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), mutant.name


@pytest.mark.parametrize(("old", "times"), [("x", 2), ("z", 0)])
def test_a_mutant_whose_text_is_not_there_once_is_named(tmp_path: Path, old: str, times: int) -> None:
    (tmp_path / "file.py").write_text("x = x\n")
    mutant = Mutant("sum", "file.py", "nothing adds up", old, "y", trials=on("gpt2", "sum"))
    with pytest.raises(ValueError, match=f"nothing adds up.*{times} times"):
        mutant.mutated(tmp_path)


def test_the_score_counts_faults_only() -> None:
    fault = Mutant("sum", "file.py", "a fault", "x", "y", trials=on("gpt2", "sum"), test="tests/one.py::test_one")
    harmless = Mutant("sum", "file.py", "no fault", "x", "y", trials=on("gpt2", "sum"), equivalent="it adds zero")
    missed, seen = {"by": "", "why": ""}, {"by": "function", "why": "3.0"}
    assert score([(fault, seen), (fault, missed), (harmless, missed)]).startswith("1 of 2 ")
    assert verdict(fault, seen) == "function"
    assert verdict(fault, missed) == "passed"  # a test that is named counts where it was run, and failed
    assert "tests/one.py::test_one" in verdict(fault, {**missed, "test": True})
    assert verdict(harmless, missed) == "equivalent: it adds zero"


def test_the_page_says_what_has_not_run_and_what_is_of_earlier_sources() -> None:
    first, second = [mutant for mutant in MUTANTS if mutant.method == "sum"][:2]
    row = {"by": "method", "why": "3.0", "trial": str(first.trials[0]), "key": "1-2"}
    text = page([(first, row), (second, row)], {}, 1, [("sum", second.wrong)])
    others = sum(mutant.method == "sum" for mutant in MUTANTS) - 2
    assert f"`sum` ({others})" in text and "`altup` (45)" not in text.partition("Of earlier sources")[2]
    assert "Of earlier sources, and not made again since, are the results of `sum` (1)." in text
    assert "through 0 of the 1 trials" in text and f"| `sum` | {first.wrong} | method | 3.0 | {first.trials[0]} | 1-2 |" in text
    assert "Not run yet" not in page([(mutant, row) for mutant in MUTANTS], {}, 1, [])


def test_a_run_goes_on_from_its_page_with_what_is_new_or_changed(tmp_path: Path) -> None:
    keys = {task: key for task, key in mutant_keys().items() if task[0] == "sum"}
    (first, second, third), trial = [mutant for mutant in ordered() if mutant.method == "sum"][:3], "gpt2 sum"
    rows = [
        (first, {"by": "method", "why": "3.0 | 4.0", "trial": trial, "key": keys["sum", first.wrong]}),
        (second, {"by": "", "why": "", "trial": "", "test": True, "key": keys["sum", second.wrong].partition("-")[0] + "-earlier"}),
        (third, {"by": "", "why": "", "trial": "", "key": "changed-" + keys["sum", third.wrong].partition("-")[2]}),
    ]
    refused = {"by": "apply", "why": "it does not fit", "trial": trial, "refused": True, "key": "0-0"}
    control = {("sum", f"{CONTROL} {trial}"): refused}
    for path in (tmp_path / "page.json", tmp_path / "page.md"):
        write_page(path, page(rows, control, 1, []))
        selected = {"only": "", "passed": False, "again": False, "sources": False}
        results = Results(argparse.Namespace(results=tmp_path / "none", output=path, **selected))
        known = {"sum: " + mutant.wrong: row for mutant, row in rows} | {f"sum: {CONTROL} {trial}": refused}
        assert {name: {field: results.rows[name][field] for field in row} for name, row in known.items()} == known
        assert set(keys) - set(results.waiting(keys)) == {("sum", first.wrong), ("sum", second.wrong)}
        assert set(keys) - set(results.waiting(keys, sources=True)) == {("sum", first.wrong)}


@pytest.mark.long
def test_mutants_are_reported_and_the_sources_as_they_are_are_not(tmp_path: Path) -> None:
    names = {mutant.name for mutant in MUTANTS} & REPORTED.keys()
    assert names == REPORTED.keys()
    pattern = "|".join(f"^{name}$" for name in (*names, ".*: control .*"))
    folders = (ROOT / "benchmarks/mutants", ROOT / "benchmarks/coverage", ROOT / "tests", os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    results, output = tmp_path / "results.json", tmp_path / "page.md"
    script = [sys.executable, str(ROOT / "benchmarks/mutants/mutants_table.py"), "--only", pattern]
    done = subprocess.run(
        [*script, "--results", str(results), "-o", str(output)], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(results.read_text())
    controls = {name for name in rows if ": control " in name}
    assert {name: rows[name]["by"] for name in rows.keys() - controls} == REPORTED, done.stdout
    assert {rows[name]["by"] for name in controls} == {""}, done.stdout
    assert {f"{name.partition(':')[0]}: control {rows[name]['trial']}" for name in REPORTED} == controls
    assert not output.exists()  # of some mutants there is no page
