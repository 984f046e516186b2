"""The command line around the work: exit codes, messages, outputs, terminals."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrofit.anatomy.anatomy import format_change
from retrofit.anatomy.parts import NearMiss, Site
from retrofit.cli import build_parser, main
from retrofit.cli.failures import report
from retrofit.cli.outputs import check_output, default_output, name_in_errors
from retrofit.cli.pass_options import named_passes
from retrofit.cli.terminal import Progress, print_table, printable
from retrofit.errors import CheckpointError, RetrofitError, VerificationError
from retrofit.passbase.protocol import Plan, parse_recipe
from retrofit.passbase.report_text import listed, plan_rows
from retrofit.progress import Milestone, Note, fold_lines

COMMANDS = ("apply", "inspect", "verify", "export", "train", "passes")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """`retrofit passes` raises whatever the test says."""

    def fail_with(error: BaseException) -> None:
        def run(arguments: object) -> int:
            raise error

        monkeypatch.setattr("retrofit.cli.inspect.list_passes", run)

    return fail_with


# Help and usage


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python(f"""
        import sys
        from retrofit.cli import main
        code = main({arguments})
        heavy = sorted({{"torch", "transformers", "numpy", "matplotlib", "networkx", "onnx", "rich"}} & set(sys.modules))
        sys.exit(f"imported {{heavy}}" if heavy else code)
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert "retrofit" in done.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(command in listed for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "passes"])
def test_help_and_errors_say_what_a_model_may_be(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = (".pt checkpoint", "Hugging Face or sentence-transformers directory", ".gguf, .pt2 or .onnx file")
    assert main([command, "--help"]) == 0
    described = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines end at hyphens
    assert all(form in described for form in forms)
    needed = {"apply": ["--pass", "sum"], "train": ["--data", "text.txt", "--steps", "1"]}.get(command, [])
    for model in ([], [str(tmp_path / "nothing")]):
        assert main([command, *needed, *model]) == 2
        said = capsys.readouterr().err
        assert all(form in said for form in forms)


def test_help_wins_over_what_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "--pass", "altup", "--k", "2", "--help"]) == 0
    assert "--calibrate FILE" in capsys.readouterr().out


def test_no_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["aply"], "did you mean apply?"),
        (["apply", "model.pt"], "add --pass NAME"),
        (["apply", "--pass", "altpu", "model.pt"], "did you mean altup?"),
        (["apply", "--pass", "altup"], "required: MODEL"),
        (["apply", "--pass", "altup", "--kk", "2", "model.pt"], "did you mean --k?"),
        (["apply", "--pass", "altup", "--seed", "x", "model.pt"], "invalid int value: 'x'"),
        (["apply", "--pass", "altup", "--seed", str(2**64), "model.pt"], "is not between -2^63 and 2^64 - 1"),
        (["inspect", "--jsn", "model.pt"], "did you mean --json?"),
        (["inspect", "a.pt", "b.pt"], "unexpected argument 'b.pt'"),
        (["apply", "--pass", "sparse-ffn", "--scale", "maybe", "model.pt"], "why: MODEL is maybe"),
        (["apply", "--pass", "altup", "--k", "two", "model.pt"], "use an integer ≥ 2: K, d-wide blocks"),
        (
            ["apply", "--pass", "altup", "--extra", "4", "--embedding", "recycled", "model.pt"],
            "leave init and embedding at their defaults",
        ),
        (["train", "--steps", "2", "--data", "text.txt", "model.pt"], "put it before options that accept several values (--data)"),
        (["export", "--native", "model.pt"], "put it before options that accept several values (--native)"),
        (["inspect", "--config", "nowhere", "model.pt"], "--config nowhere: no such file or directory"),
        (["verify", "--agains=dense.pt", "model.pt"], "did you mean --against?"),
        (["passes", "altpu"], "did you mean altup?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("retrofit: error: ")
    assert says in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("command", [["apply", "--pass", "altup"], ["inspect"], ["verify"]], ids=lambda command: command[0])
def test_a_model_that_is_not_there(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, str(tmp_path / "gpt2")]) == 2
    assert f"{tmp_path / 'gpt2'}: no such file or directory" in capsys.readouterr().err


# Failures


