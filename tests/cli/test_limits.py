"""Commands where something runs out, or somebody else is at work: a message, an exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.command_server import CommandServer
from support.commands import WORKS, given, require_no_complaint

import retrofit
from retrofit.cli import main
from retrofit.errors import RetrofitError

WRITE = ("cannot be written", "cannot be read or written", "cannot be saved", "cannot be exported")
SHORT = ["bundle"]  # of every run of the suite


@pytest.mark.first(len(SHORT))
@pytest.mark.parametrize("name", [*SHORT, *(one for one in WORKS if one not in SHORT)])
def test_a_disk_that_is_full(name: str, server: CommandServer, materials: Path, tmp_path: Path) -> None:
    """No file may grow beyond some bytes, few or many: the same error as that of a full disk, at another write each time."""
    work = WORKS[name]
    for size in (100, 20_000) if name in SHORT else (10, 1000, 6000, 20_000, 50_000):
        ended = server.run(*given(work, materials, tmp_path), limits={"RLIMIT_FSIZE": size})
        if ended.code == 0:
            shutil.rmtree(tmp_path / work.output) if (tmp_path / work.output).is_dir() else (tmp_path / work.output).unlink()
            continue
        require_no_complaint(ended)
        assert ended.code == 2 and any(word in ended.err for word in WRITE), (size, ended.err)
        assert "fix: none" not in ended.err
        assert {one.name for one in tmp_path.iterdir()} <= {work.unfinished}, (size, ended.err)
    assert server.run(*given(work, materials, tmp_path)).code == 0


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
def test_a_machine_without_memory(name: str, server: CommandServer, materials: Path, tmp_path: Path) -> None:
    for megabytes in (4, 24, 64, 128):
        ended = server.run(*given(WORKS[name], materials, tmp_path), limits={"RLIMIT_AS": megabytes << 20})
        assert "Traceback" not in ended.err, (megabytes, ended)
        assert ended.code in (0, 2), (megabytes, ended)
        if ended.code == 0:
            return
        assert {one.name for one in tmp_path.iterdir()} <= {WORKS[name].unfinished}, (megabytes, ended.err)


@pytest.mark.long
@pytest.mark.parametrize("name", ["apply to a file", "stream", "bundle", "train", "teach"])
def test_two_runs_to_one_output(name: str, server: CommandServer, materials: Path, tmp_path: Path) -> None:
    with CommandServer() as other, ThreadPoolExecutor(2) as both:
        command = given(WORKS[name], materials, tmp_path)
        one, two = both.map(lambda running: running.run(*command), (server, other))
    assert 0 in (one.code, two.code) and {one.code, two.code} <= {0, 2}, (one, two)
    for ended in (one, two):
        require_no_complaint(ended)
        refusals = ("exists", "being written", "holds an earlier run", "exists already")
        assert ended.code == 0 or any(word in ended.err for word in refusals), ended.err
    assert not [one for one in os.listdir(tmp_path) if one.startswith(".retrofit")]
    if name in ("apply to a file", "stream"):
        retrofit.load(tmp_path / WORKS[name].output)


@pytest.mark.long
def test_a_reader_that_leaves_while_a_model_is_printed(materials: Path) -> None:
    """`retrofit inspect model | head -1`."""
    command = [sys.executable, "-m", "retrofit", "inspect", "--stream", "--json", str(materials / "dense")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as work:
        assert work.stdout is not None and work.stderr is not None
        work.stdout.close()
        said = work.stderr.read()
    assert work.returncode == 141 and all(line.startswith("retrofit: ") for line in said.splitlines()), said  # stages, no trace


@pytest.mark.long
@pytest.mark.parametrize(
    "encoding", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_a_terminal_of_another_encoding(encoding: dict[str, str], materials: Path, tmp_path: Path) -> None:
    model = tmp_path / "ö→model"
    shutil.copytree(materials / "dense", model)
    for command, code in ((["inspect", str(model)], 0), (["inspect", str(tmp_path / "→")], 2), (["passes", "altup"], 0)):
        done = subprocess.run([sys.executable, "-m", "retrofit", *command], capture_output=True, env={**os.environ, **encoding})
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr


# ── Texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\n\t\n",
    "binary": bytes(range(256)) * 9,
    "zeros": bytes(5000),
    "one line": b"one line without an end",
    "half a character": "größer".encode()[:4],
    "with a mark": "\ufeffone line".encode(),
}
READERS = {
    "train": ["train", "{dense}", "--data", "{text}", "--steps", "1", "--length", "64", "-o", "{out}"],
    "teach": ["teach", "{dense}", "--data", "{text}", "--length", "64", "-o", "{out}"],
    "compare": ["compare", "{dense}", "{dense}", "--data", "{text}"],
    "plan": [
        "plan",
        "{dense}",
        "--calibrate",
        "{text}",
        "--target",
        "loss +1",
        "--pass",
        "sparse-ffn",
        "--sparsity",
        "4",
        "-o",
        "{out}",
    ],
    "apply": ["apply", "--pass", "sparse-ffn", "--sparsity", "4", "--calibrate", "{text}", "--no-verify", "{dense}", "-o", "{out}"],
}


@pytest.mark.first(2)
@pytest.mark.parametrize("command", READERS)
def test_a_text_that_is_none(command: str, materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    for name, content in TEXTS.items():
        if command in ("train", "teach", "plan") and name == "zeros":
            continue  # as good a text as another
        (tmp_path / "text").write_bytes(content)
        places = {"dense": materials / "dense", "text": tmp_path / "text", "out": tmp_path / "out" / "result"}
        code = main([word.format(**places) for word in READERS[command]])
        said = capsys.readouterr().err
        if code == 0:  # `apply` may be fitted on little
            assert command in ("apply", "compare")
            shutil.rmtree(tmp_path / "out" / "result", ignore_errors=True)
            continue
        assert code == 2 and "fix: " in said and "unexpected error" not in said, (name, said)
        assert os.listdir(tmp_path / "out") == [], (name, said)


# ── Models ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("values", [(float("nan"), float("inf")), (float("inf"), float("nan"))])
def test_weights_that_are_no_numbers_in_every_format(
    values: tuple[float, float], materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(materials / "dense", folder)
    state = load_file(folder / "model.safetensors")
    damaged = state["model.layers.1.mlp.up_proj.weight"]
    damaged[0, 0] = values[0]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    damaged[0, 0] = values[1]
    content = torch.load(materials / "model.pt", weights_only=True)
    torch.save({**content, "state_dict": state}, tmp_path / "model.pt")
    for source in (folder, tmp_path / "model.pt"):
        for options in ([], ["--no-verify"], ["--stream"] if source is folder else []):
            assert main(["apply", "--pass", "sum", *options, str(source), "-o", str(tmp_path / "out")]) == 2
            said = capsys.readouterr().err
            assert "model.layers.1.mlp.up_proj.weight" in said and "fix: " in said
    assert sorted(os.listdir(tmp_path)) == ["model", "model.pt"]


def test_a_model_without_layers_or_parameters() -> None:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=0, num_attention_heads=4, max_position_embeddings=32
    )
    ids = {"input_ids": torch.arange(6).view(1, 6)}
    shapeless: list[tuple[Any, Any]] = [
        (transformers.LlamaForCausalLM(config).eval(), ids),
        (torch.nn.Identity(), {"input": torch.ones(2, 3)}),
        (torch.nn.Sequential(), {"input": torch.ones(2, 3)}),
    ]
    for model, given_inputs in shapeless:
        for spec in ("sparse-ffn(sparsity=4)", "altup(k=2)"):
            before = json.dumps([(name, type(one).__name__) for name, one in model.named_modules()])
            with pytest.raises(RetrofitError) as error:
                retrofit.apply(model, spec, example_inputs=given_inputs)
            assert error.value.remedy and json.dumps([(n, type(one).__name__) for n, one in model.named_modules()]) == before
