"""What is shown: progress on a terminal and in a log, tables, folded lines, and names that hold control characters."""

from __future__ import annotations

import dataclasses
import errno
import io
import re
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrofit.anatomy import format_change
from retrofit.anatomy.parts import NearMiss, Site
from retrofit.cli import main
from retrofit.cli.failures import report
from retrofit.cli.terminal import Progress, print_table, printable
from retrofit.errors import RetrofitError
from retrofit.passbase.protocol import Plan
from retrofit.passbase.report_text import listed, plan_rows
from retrofit.progress import Milestone, Note, fold_lines

# Progress and tables


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HIDE, SHOW, CLEAR = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"  # the cursor; the line


def test_progress_shows_the_stage_and_the_time_on_a_terminal_and_clears_them() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with Progress(stream) as stage:
            stage("reading [bold]model.pt")
            time.sleep(0.3)
            stage("capturing")
            time.sleep(0.3)
    shown = terminal.getvalue()
    assert shown.index("reading [bold]model.pt") < shown.index("capturing")
    assert "0:00:00" in shown
    assert (shown.count(HIDE), shown.count(SHOW)) == (1, 1)
    assert "capturing" not in shown.rpartition(CLEAR)[2]
    assert file.getvalue().splitlines() == ["retrofit: reading [bold]model.pt", "retrofit: capturing"]


def test_a_log_has_a_line_for_each_stage_and_each_milestone() -> None:
    file = io.StringIO()
    with Progress(file) as stage:
        for step in range(1, 41):
            stage(f"step {step}/40  loss {3 - step / 40:.4f}  0:{step:02d} left")
            if step % 20 == 0:
                stage(Milestone(f"step {step}/40: held-out loss {3 - step / 40:.4f}"))
        stage("writing model.pt\x1b[2J")
    lines = file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["step", "step", "step", "writing"]
    assert [line.split()[-1] for line in lines[1:3]] == ["2.5000", "2.0000"] and "\x1b" not in lines[3]


def test_progress_keeps_to_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    with Progress(terminal) as stage:
        stage("rewriting with " + "x" * 100)
        time.sleep(0.3)
    frames = [frame.splitlines()[0] for frame in terminal.getvalue().split(CLEAR) if "rewriting" in frame]
    assert frames and all(frame.endswith("…") and len(frame) == 30 for frame in frames)


def test_the_spinner_ends_with_the_work_that_fails() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="odd"), Progress(terminal):
        raise ValueError("odd")
    shown = terminal.getvalue()
    assert SHOW in shown
    time.sleep(0.3)
    assert terminal.getvalue() == shown


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_goes_on_where_the_terminal_is_gone() -> None:
    with Progress(Gone()) as stage:
        stage("working")


def printed(rows: Sequence[Sequence[str]], stream: io.StringIO, **options: Any) -> str:
    print_table(rows, stream=stream, **options)
    return stream.getvalue()


@given(
    st.lists(st.tuples(st.text("ab []:", max_size=5), st.text("cd", min_size=1, max_size=9), st.text("ef", min_size=1)), min_size=1)
)
def test_columns_line_up(rows: list[tuple[str, str, str]]) -> None:
    lines = printed(rows, io.StringIO()).splitlines()
    starts = {len(line) - len(row[-1]) for line, row in zip(lines, rows, strict=True)}
    assert len(starts) == 1
    assert all(line.endswith(row[-1]) for line, row in zip(lines, rows, strict=True))


def test_what_is_piped_is_whole_and_plain_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    cell = "one [red]two[/red] :smile: " * 100
    rows = [("verified", "passed"), ("a much longer name than the others", cell.strip())]
    lines = printed(rows, io.StringIO(), headings=("name", "what")).splitlines()
    assert lines == [
        "name                                what",
        "verified                            passed",
        f"a much longer name than the others  {cell.strip()}",
    ]


