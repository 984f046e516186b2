"""The command line around the work: exit codes, messages, outputs, terminals."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrofit.cli import main, progress
from retrofit.cli.tables import change, columns
from retrofit.cli.writing import beside, free, naming
from retrofit.errors import CheckpointError, RetrofitError, VerificationError

COMMANDS = ("apply", "inspect", "verify", "train", "passes")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """`retrofit passes` raises whatever the test says."""

    def fail_with(error: BaseException) -> None:
        def run(arguments: object) -> int:
            raise error

        monkeypatch.setattr("retrofit.cli.passes.run", run)

    return fail_with


# Help and usage


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python(f"""
        import sys
        from retrofit.cli import main
        code = main({arguments})
        heavy = sorted({{"torch", "transformers", "numpy", "matplotlib", "networkx", "onnx"}} & set(sys.modules))
        sys.exit(f"imported {{heavy}}" if heavy else code)
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert "retrofit" in done.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(command in listed for command in COMMANDS)


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
        (["apply", "model.pt"], "name one with --pass"),
        (["apply", "--pass", "altpu", "model.pt"], "did you mean altup?"),
        (["apply", "--pass", "altup"], "required: MODEL"),
        (["apply", "--pass", "altup", "--kk", "2", "model.pt"], "did you mean --k?"),
        (["apply", "--pass", "altup", "--seed", "x", "model.pt"], "invalid int value: 'x'"),
        (["inspect", "--jsn", "model.pt"], "did you mean --json?"),
        (["inspect", "a.pt", "b.pt"], "unexpected argument 'b.pt'"),
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
    assert f"{tmp_path / 'gpt2'}: there is no such file or directory" in capsys.readouterr().err


# Failures


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            RetrofitError("the thing", why="the reason", remedy="the remedy"),
            2,
            ["the thing", "why: the reason", "way out: the remedy"],
        ),
        (VerificationError("two logits differ"), 1, ["two logits differ"]),
        (OSError(errno.ENOSPC, "", "/there/model.pt"), 2, ["/there/model.pt", "no space left on device", "free some space"]),
        (PermissionError(errno.EACCES, "", "/there/model.pt"), 2, ["/there/model.pt", "permission denied"]),
        (MemoryError(), 2, ["out of memory"]),
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_unwinds_the_work(name: str, tmp_path: Path) -> None:
    code = f"""
        import pathlib, signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
        from retrofit.cli import main, passes
        def run(arguments):
            try:
                print("working", flush=True)
                time.sleep(60)
            finally:
                pathlib.Path({str(tmp_path / "unwound")!r}).touch()
        passes.run = run
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
        from retrofit.cli import main, passes
        def run(arguments):
            for number in range(200_000):
                print(number)
            return 0
        passes.run = run
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
    code = "from retrofit.cli import main, passes; passes.run = lambda arguments: print('a → b') or 0; main(['passes'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stdout.split() == [b"a", b"?", b"b"]


# Outputs


def test_the_result_goes_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "hf_dir"
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert beside(Path("a/model.pt"), ["altup"]) == Path("a/model.altup.pt")
    assert beside(Path("a/model.v1.pt"), ["altup", "sparse-ffn"]) == Path("a/model.v1.altup.sparse-ffn.pt")
    assert beside(Path("a/pytorch_model.bin"), ["altup"]) == Path("a/pytorch_model.altup.pt")
    assert beside(Path(f"{directory}/"), ["altup", "sum"]) == tmp_path / "hf_dir.altup.sum"
    assert beside(Path("."), ["altup"]) == tmp_path / "hf_dir.altup"
    assert beside(Path("../hf_dir/.."), ["altup"]) == tmp_path.with_name(f"{tmp_path.name}.altup")


def test_an_output_that_exists_needs_force(tmp_path: Path) -> None:
    output = tmp_path / "model.altup.pt"
    assert free(output, force=False) == output
    output.touch()
    assert free(output, force=True) == output
    with pytest.raises(CheckpointError, match="exists already"):
        free(output, force=False)


def test_an_output_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        free(tmp_path / "nowhere" / "model.pt", force=True)


def test_a_failure_to_write_names_the_output() -> None:
    with pytest.raises(OSError) as caught, naming(Path("out.pt")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "out.pt"
    with pytest.raises(FileNotFoundError) as caught, naming(Path("out.pt")):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "in.txt")
    assert caught.value.filename == "in.txt"


# Progress and tables


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_the_stage_on_a_terminal_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TURN", 0.001)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with progress.Progress(stream) as stage:
            stage("reading model.pt")
            time.sleep(0.05)
            stage("capturing")
            time.sleep(0.05)
    shown = terminal.getvalue()
    assert shown.index("reading model.pt") < shown.index("capturing")
    assert "\n" not in shown
    assert shown.endswith(progress.CLEAR)
    assert file.getvalue() == ""


def test_progress_keeps_to_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TURN", 0.001)
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    with progress.Progress(terminal) as stage:
        stage("rewriting with " + "x" * 100)
        time.sleep(0.05)
    lines = terminal.getvalue().split(progress.CLEAR)
    assert max(map(len, lines)) == 19


def test_the_spinner_ends_with_the_work_that_fails() -> None:
    stage = progress.Progress(Terminal())
    with pytest.raises(ValueError, match="odd"), stage:
        raise ValueError("odd")
    assert not stage.spinner.is_alive()


@given(
    st.lists(st.tuples(st.text("ab ", max_size=5), st.text("cd", min_size=1, max_size=9), st.text("ef", min_size=1)), min_size=1)
)
def test_columns_line_up(rows: list[tuple[str, str, str]]) -> None:
    lines = columns(rows).split("\n")
    starts = {len(line) - len(row[-1]) for line, row in zip(lines, rows, strict=True)}
    assert len(starts) == 1
    assert all(line.endswith(row[-1]) for line, row in zip(lines, rows, strict=True))


def test_a_change_says_by_how_much() -> None:
    assert change(1000, 1500) == "1,000 → 1,500 (+50.0%)"
    assert change(1000, 1000) == "1,000 → 1,000 (+0.0%)"
    assert change(0, 7) == "0 → 7"
