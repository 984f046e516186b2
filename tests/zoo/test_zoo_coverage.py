"""The coverage script: what it counts, what it writes, and that one failing architecture does not sink the rest."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import assessment
import coverage_table
import pytest
import torch
from coverage_table import CELLS, failed, find, summary, table
from support import zoo
from sweeping import LONG, Row, Task, assessed, cell, line, read_page, write_page
from written_page import results_of


def row(name: str, **cells: str) -> Row:
    return {"id": name, "transformer": True, "dense": "", **dict.fromkeys(CELLS, "yes"), **cells}


ROWS = [
    row("causal/one"),
    row("causal/two", generates="no: other tokens", dense="generates other tokens with a cache than without"),
    row("masked/three", exact="refused: a | b\nand c", generates="—", trains="—", saved="—"),
    row("image/four", captured="dense cannot: timm is missing", **dict.fromkeys(CELLS[1:], "—")),
    row("causal/six", exact="yes (3e-07), recycled only: too wide"),
    row("causal/five", trains="dense cannot: no loss", generates="dense cannot: ValueError"),
]


def test_the_summary_counts_what_could_hold() -> None:
    text = "\n".join(summary(ROWS))
    assert "6 architectures, of which 5 can be built" in text
    assert "| captured | 5 | 5 | 100.0 % |" in text
    assert "| AltUp exact | 3 | 5 | 60.0 % |" in text
    assert "| AltUp exact or exact with `embedding=recycled`, where a residual stack" in text
    assert "| 4 | 5 | 80.0 % |" in text
    assert "| generates, where rewritten | 2 | 3 | 66.7 % |" in text
    assert "| trains, where rewritten | 3 | 3 | 100.0 % |" in text


def test_the_table_has_a_line_and_as_many_cells_for_every_architecture() -> None:
    page = table(ROWS, {"causal/one": {"memory": "yes: 4 sites", "sparse-ffn": "refused: no | site"}, "causal/two": {}})
    first, rest = page.split("## The other passes")
    lines = [line for line in first.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [one["id"] for one in ROWS]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(CELLS) + 2}
    assert "- `causal/two`: generates other tokens" in first
    assert "| `causal/one` | refused: no \\| site | yes: 4 sites |" in rest
    assert "| memory | 1 | 1 | 0 | 0 | 0 | 0 |" in rest and "`causal/two`" not in rest


def test_a_cell_is_one_short_line() -> None:
    assert cell("a\nb | <c>") == "a b \\| &lt;c>"
    assert len(cell("x" * 1000)) == 220


def test_a_worker_that_takes_too_long_costs_its_own_architecture_only() -> None:
    tasks = [("image/timm_wrapper", "altup"), ("image/dinat", "memory")]
    found = dict(assessed(tasks, 1, 0.0, find, failed))
    assert found[tasks[0]]["captured"] == "no: took more than 0 s"
    assert found[tasks[1]]["cell"] == "no: took more than 0 s"


@pytest.mark.long
def test_rows_come_out_of_workers() -> None:
    found = dict(assessed([("image/timm_wrapper", "altup"), ("image/timm_wrapper", "memory")], 2, 300.0, find, failed))
    reason = f"dense cannot: {zoo.skip_reason(zoo.entry('image/timm_wrapper'))}"
    assert found["image/timm_wrapper", "altup"]["captured"] == found["image/timm_wrapper", "memory"]["cell"] == reason


def test_another_function_is_not_called_exact() -> None:
    entry = zoo.entry("causal/gpt2")
    model = zoo.build(entry)
    before = assessment.Behaviour.of(entry, model)
    assert assessment.agreement(before, assessment.Behaviour.logits_of(entry, model)) == "yes (0e+00)"
    assert assessment.generation(before, assessment.Behaviour.tokens_of(entry, model)) == "yes"
    with torch.no_grad():
        model.get_parameter("transformer.wte.weight")[zoo.FIRST_FREE_ID :] += 0.1 * torch.randn(64)
    assert assessment.agreement(before, assessment.Behaviour.logits_of(entry, model)).startswith("no: ")


def test_a_parameter_without_gradient_is_reported() -> None:
    entry = zoo.entry("causal/gpt2")
    model = zoo.build(entry)
    lonely = torch.nn.Parameter(torch.zeros(2))
    assert assessment.train_a_few_steps(entry, model, [("lonely.p", lonely)]) == "lonely.p gets no finite gradient"
    assert assessment.train_a_few_steps(entry, model, list(model.named_parameters())) == "yes"


@pytest.mark.parametrize(
    ("name", "expected"), [("blocks.0.p", True), ("blocks.0.g", True), ("wte", True), ("fc", False), ("new.w", False)]
)
def test_new_parameters_are_coefficients_and_grown_tables(name: str, expected: bool) -> None:
    dense = {"wte": torch.Size([9, 4]), "fc": torch.Size([4, 4])}
    shape = {"wte": (9, 8)}.get(name, (4, 4))
    assert assessment.is_new(name, torch.nn.Parameter(torch.zeros(shape)), dense) is expected


def test_results_are_kept_between_runs(tmp_path, monkeypatch, capsys) -> None:
    results, output = tmp_path / "kept.json", tmp_path / "coverage.md"
    options = ["--only", "timm", "--passes", "^altup|memory$", "--results", str(results), "-o", str(output)]
    monkeypatch.setattr("sys.argv", ["coverage_table.py", *options])
    requested: list[list[Task]] = []

    def answer(tasks: list[Task], *_: object):
        requested.append(tasks)
        yield from ((task, row(task[0]) if task[1] == "altup" else {"cell": "yes"}) for task in tasks)

    monkeypatch.setattr(coverage_table, "assessed", answer)
    assert coverage_table.main() == coverage_table.main() == 0
    results.unlink()  # what the page says counts
    assert coverage_table.main() == 0
    assert requested == [[("image/timm_wrapper", "altup"), ("image/timm_wrapper", "memory")], [], []]
    assert "`image/timm_wrapper`" in output.read_text()
    assert "1 architectures" in capsys.readouterr().out


def test_a_page_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = Path(__file__).parents[2] / "benchmarks" / "results" / "coverage.json"
    results = results_of(written, CELLS)
    rows = [one["altup"] for one in results.values()]
    cells = {name: {key: found["cell"] for key, found in one.items() if key != "altup"} for name, one in results.items()}
    again = tmp_path / "coverage.json"
    write_page(again, table(rows, cells))
    assert results_of(again, CELLS) == results
    old, new = (re.sub(r"transformers [\d.]+, torch [\d.]+", "", read_page(page)).splitlines() for page in (written, again))
    assert len(rows) > 300 and new == old


def test_a_long_table_is_data_and_comes_back(tmp_path: Path) -> None:
    rows = [line([f"`{number}`", cell('a | b <c>, "d"\ne')]) for number in range(LONG)]
    long = "\n".join([line(["name", "what"]), line(["---", "---"]), *rows])
    short = "\n".join([line(["short"]), line(["---"]), line(["table"])])
    text = "\n\n".join(["# Page\n\nText.", long, short, "## And more", long, ""])
    write_page(tmp_path / "page.json", text)
    assert read_page(tmp_path / "page.json") == text
    assert (tmp_path / "page.json").stat().st_size < 300
    for name in ("page", "page_and_more"):
        with open(tmp_path / f"{name}.csv", newline="") as file:
            assert list(csv.reader(file))[1] == ["`0`", 'a | b <c>, "d" e']
    write_page(tmp_path / "page.md", text)
    assert (tmp_path / "page.md").read_text() == read_page(tmp_path / "page.md") == text