def test_a_terminal_gets_colour_unless_it_is_told_not_to_and_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [("function", "passed", "word " * 30)]
    green = "\x1b[32m"
    coloured = printed(rows, Terminal())
    assert green in coloured
    bare = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured.splitlines()]
    assert len(bare) > 3 and max(map(len, bare)) <= 40
    assert "".join(bare).count("word") == 30
    monkeypatch.setenv("NO_COLOR", "1")
    assert green not in printed(rows, Terminal())


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_still_gets_all_of_every_cell(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [
        ("recipe", "pass 1", "no such pass " * 5, "altup "),
        ("only in the second: 4", "model.layers.0.g", "2 float32 " * 3, "Δ" * 9),
    ]
    shown = re.sub(r"\x1b\[[\d;]*m", "", printed(rows, Terminal()))
    assert max(map(len, shown.splitlines())) <= columns
    for letter in "pgΔ2":
        assert shown.count(letter) == sum(cell.count(letter) for row in rows for cell in row)


@pytest.mark.parametrize(
    ("lines", "folded"),
    [
        ([], []),
        (["h.0: kept 91%", "h.1: kept 95%"], ["h.0: kept 91%", "h.1: kept 95%"]),
        (["h.0: kept 91%", "h.1: kept 95.5%", "h.2: kept 9%"], ["3 × h.0–2: kept 9–95.5%"]),
        ([f"layers.{i}.mlp: 1 of 4" for i in (0, 2, 4)], ["3 × layers.*.mlp: 1 of 4"]),
        ([f"s.{i}.l.{j}: x" for i in (0, 1) for j in (0, 1)], ["4 × s.0–1.l.0–1: x"]),
        (["a.1: 1,000 new", "said once", "a.2: 20 new", "a.3: 3,000 new"], ["3 × a.1–3: 20–3,000 new", "said once"]),
        (["same"] * 4, ["4 × same"]),
        (["h.0: up", "h.1: down", "h.2: up and down"], ["h.0: up", "h.1: down", "h.2: up and down"]),
    ],
)
def test_lines_of_one_kind_fold_into_one_that_counts_them(lines: list[str], folded: list[str]) -> None:
    assert fold_lines(lines) == folded


def test_a_formula_with_a_term_for_each_layer_is_folded() -> None:
    terms = ["embed, (K−1)·V·d = 64", *(f"h.{i}: p and g = 6" for i in range(12))]
    plan = Plan((Site("h.0", "widened"),), new_parameters=136, formula=" + ".join(terms))
    adds = dict(plan_rows("altup()", True, plan))["adds"]
    assert adds == "136 parameters: embed, (K−1)·V·d = 64 + 12 × h.0–11: p and g = 6"
    whole = dataclasses.replace(plan, formula="12·(d·r + r·d_ff + d_ff) = 12·(4·2 + 2·8 + 8) + e = 384")
    assert dict(plan_rows("ffn()", True, whole))["adds"].endswith(whole.formula)


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    rows = listed("notes", [f"{letter}: said" for letter in "abcdefghijkl"])
    assert rows[:2] == [("notes", "a: said"), ("", "b: said")]
    assert rows[-1] == ("", "and 4 more")
    assert listed("notes", []) == []


def test_every_line_of_an_account_is_a_row() -> None:
    hostile = "h.0\n  fix: pay"
    notes = tuple(Note("energy kept", name, {"kept": 0.5}, ".1%") for name in (hostile, "h.1", "h.2"))
    missed = (NearMiss(hostile, "too narrow", "use N = 2"),)
    table = io.StringIO()
    print_table(plan_rows("ffn()", False, Plan((), near_misses=missed, notes=notes)), stream=table)
    assert [line.strip() for line in table.getvalue().splitlines()[2:]] == [
        "leaves alone   h.0\\n  fix: pay: too narrow",
        "fix: use N = 2",
        "notes          energy kept       kept",
        "h.0\\n  fix: pay  50.0%",
        "h.1              50.0%",
        "h.2              50.0%",
    ]


@given(st.lists(st.sampled_from(["h.0: x", "h.1: x", "h.7: x", "y 1.5", "y 2", "z"])))
def test_folding_counts_every_line(lines: list[str]) -> None:
    counted = [re.match(r"(\d+) × ", line) for line in fold_lines(lines)]
    assert sum(int(found[1]) if found else 1 for found in counted) == len(lines)


def test_a_change_says_by_how_much() -> None:
    assert format_change(1000, 1500) == "1,000 → 1,500 (+50.0%)"
    assert format_change(1000, 1000) == "1,000 → 1,000 (+0.0%)"
    assert format_change(0, 7) == "0 → 7"


# Names that are more than names

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9bm\r\u202e\u2028\udc80"


@given(text=st.text() | st.text(alphabet=HOSTILE + "ab\n"), lines=st.booleans())
def test_what_is_printed_moves_no_cursor(text: str, lines: bool) -> None:
    shown = printable(text, lines=lines)
    hidden = {one for one in shown if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert hidden <= ({"\n"} if lines else set())
    if not any(unicodedata.category(one)[0] in "CZ" and one != " " for one in text):
        assert shown == text


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_names_in_errors_and_tables_are_written_out(stream: type[io.StringIO]) -> None:
    name = f"layer{HOSTILE}\n  fix: pay"
    error, table = stream(), stream()
    report(RetrofitError(f"{name} is odd", why=f"{name} was read", remedy=f"rename {name}"), error)
    print_table([("site", name), (name, "kept")], stream=table)
    for printed in (error.getvalue(), table.getvalue()):
        left = re.sub(r"\x1b\[[\d;]*m", "", printed) if stream is Terminal else printed  # our own colours
        assert not set(left) & set(HOSTILE) - set("[2J]0;ownedm")
        assert "\\x1b[2J" in left
    assert "\n  fix: pay is odd" not in error.getvalue()
    assert len(table.getvalue().splitlines()) == 2 or stream is Terminal  # which wraps


def test_a_model_whose_file_name_is_hostile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / f"a{HOSTILE[:5]}\nretrofit: all is well")]) == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "\nretrofit: all is well" not in printed