def out_of_memory() -> RuntimeError:
    """What torch raises for more than there is."""
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("there was room")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            RetrofitError("the thing", why="the reason", remedy="the remedy"),
            2,
            ["the thing", "why: the reason", "fix: the remedy"],
        ),
        (VerificationError("two logits differ"), 1, ["two logits differ"]),
        (VerificationError("it failed", why="graph   passed\ncache   failed"), 1, ["why:\n    graph   passed\n    cache   failed"]),
        (OSError(errno.ENOSPC, "", "/there/model.pt"), 2, ["/there/model.pt", "no space left on device", "free some space"]),
        (PermissionError(errno.EACCES, "", "/there/model.pt"), 2, ["/there/model.pt", "permission denied"]),
        (MemoryError(), 2, ["out of memory"]),
        (out_of_memory(), 2, ["out of memory", "DefaultCPUAllocator"]),
        (ValueError("odd"), 2, ["ValueError: odd", "--debug"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_is_a_message_and_an_exit_code(failing, error, code, says, capsys: pytest.CaptureFixture[str]) -> None:
    failing(error)
    assert main(["passes"]) == code
    message = capsys.readouterr().err
    assert message.startswith("retrofit: ")
    assert all(part in message for part in says)
    assert "Traceback" not in message
    assert main(["passes", "--debug"]) == main(["--debug", "passes"]) == code
    assert capsys.readouterr().err.count("Traceback") == 2


def test_an_interrupt_is_one_line(failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyboardInterrupt())
    main(["passes"])
    assert capsys.readouterr().err == "retrofit: interrupted\n"


class Finaliser:
    """A signal arrives while this is taken away: Python drops what is raised there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


def dropped(number: int) -> None:
    """The signal's exception is dropped, and the work goes on for a while."""
    Finaliser(number)
    for _ in range(1000):
        time.sleep(0.01)


def replaced(number: int) -> None:
    """Something else is raised in place of the signal's exception, as by code in C."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        raise ImportError("initialization failed") from None


@pytest.mark.parametrize("work", [dropped, replaced])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_exception_is_lost_interrupts(
    number: int, work: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: Any) -> int:
        work(number)
        return 0

    monkeypatch.setattr("retrofit.cli.inspect.list_passes", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    try:
        assert main(["passes"]) == 128 + number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and sys.unraisablehook is before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert capsys.readouterr().err == "retrofit: interrupted\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_unwinds_the_work(name: str, tmp_path: Path) -> None:
    code = f"""
        import pathlib, signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
        from retrofit.cli import inspect, main
        def run(arguments):
            try:
                print("working", flush=True)
                time.sleep(60)
            finally:
                pathlib.Path({str(tmp_path / "unwound")!r}).touch()
        inspect.list_passes = run
        sys.exit(main(["passes"]))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as work:
        assert work.stdout is not None and work.stdout.readline() == "working\n"
        work.send_signal(signal.Signals[name])
        _, message = work.communicate(timeout=30)
    assert work.returncode == 128 + signal.Signals[name]
    assert message == "retrofit: interrupted\n"
    assert (tmp_path / "unwound").exists()


def test_a_reader_that_leaves_is_no_error() -> None:
    code = """
        import sys
        from retrofit.cli import inspect, main
        def run(arguments):
            for number in range(200_000):
                print(number)
            return 0
        inspect.list_passes = run
        sys.exit(main(["passes"]))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as work:
        assert work.stdout is not None and work.stderr is not None
        assert work.stdout.readline() == "0\n"
        work.stdout.close()
        assert work.stderr.read() == ""
    assert work.returncode == 141


def test_a_terminal_without_arrows_still_gets_its_table() -> None:
    code = "from retrofit.cli import inspect, main; inspect.list_passes = lambda arguments: print('a → b') or 0; main(['passes'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stdout.split() == [b"a", b"?", b"b"]


# Outputs


def test_the_result_goes_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "hf_dir"
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert default_output(Path("a/model.pt"), ["altup"]) == Path("a/model.altup.pt")
    assert default_output(Path("a/model.v1.pt"), ["altup", "sparse-ffn"]) == Path("a/model.v1.altup.sparse-ffn.pt")
    assert default_output(Path("a/pytorch_model.bin"), ["altup"]) == Path("a/pytorch_model.altup.pt")
    assert default_output(Path(f"{directory}/"), ["altup", "sum"]) == tmp_path / "hf_dir.altup.sum"
    assert default_output(Path("."), ["altup"]) == tmp_path / "hf_dir.altup"
    assert default_output(Path("../hf_dir/.."), ["altup"]) == tmp_path.with_name(f"{tmp_path.name}.altup")


def test_an_output_that_exists_needs_force(tmp_path: Path) -> None:
    output = tmp_path / "model.altup.pt"
    assert check_output(output, force=False) == output
    output.touch()
    assert check_output(output, force=True) == output
    with pytest.raises(CheckpointError, match="exists already"):
        check_output(output, force=False)


def test_an_output_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        check_output(tmp_path / "nowhere" / "model.pt", force=True)


def test_a_picture_has_the_name_of_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path)
    for words in (["inspect", model, "--svg", "a.png"], ["compare", model, f"{model}/..", "--data", "x", "--picture", "a.svg"]):
        assert main(words) == 2
        assert "fix: call it a.png.svg" in (said := capsys.readouterr().err) or "fix: call it a.svg.png" in said


@pytest.mark.parametrize("words", [["apply", "--pass", "sum"], ["train", "--data", "text.txt", "--steps", "1"]])
def test_a_graph_is_not_rewritten_for_a_file_that_cannot_hold_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").touch()
    for output in ("x.pt", "x"):
        assert main([*words, str(tmp_path / "model.onnx"), "-o", str(tmp_path / output)]) == 2
        assert "fix: name a .pt2 or .onnx file with -o" in capsys.readouterr().err


def test_a_failure_to_write_names_the_output() -> None:
    with pytest.raises(OSError) as caught, name_in_errors(Path("out.pt")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "out.pt"
    with pytest.raises(FileNotFoundError) as caught, name_in_errors(Path("out.pt")):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "in.txt")
    assert caught.value.filename == "in.txt"


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


# Recipes


@pytest.mark.parametrize("command", ["apply", "inspect"])
def test_passes_and_recipes_are_taken_in_the_order_given(command: str, tmp_path: Path) -> None:
    (tmp_path / "two").write_text("sum\naltup(k=3)\n")
    (tmp_path / "one.json").write_text('[{"pass": "sparse-loss", "modules": 4}]')
    given = ["--pass", "memory", "--rank", "2", "--recipe", str(tmp_path / "two"), "--pass", "sparse-ffn", "--sparsity", "8"]
    arguments = build_parser().parse_args([command, *given, f"--recipe={tmp_path / 'one.json'}", "model.pt"])
    expected = ("memory(rank=2)", "sum", "altup(k=3)", "sparse-ffn(sparsity=8)", "sparse-loss(modules=4)")
    assert named_passes(arguments) == parse_recipe(expected)


@pytest.mark.parametrize("command", ["apply", "inspect"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"altup(k=2)\naltpu\n", ["recipe, line 2", "unknown pass 'altpu'"]),
        (b'["sum", "sum(x=1)"]', ["recipe, pass 2", "unknown option"]),
        (b"\x1b[2Jsum", ["recipe, line 1", r"\x1b"]),
        (b"\xff\xfe\x00", ["is not a recipe", "it is not text"]),
        (b"", ["names no pass"]),
        (None, ["recipe", "no such file"]),
    ],
)
def test_a_recipe_that_cannot_be_read_is_bad_input(
    command: str, content: bytes | None, says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe"
    if content is not None:
        file.write_bytes(content)
    assert main([command, "--recipe", str(file), "model.pt"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in says)
    assert "\x1b" not in said and "unexpected error" not in said and "fix: " in said


def test_a_plan_is_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--pass", "sum", "--svg", "model.svg", "model.pt"]) == 2
    said = capsys.readouterr().err
    assert "--svg with --pass" in said and "fix: drop the passes" in said


@pytest.mark.parametrize("more", [[], ["--pass", "sum"]], ids=["anatomy", "plan"])
def test_inspect_replaces_nothing_but_a_drawing(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *more, "--force", "model.pt"]) == 2
    said = capsys.readouterr().err
    assert "--force has no effect without --svg" in said and "add --svg FILE" in said


# Names that are more than names

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9bm\r\u202e\u2028\udc80"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
