"""Row-wise Adagrad for tables, AdamW for the rest: a plain loop and torch's AdamW are the oracle, one process that of two."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.several_processes import run_in_processes
from support.training_runs import TEXTS, Unplugged, bert, changed, llama, same_weights, t5, unplug_at
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup

import retrofit
from retrofit.errors import RetrofitWarning, TrainingError
from retrofit.passbase import replaying
from retrofit.passes.memory.external_memory import TokenIdMemory
from retrofit.surgery import row_tables
from retrofit.surgery.row_tables import RowTables, tables_of
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.optimizer import TableAdamW
from retrofit.training.runs import TrainingRun

SPECS = (
    "memory",
    "memory(rank=2)",
    "memory(form=gated, rank=4)",
    "memory(beside=values)",
    "memory(lookup=ngram, heads=2, buckets=50)",
)
WAYS: dict[str, dict[str, Any]] = {"data parallel": {}, "sharded": {"fsdp": True}, "tables alone": {"alone": True}}


def rewritten(spec: str = "memory", make: Callable[..., Any] = llama) -> Any:
    """A model whose tables, and all that is zero at the start, have moved from it."""
    model = retrofit.apply(make(), spec, verify=False).double()
    model.config.decoder_start_token_id = 0
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def batches(steps: int, rows: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 40, (rows, 12), generator=generator) for _ in range(steps)]


def backward(model: Any, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


class PlainAdagrad(torch.optim.Optimizer):
    """Adagrad with one number for each row, a row at a time."""

    def __init__(self, tables: list[Any], lr: float) -> None:
        super().__init__(tables, {"lr": lr})
        self.sums: dict[tuple[int, int], float] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, table in enumerate(self.param_groups[0]["params"]):
            gradient = table.grad.to_dense()
            for row in set(table.grad.coalesce().indices()[0].tolist()):
                self.sums[number, row] = self.sums.get((number, row), 0.0) + float((gradient[row] ** 2).mean())
                table[row] -= self.param_groups[0]["lr"] * gradient[row] / (math.sqrt(self.sums[number, row]) + 1e-8)


def plain_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """torch's AdamW, and the plain loop for the tables."""
    tables = tables_of(model)
    for module in model.modules():
        if isinstance(module, RowTables):
            module.sparse = True
    matrices = [one for one in model.parameters() if one not in tables and one.dim() > 1]
    vectors = [one for one in model.parameters() if one not in tables and one.dim() < 2]
    rest = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(rest, lr), PlainAdagrad(list(tables), lr)]


def agree(model: Any, other: Any) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


# ── The formula ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(6)
@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.parametrize("spec", SPECS)
def test_tables_get_what_a_plain_loop_gives_them_and_the_rest_what_adamw_gives_it(spec: str, make: Callable[..., Any]) -> None:
    model = rewritten(spec, make)
    other = copy.deepcopy(model)
    mine = retrofit.optimizer(model, 1e-2, lr_new=1e-2, weight_decay=0.1)
    theirs = plain_optimizers(other, 1e-2)
    schedules = [get_cosine_schedule_with_warmup(one, 2, 8) for one in (mine, *theirs)]
    for ids in batches(5):
        assert torch.equal(backward(model, ids), backward(other, ids))
        for each in (mine, *theirs, *schedules):
            each.step()
        for one in (mine, *theirs):
            one.zero_grad()
    agree(model, other)


def test_a_plain_loop_over_the_rows_gives_the_same_and_no_other_row_moves() -> None:
    memory = TokenIdMemory(50, 4, 0, torch.empty(0, dtype=torch.float64))
    start = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    memory.b.data.copy_(start)
    rows = {row: [start[row].clone(), 0.0] for row in range(50)}
    optimizer = retrofit.optimizer(memory, 0.1)
    target = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    steps = [[4, 9, 4, 4, 0, 9], [4, 4, 4, 4, 4, 49], [1, 2, 3, 4, 5, 6]]
    for ids in steps:
        values = [rows[i][0].clone() for i in ids]
        (memory(torch.zeros(1, 6, 4).double(), torch.tensor([ids])) - target).square().sum().backward()
        optimizer.step()
        for row in set(ids):
            gradient = sum(2 * (value - goal) for value, goal, i in zip(values, target[0], ids, strict=True) if i == row)
            rows[row][1] += float((gradient**2).mean())
            rows[row][0] = rows[row][0] - 0.1 * gradient / (math.sqrt(rows[row][1]) + 1e-8)
    torch.testing.assert_close(memory.b.detach(), torch.stack([rows[row][0] for row in range(50)]), rtol=1e-9, atol=1e-12)
    untouched = [row for row in range(50) if not any(row in ids for ids in steps)]
    assert torch.equal(memory.b[untouched], start[untouched]) and len(untouched) == 41


