"""The command line at work on real, tiny models: what it refuses, and what it leaves behind when it fails."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.command_server import CommandServer
from support.commands import APPLY, RUN, contents

from retrofit.cli import main
from retrofit.errors import VerificationError

UNTOUCHED = """
from retrofit import rewriting
rewriting.apply_reported = lambda model, *passes, **options: rewriting.Applied(model, (), None, 1, 1, 1, 1)
"""
STALLED = """
import os, time
def stall(*arguments, **options):
    print("writing", flush=True)
    time.sleep(60)
os.replace = os.rename = os.link = stall
"""


# What it refuses


class Trap:
    """A pickle that makes a directory when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize("command", [["apply", "--pass", "altup"], ["inspect"], ["verify"]], ids=lambda command: command[0])
@pytest.mark.parametrize("form", ["pickle", "torch", "inside a checkpoint", "directory"])
def test_a_malicious_pickle_does_not_run(command: list[str], form: str, here: Path, refused: Callable[..., str]) -> None:
    if form == "pickle":
        Path("trap.pt").write_bytes(pickle.dumps(Trap()))
    elif form == "torch":
        torch.save(Trap(), "trap.pt")
    elif form == "inside a checkpoint":
        checkpoint = torch.load("model.pt", weights_only=True)
        torch.save({**checkpoint, "recipe": Trap()}, "trap.pt")
    else:
        shutil.copytree("gpt2", "trap.pt")
        Path("trap.pt/model.safetensors").unlink()
        torch.save({"transformer.wte.weight": Trap()}, "trap.pt/pytorch_model.bin")
    said = refused(*command, "trap.pt")
    assert [line for line in said.splitlines() if line.startswith("retrofit: error: ")] and said.count("retrofit: ") == 2
    assert "trap.pt" in said
    assert not Path("sprung").exists()


@pytest.mark.parametrize("damage", ["empty", "truncated", "noise", "text", "no config", "config is noise", "truncated weights"])
def test_a_damaged_model_is_an_error_that_names_it(damage: str, here: Path, refused: Callable[..., str]) -> None:
    whole, broken = Path("model.pt").read_bytes(), Path("broken.pt")
    if damage in ("no config", "config is noise", "truncated weights"):
        shutil.copytree("gpt2", broken)
        weights = broken / "model.safetensors"
        {
            "no config": lambda: (broken / "config.json").unlink(),
            "config is noise": lambda: (broken / "config.json").write_bytes(b"\x00{"),
            "truncated weights": lambda: weights.write_bytes(weights.read_bytes()[:1000]),
        }[damage]()
    else:
        half = len(whole) // 2
        broken.write_bytes({"empty": b"", "truncated": whole[:half], "noise": os.urandom(999), "text": b"a model"}[damage])
    assert "broken.pt" in refused(*APPLY, "broken.pt")


