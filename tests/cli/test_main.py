"""The command line around the work: exit codes, messages, outputs, terminals."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.tiny_models import llama

from retrofit.cli import build_parser, dispatch, main
from retrofit.cli.outputs import check_output, default_output, name_in_errors
from retrofit.cli.pass_options import named_passes
from retrofit.errors import CheckpointError, RetrofitError, VerificationError
from retrofit.passbase.protocol import parse_recipe

HEAVY = {"torch", "transformers", "numpy", "matplotlib", "networkx", "onnx", "rich"}


def commands() -> list[str]:
    (names,) = (action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return list(names)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """`retrofit passes` raises whatever the test says."""

    def fail_with(error: BaseException) -> None:
        def run(arguments: object) -> int:
            raise error

        monkeypatch.setattr("retrofit.cli.inspect.list_passes", run)

    return fail_with


# Help and usage


def test_help_imports_nothing_heavy() -> None:
    asked = [["--help"], ["--version"], *([command, "--help"] for command in commands())]
    done = python(f"""
        import sys
        from retrofit.cli import main
        for arguments in {asked}:
            code, heavy = main(arguments), sorted({HEAVY} & set(sys.modules))
            if code or heavy:
                sys.exit(f"{{arguments}} returned {{code}} and imported {{heavy}}")
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"usage: retrofit {command} " in done.stdout for command in commands())


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--pass sparse-ffn --sparsity 7", "divides no size"),
        ("--pass altup --k 2 --pass altup --k 4", "given twice"),
        ("--pass sequence-altup --k 0", "k=0"),
        ("--pass memory --nonsense 1", "unknown option"),
    ],
)
def test_what_options_and_headers_decide_is_refused_without_importing_transformers(options: str, said: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    done = python(f"""
        import sys
        from retrofit.cli import main
        code = main(["apply", *{options.split()}, {str(tmp_path / "model")!r}])
        sys.exit("transformers is imported" if "transformers" in sys.modules else code)
    """)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_help_names_every_command_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(commands()) > 10 and main(["--help"]) == 0
    described = re.findall(r"^ {4}([a-z-]+)(?: {2,}|\n {8,})\w", capsys.readouterr().out, re.MULTILINE)
    assert described == commands()


@pytest.mark.parametrize("command", ["apply", "inspect", "verify", "export", "train"])
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
    assert f"{tmp_path / 'gpt2'}: " in capsys.readouterr().err


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
        _, message = work.communicate(timeout=300)
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
    with refused(CheckpointError, code="exists"):
        check_output(output, force=False)


def test_an_output_without_a_directory_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "nowhere", code="missing"):
        check_output(tmp_path / "nowhere" / "model.pt", force=True)


WRITING = {
    "apply": ["apply", "--pass", "altup", "model", "-o", "OUT.pt"],
    "stream": ["apply", "--stream", "--pass", "altup", "model", "-o", "OUT"],
    "undo": ["undo", "model", "-o", "OUT"],
    "plan": ["plan", "model", "--target", "decode 1.5x", "--calibrate", "text", "-o", "OUT.json"],
    "export": ["export", "model", "-o", "OUT.onnx"],
    "native": ["export", "model", "--native", "-o", "OUT"],
    "convert": ["convert", "model", "-o", "OUT"],
    "bundle": ["bundle", "model", "-o", "OUT"],
    "teach": ["teach", "model", "--data", "text", "-o", "OUT"],
    "train": ["train", "model", "--data", "text", "--steps", "1", "-o", "OUT"],
    "merge": ["merge", "model", "-o", "OUT"],
    "inspect": ["inspect", "model", "--svg", "OUT.svg"],
    "compare": ["compare", "model", "text", "--data", "text", "--picture", "OUT.png"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that takes no files, as Linux has")
@pytest.mark.parametrize(("place", "code"), [("/proc", "unwritable"), ("text", "missing")])
@pytest.mark.parametrize("command", WRITING)
def test_a_place_that_takes_no_files_is_refused_before_any_work(
    command: str, place: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()  # empty: reading it would fail
    (Path("model") / "adapter_config.json").write_text("{}")
    Path("text").write_text("some text")
    with refused(CheckpointError, f"{place}/there", code=code) as error:
        dispatch([argument.replace("OUT", f"{place}/there") for argument in WRITING[command]])
    assert error.value.why and error.value.remedies
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "text"]


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
    assert "--svg" in capsys.readouterr().err