def test_clipping_sees_the_other_parameters_alone() -> None:
    model = rewritten()
    frozen = copy.deepcopy(model)
    for table in tables_of(frozen):
        table.requires_grad_(False)
    norms = []
    for one in (model, frozen):
        optimizer = retrofit.optimizer(one, 1e-2)
        (ids,) = batches(1)
        backward(one, ids)
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.01))
        optimizer.step()
    assert torch.equal(*norms)
    tables = set(tables_of(model).values())
    assert tables and all(
        torch.equal(one, two) != (name in tables)
        for (name, one), two in zip(model.named_parameters(), frozen.parameters(), strict=True)
    )


def test_gradients_of_several_backward_passes_add_up_and_those_that_are_cleared_are_gone() -> None:
    whole = rewritten()
    parts = copy.deepcopy(whole)
    first, second = (retrofit.optimizer(one, 1e-2) for one in (whole, parts))
    for ids in batches(3, rows=4):
        backward(parts, ids + 1)
        second.zero_grad()
        backward(whole, ids)
        for half in ids.split(2):
            (parts(input_ids=half, labels=half).loss / 2).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


def test_a_table_in_several_places_is_one_table() -> None:
    model = rewritten()
    first, second = (module for module in model.modules() if isinstance(module, TokenIdMemory))
    second.b = first.b
    other = copy.deepcopy(model)
    mine, theirs = retrofit.optimizer(model, 1e-2, lr_new=1e-2, weight_decay=0.1), plain_optimizers(other, 1e-2)
    assert len(mine.collected) == 1
    for ids in batches(3):
        backward(model, ids), backward(other, ids)
        for one in (mine, *theirs):
            one.step()
            one.zero_grad()
    agree(model, other)


def test_a_dense_gradient_of_a_table_counts_where_it_is_not_zero() -> None:
    model = rewritten()
    other = copy.deepcopy(model)
    for one, weight in ((model, True), (other, False)):
        optimizer = retrofit.optimizer(one, 1e-2)
        table = next(iter(optimizer.collected))
        penalty = table[5].square().sum() if weight else torch.nn.functional.embedding(torch.tensor(5), table).square().sum()
        penalty.backward()
        optimizer.step()
    agree(model, other)
    assert not same_weights(model, rewritten())


def test_the_state_goes_into_a_file_and_back(tmp_path: Path) -> None:
    model = rewritten()
    optimizer = retrofit.optimizer(model, 1e-2)
    given = batches(6)
    for ids in given[:3]:
        backward(model, ids)
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again = rewritten()
    resumed = retrofit.optimizer(again, 1e-2)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for ids in given[3:]:
        for one, each in ((model, optimizer), (again, resumed)):
            backward(one, ids)
            each.step()
            each.zero_grad()
    assert same_weights(model, again)


@pytest.mark.first(2)
@pytest.mark.parametrize("spec", SPECS)
def test_a_model_in_bfloat16_learns(spec: str) -> None:
    model = rewritten(spec).bfloat16()
    start = copy.deepcopy(model)
    optimizer = retrofit.optimizer(model, 1e-2)
    (ids,) = batches(1)
    losses = []
    for _ in range(10):
        losses.append(backward(model, ids))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    for module in start.modules():
        if isinstance(module, RowTables):
            module.sparse = True
    backward(start, ids)
    for (table, name), old in zip(tables_of(model).items(), tables_of(start), strict=True):
        moved = (table != old).flatten(1).any(1).nonzero().flatten().tolist()
        looked_up = old.grad.coalesce().indices()[0].tolist()
        assert table.dtype == torch.bfloat16 and set(moved) <= set(looked_up) and moved, name


