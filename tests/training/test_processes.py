"""Several processes that train one model: the losses of one, one result, one voice; also with a teacher, stage by stage."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.refusals import refused
from support.several_processes import run_in_processes
from support.training_runs import SMALL, TEXTS, changed, llama

import retrofit
from retrofit.cli import main
from retrofit.errors import FirstProcessError, TrainingError
from retrofit.training import distillation, processes
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.runs import TrainingRun, last_checkpoint

PROCESSES = 2
SPECS = {  # nothing that draws at random in training, or counts the tokens of a batch: each process has its own draws and tokens
    "sparse-ffn": "sparse-ffn(sparsity=4, temperature=1e-6)",
    "sparse-qkv": "sparse-qkv",
    "shared-moe": "shared-moe(groups=1, capacity=none, balance=0)",
    "sequence-altup": "sequence-altup(k=2, layers=all)",
    "altup": "altup(k=2)",
    "recurrence": "recurrence(rank=4)",
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "anneal, distil": {"align": 0, "anneal": 3, "distil": 0.5},
    "align, hidden states": {"align": 2, "anneal": 0, "distil_hidden": 0.5},
    "own dial": {"align": 0, "anneal": 4, "dial": "own"},
    "in chunks": {"align": 0, "anneal": 0},
}
RUNS = [("sparse-ffn", way) for way in WAYS] + [(case, "anneal, distil") for case in SPECS if case != "sparse-ffn"]
CLOSE = {
    "align, hidden states": 1e-2,  # errors of sites and layers are relative to what each process computed itself
    "shared-moe": 1e-3,  # its router computes in float32 whatever the model is
}


def start_together(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What two processes of the command line did."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    inside = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*command, "-m", "retrofit.cli", *arguments], cwd=folder, env={**os.environ, **inside}, capture_output=True, text=True
    )


@pytest.mark.long
def test_two_processes_train_as_one_does_and_one_of_them_writes_and_speaks(tmp_path: Path) -> None:
    text, model = tmp_path / "text.txt", llama()
    text.write_text(TEXTS[0])
    model.save_pretrained(tmp_path / "dense")
    settings = changed(batch_size=4, steps=4, eval_every=2)
    alone = continue_pretraining(copy.deepcopy(model), TEXTS, settings)
    given = ("--batch-size", "4", "--length", "32", "--lr", "3e-3", "--eval-every", "2", "--device", "cpu", "--data", "text.txt")
    done = start_together("train", "dense", *given, "--steps", "4", "-o", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss") == 1 and not done.stderr.count("Warning"), done.stderr
    run = TrainingRun.read(tmp_path / "out")
    for name in ("losses", "eval_losses"):
        torch.testing.assert_close(torch.tensor(getattr(run, name)), torch.tensor(getattr(alone, name)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights(tmp_path / "out"), weights_after(model, settings), rtol=1e-4, atol=1e-6)
    # One process goes on where two stopped.
    assert last_checkpoint(tmp_path / "out.run") is not None
    resumed = ["train", str(tmp_path / "dense"), *given[:-1], str(text), "--steps", "6", "-o", str(tmp_path / "out")]
    assert main([*resumed, "--resume", "--force"]) == 0
    assert [step for step, _ in TrainingRun.read(tmp_path / "out").eval_losses] == [0, 2, 4, 6]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()  # type: ignore[no-any-return]


def weights_after(model: Any, settings: Any) -> dict[str, torch.Tensor]:
    one = copy.deepcopy(model)
    continue_pretraining(one, TEXTS, settings)
    return one.state_dict()  # type: ignore[no-any-return]


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pretend(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", PROCESSES)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_for_one_process_is_refused_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, rank)
    assert main(["apply", "--pass", "sum", str(tmp_path / "model.pt")]) == 2
    said = capsys.readouterr().err
    assert ("retrofit apply runs in one process; 2 were started" in said) == (rank == 0), said


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_would_say_is_said_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, rank)
    assert main(["train", str(tmp_path / "none.pt"), "--data", str(tmp_path), "--steps", "2"]) == 2
    assert capsys.readouterr().err.count("no such file") == (rank == 0)


def test_a_batch_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count", lambda: 3)
    assert processes.shared_batch(6) == 2
    with refused(TrainingError, "--batch-size 4", "3 processes", option="batch_size") as error:
        processes.shared_batch(4)
    assert error.value.remedy.endswith(" 3")


# ── Every pass, with a teacher ───────────────────────────────────────────────────────────────────────────────────────────────────


def work(rank: int, folder: Path) -> None:
    """What one process does: every case, its numbers in a file; and an error of the first process."""
    with pytest.raises(ValueError if rank == 0 else FirstProcessError):
        processes.in_first(lambda: int("none"))
    for case, way in RUNS:
        (folder / f"{case} {way} {rank}.json").write_text(json.dumps(numbers(case, way, folder)))


def numbers(case: str, way: str, folder: Path) -> dict[str, Any]:
    """The losses of one run."""
    dense, model = (torch.load(folder / f"{name}.pt", weights_only=False) for name in ("dense", case))
    chunk = distillation.CHUNK
    distillation.CHUNK = 1000 if way == "in chunks" else chunk
    try:
        settings = changed(batch_size=4, steps=4, lr=3e-4, eval_every=2, **WAYS[way])
        run = continue_pretraining(model, TEXTS, settings, teacher=dense if WAYS[way] else None)
    finally:
        distillation.CHUNK = chunk
    return {name: getattr(run, name) for name in ("losses", "eval_losses", "alignment", "dense_loss", "start_loss")}


@pytest.mark.long
def test_every_pass_recovers_in_two_processes_as_in_one(tmp_path: Path) -> None:
    dense = llama()
    continue_pretraining(dense, TEXTS, SMALL)
    dense.double()  # the first steps of Adam make much of how a gradient is rounded
    torch.save(dense, tmp_path / "dense.pt")
    for case, spec in SPECS.items():
        torch.save(retrofit.apply(copy.deepcopy(dense), spec, verify=False), tmp_path / f"{case}.pt")
    run_in_processes(PROCESSES, work, tmp_path)
    for case, way in RUNS:
        first, second = (json.loads((tmp_path / f"{case} {way} {rank}.json").read_text()) for rank in range(PROCESSES))
        alone = json.loads(json.dumps(numbers(case, way, tmp_path)))
        assert first == second
        for name, values in alone.items():
            if values is not None:
                close = max(CLOSE.get(one, 1e-5) for one in (case, way))
                found, expected = torch.tensor(first[name]), torch.tensor(values)
                said = f"{case}, {way}: {name}\n{found}\n{expected}"
                torch.testing.assert_close(found, expected, rtol=close, atol=0.1 * close, msg=said)
