"""Parameters divided among two processes: the losses of one, checkpoints for another number of processes, groups by data flow."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.refusals import refused
from support.several_processes import run_in_processes
from support.training_runs import TEXTS, bert, changed, llama

import retrofit
from retrofit.errors import TrainingError
from retrofit.training import processes
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.sharding import (
    fill_from_parts,
    own_rows,
    read_parts,
    require_one_dtype_a_group,
    shard_groups,
    sharded_copy,
    write_parts,
)

PROCESSES, SHARED, TAUGHT = 2, "layers that share a feed-forward", "sparse-ffn with a teacher"
ENCODER = "an encoder"  # it is told how many labels there are in all, and takes the mean over those of its own part alone
SPECS = {  # nothing that draws at random in training, or counts the tokens of a batch: each process has its own draws and tokens
    SHARED: "",
    ENCODER: "",
    TAUGHT: "sparse-ffn(sparsity=4, temperature=1e-6, hard=0)",
    "dense": "",
    "shared-moe": "shared-moe(groups=1, capacity=none, balance=0)",
    "sparse-ffn": "sparse-ffn(sparsity=4, temperature=1e-6, hard=0)",
    "sparse-qkv": "sparse-qkv",
    "sparse-loss": "sparse-loss(modules=4)",
    "sequence-altup": "sequence-altup(k=2, layers=all)",
    "altup": "altup(k=2)",
    "memory": "memory",
    "recurrence": "recurrence(rank=4)",
    "lsh-attention": "lsh-attention(rounds=2, buckets=4, chunk=8)",
    "two streams": "reversible(scheme=terraformer)",
    "sum": "sum",
}
CLOSE = {"shared-moe": 1e-3}  # its router computes in float32 whatever the model is, and Adam makes much of how that is rounded


def settings(steps: int, **more: Any) -> Any:
    """Steps that do not depend on how many follow."""
    return changed(batch_size=4, steps=steps, lr=3e-4, eval_every=2, schedule="constant", warmup=0, **more)


def work(rank: int, folder: Path, cases: tuple[str, ...], resume: bool, more: dict[str, Any]) -> None:
    """What one process does: every case, its numbers in a file, the result in another."""
    for case in cases:
        (folder / f"{case} {rank}.json").write_text(json.dumps(numbers(case, folder, 6 if resume else 4, resume, **more)))


def numbers(case: str, folder: Path, steps: int, resume: bool, **more: Any) -> dict[str, Any]:
    """The losses of one sharded run."""
    model, output = torch.load(folder / f"{case}.pt", weights_only=False), folder / f"{case}.trained.pt"
    given = settings(steps, fsdp=True, **more)
    run = continue_pretraining(model, TEXTS, given, teacher=teacher_of(case), output=output, resume=resume, force=resume)
    return losses_of(run)


def losses_of(run: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"losses": run.losses, "eval_losses": run.eval_losses}))  # type: ignore[no-any-return]


def together(folder: Path, cases: tuple[str, ...], resume: bool = False, **more: Any) -> None:
    run_in_processes(PROCESSES, work, folder, cases, resume, more)


def teacher_of(case: str) -> Any:
    return llama(num_hidden_layers=3).double() if case == TAUGHT else None


def only_distil(case: str) -> dict[str, Any]:
    """The stages that a sharded run has."""
    return {"align": 0, "anneal": 0} if case == TAUGHT else {}


def rewritten(case: str) -> Any:
    if case == ENCODER:
        return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    model = llama(num_hidden_layers=3).double()  # the first steps of Adam make much of how a gradient is rounded
    if case == SHARED:
        model.model.layers[2].mlp = model.model.layers[0].mlp
    return retrofit.apply(model, SPECS[case], verify=False) if SPECS[case] else model


@pytest.mark.parametrize("cases", [(SHARED, ENCODER), pytest.param(tuple(SPECS), marks=pytest.mark.long)], ids=["quick", "all"])
def test_two_processes_train_as_one_and_another_number_goes_on(cases: tuple[str, ...], tmp_path: Path) -> None:
    for case in cases:
        torch.save(rewritten(case), tmp_path / f"{case}.pt")
    together(tmp_path, cases)
    for case in cases:
        close = CLOSE.get(case, 1e-5)
        alone = torch.load(tmp_path / f"{case}.pt", weights_only=False)
        expected = losses_of(continue_pretraining(alone, TEXTS, settings(6, **only_distil(case)), teacher=teacher_of(case)))
        first, second = (json.loads((tmp_path / f"{case} {rank}.json").read_text()) for rank in range(PROCESSES))
        assert first == second
        agree(first, expected, 4, close, case)
        # One process goes on from the parts that two wrote, and the result is that of six steps in one.
        agree(numbers(case, tmp_path, 6, resume=True), expected, 6, close, case)
        trained, start = retrofit.load(tmp_path / f"{case}.trained.pt"), torch.load(tmp_path / f"{case}.pt", weights_only=False)
        missed, way = distance(trained, alone), distance(start, alone)
        assert missed < 0.01 * way or case in CLOSE, f"{case}: {missed} of {way}"


@torch.no_grad()
def distance(one: Any, other: Any) -> float:
    """Between the weights of two models."""
    theirs = other.state_dict()
    return math.sqrt(
        sum(float((value.double() - theirs[name].double()).square().sum()) for name, value in one.state_dict().items())
    )


def agree(found: dict[str, Any], expected: dict[str, Any], steps: int, close: float, case: str) -> None:
    """The losses up to so many steps."""
    for name, values in found.items():
        upto = [entry for entry in expected[name] if entry[0] <= steps]
        assert len(values) == len(upto), f"{case}: {name}"
        torch.testing.assert_close(torch.tensor(values), torch.tensor(upto), rtol=close, atol=0.1 * close, msg=f"{case}: {name}")


@pytest.mark.long
def test_two_processes_go_on_where_one_stopped(tmp_path: Path) -> None:
    torch.save(rewritten("dense"), tmp_path / "dense.pt")
    numbers("dense", tmp_path, 4, resume=False)
    together(tmp_path, ("dense",), resume=True)
    alone = torch.load(tmp_path / "dense.pt", weights_only=False)
    expected = losses_of(continue_pretraining(alone, TEXTS, settings(6)))
    agree(json.loads((tmp_path / "dense 0.json").read_text()), expected, 6, 1e-5, "dense")


@pytest.mark.long
def test_in_bfloat16_with_checkpointed_activations_the_losses_are_nearly_those(tmp_path: Path) -> None:
    model = retrofit.apply(llama(), SPECS["shared-moe"], verify=False)
    torch.save(model, tmp_path / "shared-moe.pt")
    together(tmp_path, ("shared-moe",), bf16=True, gradient_checkpointing=True)
    expected = losses_of(continue_pretraining(model, TEXTS, settings(4)))
    agree(json.loads((tmp_path / "shared-moe 0.json").read_text()), expected, 4, 1e-2, "shared-moe")


# ── Groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def names_of(model: Any) -> list[str]:
    named = {module: name for name, module in model.named_modules()}
    return [named[group] for group in shard_groups(model)]


@pytest.mark.long
def test_what_several_layers_call_is_a_group_before_the_layers() -> None:
    model = tiny_models.llama(num_hidden_layers=3)
    assert names_of(model) == [f"model.layers.{depth}" for depth in range(3)]
    retrofit.apply(model, "shared-moe(experts=2, groups=1)", verify=False)
    shared, *layers = names_of(model)
    assert shared.endswith(".moe") and layers == [f"model.layers.{depth}" for depth in range(3)]


def test_a_parameter_used_in_two_layers_stays_in_the_group_around_them() -> None:
    model = tiny_models.llama(num_hidden_layers=3)
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert names_of(model) == ["model.layers.1"]


# ── Checkpoints in parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("wrote", "read"), [(1, 3), (3, 1), (3, 2), (2, 3), (4, 4)])
def test_parts_are_read_by_any_number_of_processes(wrote: int, read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"matrix": torch.randn(5, 3), "one row": torch.randn(1, 2), "number": torch.tensor(7.0)}
    as_if(monkeypatch, wrote)
    for rank in range(wrote):
        monkeypatch.setattr(processes, "number", lambda rank=rank: rank)
        write_parts(tmp_path, "weights", {name: Divided(value) if value.dim() else value for name, value in whole.items()})
    as_if(monkeypatch, read)
    parts = read_parts(tmp_path, "weights")
    for rank in range(read):
        monkeypatch.setattr(processes, "number", lambda rank=rank: rank)
        for name, value in whole.items():
            found = Divided(torch.full_like(value, torch.nan)) if value.dim() else torch.zeros(())
            fill_from_parts(found, name, parts, tmp_path)  # type: ignore[arg-type]
            torch.testing.assert_close(
                found.to_local() if value.dim() else found, Divided(value).to_local() if value.dim() else value
            )
    with refused(TrainingError, code="incomplete") as error:
        fill_from_parts(torch.zeros(4, 3), "matrix", parts, tmp_path)
    assert all(part in str(error.value) for part in ("matrix", "[4, 3]", "[5, 3]"))
    first = next(iter(tmp_path.glob("weights-00000*")))
    first.write_bytes(first.read_bytes()[:-40])
    with refused(TrainingError, code="incomplete") as error:
        read_parts(tmp_path, "weights")
    assert first.name in str(error.value)
    first.unlink()
    with refused(TrainingError, code="incomplete"):
        read_parts(tmp_path, "weights")


def as_if(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(processes, "count", lambda: count)


class Divided:
    """Stands for a tensor whose rows are divided as FSDP2 does: in chunks of the first one's size."""

    def __init__(self, whole: torch.Tensor) -> None:
        chunks = [*whole.chunk(processes.count()), *[whole[:0]] * processes.count()]
        self.local, self.shape = chunks[processes.number()].clone(), whole.shape

    def to_local(self) -> torch.Tensor:
        return self.local

    def dim(self) -> int:
        return len(self.shape)