@pytest.mark.long
@pytest.mark.parametrize("spec", ["memory", pytest.param("memory(rank=2)", marks=pytest.mark.long)])
def test_a_compiled_model_learns_the_same(spec: str) -> None:
    model = rewritten(spec)
    other = copy.deepcopy(model)
    optimizers = [retrofit.optimizer(one, 1e-2) for one in (model, other)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ids in batches(3):
        torch.testing.assert_close(backward(compiled, ids), backward(other, ids))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


def test_scaled_gradients_are_refused() -> None:
    model = rewritten().float()
    optimizer, scaler = retrofit.optimizer(model, 1e-2), torch.amp.GradScaler("cpu")
    (ids,) = batches(1)
    scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
    with refused(TrainingError, code="float16"):
        scaler.step(optimizer)


def test_what_an_optimizer_changes_ends_with_it() -> None:
    model = rewritten()
    tables = [module for module in model.modules() if isinstance(module, RowTables)]
    optimizer = retrofit.optimizer(model, 1e-2)
    assert all(module.sparse for module in tables)
    del optimizer
    gc.collect()
    assert not any(module.sparse for module in tables)
    (ids,) = batches(1)
    backward(model, ids)
    assert all(table.grad is not None and not table.grad.is_sparse for table in tables_of(model))


def test_a_large_table_with_dense_gradients_is_worth_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rewritten()
    smallest = min(table.numel() * table.element_size() for table in tables_of(model))
    (ids,) = batches(1)

    def said(train: bool = True) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train(train)(input_ids=ids)
        return sum(issubclass(one.category, RetrofitWarning) for one in caught)

    monkeypatch.setattr(row_tables, "warned", set())
    monkeypatch.setattr(row_tables, "LARGE", smallest + 1)
    assert said() == 0
    monkeypatch.setattr(row_tables, "LARGE", smallest)
    assert said(train=False) == 0
    optimizer = retrofit.optimizer(model, 1e-2)
    assert said() == 0
    optimizer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetrofitWarning)
        assert retrofit.verify(model.eval(), checks=["gradients"]).checks
    assert said() == len(tables_of(model)) and said() == 0


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_trainer_needs_one_line(tmp_path: Path) -> None:
    model = rewritten().float()
    other = copy.deepcopy(model)
    given = batches(4)
    data = [{"input_ids": row, "labels": row} for ids in given for row in ids]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, train_sampling_strategy="sequential", max_grad_norm=0.1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data, optimizers=(retrofit.optimizer(model, lr=1e-2), None)).train()
    optimizer = retrofit.optimizer(other.train(), 1e-2)
    for ids in given:
        backward(other, ids)
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert not same_weights(model, rewritten().float())


def test_a_trainer_without_it_is_warned_and_told_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rewritten().float()
    monkeypatch.setattr(row_tables, "warned", set())
    monkeypatch.setattr(row_tables, "LARGE", 1)
    data = [{"input_ids": row, "labels": row} for ids in batches(2) for row in ids]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, arguments, train_dataset=data).train()
    said = [str(one.message) for one in caught if issubclass(one.category, RetrofitWarning)]
    assert len(said) == len(tables_of(model)) and all("optimizers=(retrofit.optimizer(model," in one for one in said)


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["memory", "altup(k=2); memory(rank=2)"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(spec: str, tmp_path: Path) -> None:
    start = retrofit.apply(llama(), *spec.split("; "), verify=False)
    whole, cut = copy.deepcopy(start), copy.deepcopy(start)
    continue_pretraining(whole, TEXTS, changed())
    with pytest.raises(Unplugged):
        continue_pretraining(cut, TEXTS, changed(), output=tmp_path / "model.pt", progress=unplug_at(6))
    again = copy.deepcopy(start)
    continue_pretraining(again, TEXTS, changed(), output=tmp_path / "model.pt", resume=True)
    assert same_weights(whole, again) and not same_weights(start, again)


def graph() -> Any:
    return retrofit.apply(llama(), "sum", emit="graph", verify=False)


@pytest.mark.first(3)
@pytest.mark.parametrize("make", [llama, bert, t5, graph])
def test_a_run_names_its_tables_and_moves_only_rows_that_it_read(make: Callable[..., Any], tmp_path: Path) -> None:
    model = retrofit.apply(make(), "memory", verify=False)
    output = tmp_path / ("model.pt2" if make is graph else "model.pt")
    run = continue_pretraining(model, TEXTS, changed(steps=3), output=output)
    assert run.tables == {name: table.numel() for table, name in tables_of(model).items()} and not run.untrained
    assert TrainingRun.read(output).tables == run.tables
    assert not any(module.sparse for module in model.modules() if isinstance(module, RowTables))
    for table in tables_of(model):
        moved = int(table.detach().any(1).sum())
        assert 0 < moved < 120  # of 259 or 300 ids: those of the text, and in BERT's last layer of what is hidden


def work(rank: int, folder: Path, specs: tuple[str, ...]) -> None:
    """What one process does: every model in every way, its losses in a file; and a loop of its own."""
    for spec in specs:
        for way, more in WAYS.items():
            torch.save(losses(spec, **more), folder / f"{spec} {way} {rank}.pt")
    model = rewritten()
    optimizer = retrofit.optimizer(model, 1e-2)
    wrapped = DistributedDataParallel(model)
    for ids in batches(3):
        backward(wrapped, ids[rank : rank + 1] if rank == 0 else ids[1:] % 20 + 3)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / f"loop {rank}.pt")