def test_a_config_of_another_model_is_refused(refused: Callable[..., str]) -> None:
    said = refused(*APPLY, "--config", "narrow", "bare.pt")
    assert "bare.pt" in said
    assert "why:" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--k", "two"], ["k='two'", "integer"]),
        (["--k", "1"], ["k=1", "below 2"]),
        (["--selection", "random"], ["selection=random", "alternating"]),
        (["--layers-of-nothing", "2"], ["unknown option --layers-of-nothing", "retrofit passes altup"]),
    ],
    ids=" ".join,
)
def test_an_option_out_of_range_is_named(arguments: list[str], says: list[str], refused: Callable[..., str]) -> None:
    said = refused(*APPLY, *arguments, "model.pt")
    assert all(part in said for part in says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bundle", "model.pt"], ["model.pt", "retrofit.bundle(retrofit.load(path), directory)"]),
        (["inspect", "gpt2/config.json"], ["gpt2/config.json", "use the Hugging Face directory, gpt2"]),
        (["inspect", "gpt2/model.safetensors"], ["gpt2/model.safetensors", "use the Hugging Face directory, gpt2"]),
        (["compare", "model.pt", "other.pt", "--data", "bare.pt", "--lm-eval-limit", "3"], ["without --lm-eval", "TASK"]),
        (["apply", "--pass", "sparse-ffn", "--sparsity", "4", "--tokenizer", "gpt2", "gpt2"], ["--tokenizer without --calibrate"]),
        (["apply", "--pass", "sparse-ffn", "--sparsity", "4", "--tokens", "9", "gpt2"], ["--tokens without --calibrate"]),
        (
            ["apply", "--pass", "memory", "--lookup", "ngram", "--tokens", "9", "--tokenizer", "gpt2", "gpt2"],
            ["--tokens without --calibrate"],
        ),
        (["apply", "--pass", "memory", "--tokenizer", "gpt2", "gpt2"], ["--tokenizer without --calibrate"]),
    ],
    ids=" ".join,
)
def test_the_fix_is_one_that_the_command_has(arguments: list[str], says: list[str], refused: Callable[..., str]) -> None:
    said = refused(*arguments)
    assert all(part in said for part in says)


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "gguf"])
def test_a_file_that_cannot_be_bundled_says_what_can(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"model.{suffix}"
    file.touch()  # it is not even opened
    assert main(["bundle", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"model.{suffix}" in said and "retrofit apply" in said and "retrofit.load" not in said


def test_a_native_form_of_a_file_goes_into_a_directory(refused: Callable[..., str]) -> None:
    assert "-o" not in refused("export", "model.pt", "--native")  # it is refused for what it is


def test_a_model_compared_with_itself_is_refused_before_it_is_read(refused: Callable[..., str], untouched: None) -> None:
    said = refused("compare", "model.pt", "other.pt", "./model.pt", "--data", "text.txt")
    assert "model.pt" in said and "twice" in said


def test_what_is_no_transformer_is_left_alone(refused: Callable[..., str]) -> None:
    said = refused(*APPLY, "--allow-pickle", "linear.pt")
    assert "why:" in said


def test_a_rewrite_that_fails_its_checks_is_not_written(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **options: object) -> None:
        raise VerificationError("altup(k=2): the logits moved", why="by 3.0")

    monkeypatch.setattr("retrofit.rewriting.apply_reported", failing)
    assert "the logits moved" in refused(*APPLY, "model.pt", code=1)


# What it leaves behind


@pytest.mark.parametrize(("model", "output"), [("model.pt", "out.pt"), ("gpt2", "out")])
def test_a_full_disk_leaves_everything_as_it_was(
    model: str, output: str, here: Path, refused: Callable[..., str], untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        for name in ("replace", "rename", "link"):
            patched.setattr(os, name, full)
        assert output in refused(*APPLY, model, "-o", output)
    with monkeypatch.context() as patched:
        patched.setattr("torch.save", full)
        patched.setattr("safetensors.torch.save_file", full)
        patched.setattr("transformers.modeling_utils.safe_save_file", full)
        said = refused(*APPLY, model, "-o", output)
    assert output in said
    assert "no space left" in said.lower()


@pytest.mark.parametrize(("model", "output"), [pytest.param("model.pt", "out.pt", marks=pytest.mark.long), ("gpt2", "out")])
def test_a_write_that_the_system_stops_leaves_everything_as_it_was(
    model: str, output: str, here: Path, server: CommandServer
) -> None:
    before = contents(here)
    limits = {"RLIMIT_FSIZE": 30_000}  # bytes a file may have: enough for a config, too few for the weights
    done = server.program(UNTOUCHED + RUN, *APPLY, model, "-o", output, limits=limits)
    assert done.code == 2, done.err
    assert output in done.err
    assert "Traceback" not in done.err
    assert contents(here) == before


@pytest.mark.parametrize(
    ("name", "model", "output"),
    [
        pytest.param("SIGINT", "gpt2", "out", marks=pytest.mark.long),
        ("SIGTERM", "model.pt", "out.pt"),
        pytest.param("SIGINT", "model.pt", "out.pt", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_leaves_nothing_half_written(name: str, model: str, output: str, here: Path) -> None:
    before = contents(here)
    heeding = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it may be inherited as ignored
    command = [sys.executable, "-c", heeding + UNTOUCHED + STALLED + RUN, *APPLY, model, "-o", output]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as work:
        assert work.stdout is not None and work.stdout.readline() == "writing\n", work.stderr and work.stderr.read()
        during = contents(here)
        work.send_signal(signal.Signals[name])
        _, message = work.communicate(timeout=300)
    assert during != before, "nothing was being written when the signal came"
    assert (work.returncode, message.splitlines()[-1]) == (128 + signal.Signals[name], "retrofit: interrupted")
    assert contents(here) == before