def test_rows_are_those_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(1, 6):
        as_if(monkeypatch, count)
        for rows in range(7):
            whole, found = torch.arange(rows), []
            for rank in range(count):
                monkeypatch.setattr(processes, "number", lambda rank=rank: rank)
                found.append(whole[own_rows(whole)].tolist())
            assert [row for rows_of in found for row in rows_of] == whole.tolist()
            assert found[: len(whole.chunk(count))] == [chunk.tolist() for chunk in whole.chunk(count)]


def test_a_parameter_without_rows_is_refused() -> None:
    model = llama()
    model.model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with refused(TrainingError, "--fsdp", option="fsdp", site="model.scale"):
        sharded_copy(model, torch.device("cpu"), bf16=False)


def test_what_is_gathered_together_has_one_dtype() -> None:
    model = llama()
    model.lm_head.bfloat16().requires_grad_(False)  # it is not trained
    require_one_dtype_a_group(model)
    model.model.layers[1].mlp.bfloat16()
    with refused(TrainingError, code="dtypes", option="fsdp") as error:
        require_one_dtype_a_group(model)
    assert "model.layers.1.self_attn.q_proj.weight is in float32" in error.value.why
    assert "model.layers.1.mlp.gate_proj.weight is in bfloat16" in error.value.why
    model.model.layers[1].bfloat16()  # a group by itself
    require_one_dtype_a_group(model)


@pytest.mark.parametrize("asked", [{"align": 2}, {"anneal": 1}, {"distil_hidden": 0.5}])
def test_a_stage_that_needs_the_dense_modules_is_refused(asked: dict[str, Any]) -> None:
    model = llama()
    student = retrofit.apply(copy.deepcopy(model), "sum", verify=False)
    with refused(TrainingError, option=next(iter(asked))) as error:
        continue_pretraining(student, TEXTS, settings(2, fsdp=True, **asked), teacher=model)
    assert "--fsdp" in error.value.remedy