def losses(spec: str, alone: bool = False, **more: Any) -> Any:
    model = rewritten(spec)
    if alone:
        tables = tables_of(model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in tables)
    run = continue_pretraining(model, TEXTS, changed(batch_size=4, steps=4, lr=3e-4, eval_every=2, **more))
    return torch.tensor(run.losses), torch.tensor(run.eval_losses)


@pytest.mark.parametrize("specs", [SPECS[:1], pytest.param(SPECS[1:], marks=pytest.mark.long)], ids=["quick", "rest"])
def test_two_processes_train_tables_as_one_does(specs: tuple[str, ...], tmp_path: Path) -> None:
    run_in_processes(2, work, tmp_path, specs)
    for spec in specs:
        for way, more in WAYS.items():
            alone = losses(spec, **{name: value for name, value in more.items() if name != "fsdp"})
            first, second = (torch.load(tmp_path / f"{spec} {way} {rank}.pt") for rank in range(2))
            torch.testing.assert_close(first, second, rtol=0, atol=0)
            torch.testing.assert_close(
                first, alone, rtol=1e-5, atol=1e-6, msg=lambda text, case=f"{spec}, {way}": f"{case}: {text}"
            )
    first, second = (torch.load(tmp_path / f"loop {rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = rewritten()
    optimizer = retrofit.optimizer(model, 1e-2)
    for ids in batches(3):
        backward(model, torch.cat([ids[:1], ids[1:] % 20 + 3]))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(first, dict(model.state_dict()), rtol=1e-6, atol=1e-9)


# ── Rates ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def rates(model: Any, **more: Any) -> dict[str, float]:
    """The peak rate of every parameter in a run."""
    optimizer: TableAdamW = retrofit.optimizer(model, 1e-3, **more)
    by_id = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.long
def test_each_pass_has_its_own_rate_wherever_the_model_comes_from(tmp_path: Path) -> None:
    model = retrofit.apply(llama(), "altup(k=2)", "memory", verify=False)
    one_by_one = retrofit.apply(retrofit.apply(llama(), "altup(k=2)", verify=False), "memory", verify=False)
    model.save_pretrained(tmp_path / "model")
    retrofit.save(model, tmp_path / "model.pt")
    expected = rates(model)
    tables = set(tables_of(model).values())
    added = {name for account in replaying.rewrites(model) or () for name in account.added}
    assert {expected[name] for name in tables} == {3e-2} and tables < added
    assert {expected[name] for name in added - tables} == {1e-2}
    assert {rate for name, rate in expected.items() if name not in added} == {1e-3}
    for other in (one_by_one, copy.deepcopy(model), retrofit.load(tmp_path / "model.pt"), retrofit.load(tmp_path / "model")):
        assert rates(other) == expected
    given = rates(model, lr_new=5e-3)
    assert {name for name, rate in given.items() if rate == 5e-3} == added


@pytest.mark.parametrize(
    ("spec", "times"),
    [("", set()), ("altup(k=2, coefficients=dynamic)", set()), ("memory(rank=2)", set()), ("memory", {30}), ("sparse-qkv", {10})],
)
def test_a_run_takes_the_rates_that_passes_propose_and_says_so(spec: str, times: set[int]) -> None:
    model = retrofit.apply(llama(), spec, verify=False) if spec else llama()
    other = copy.deepcopy(model)
    run = continue_pretraining(model, TEXTS, changed(steps=2, lr=1e-3))
    assert {round(rate / 1e-3) for rate in run.new_rates.values()} == times
    assert all(f"({many}×)" in str(run) for many in times)
    explicit = max(times, default=1) * 1e-3 if spec else None
    continue_pretraining(other, TEXTS, changed(steps=2, lr=1e-3, lr_new=explicit))
    assert same_weights(model, other)
