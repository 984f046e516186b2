"""Models on a device that is not the CPU: rewritten, verified, fitted to data, decoded and trained there as on the CPU.

The device is one in the CPU's memory (`support/elsewhere.py`): operations that mix both devices fail on it as on a GPU. Each test
has a process of its own, which has this device for good. Saving is not tested: a tensor there has no data that a file could hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.elsewhere import add_device, counterpart, counterparts
from support.several_processes import start_processes
from support.tiny_models import llama, t5

import retrofit
from retrofit.errors import VerificationError
from retrofit.passes.activation_sparsity import masked_products
from retrofit.rewriting import apply_reported
from retrofit.surgery.row_tables import tables_of

SHORT = ("sparse-ffn(sparsity=8)", "sequence-altup(k=2,layers=all)")
SPECS = (
    *SHORT,
    "altup(k=2)",
    "altup(k=2,embedding=recycled)",
    "lsh-attention(chunk=4)",
    "memory",
    "memory(tables=host)",
    "merge-cross-attention",
    "recurrence(rank=4)",
    "reversible",
    "reversible(scheme=terraformer)",
    "shared-moe(groups=1)",
    "shared-moe(experts=2,k=1)",
    "sparse-ffn(sparsity=8,active=4,controller=gate)",
    "sparse-loss(modules=4)",
    "sparse-qkv",
    "sum",
)
FITTED = (
    "sparse-ffn(sparsity=4)",
    "sparse-qkv",
    "sparse-loss(modules=2)",
    "shared-moe(experts=2,k=1)",
    "sequence-altup(k=2,layers=all)",
    "activation-sparsity(level=0.4)",
)


def cases(specs: tuple[str, ...], short: tuple[str, ...]) -> list[Any]:
    return [pytest.param(spec, id=spec, marks=[] if spec in short else [pytest.mark.long]) for spec in specs]


def elsewhere(work: Callable[..., None], *arguments: Any) -> None:
    """`work(device, *arguments)` has run in a process that has the device."""
    start_processes(1, with_device, work, arguments)


def with_device(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(add_device(), *arguments)


def model_for(spec: str) -> Any:
    torch.manual_seed(0)
    return (t5() if spec.startswith("merge") else llama()).eval()


def texts(model: Any, windows: int = 8) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, (windows, 12), generator=torch.Generator().manual_seed(1))


# ── The device itself ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors(device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4)
    there = x.to(device)
    assert there.device.type == device.type and torch.equal(there.cpu(), x) and float(there.sum()) == 66
    copied, part = there.t().contiguous(), there[:, 1:]
    copied.zero_()
    part.add_(1)
    assert torch.equal(there.cpu(), torch.cat([x[:, :1], x[:, 1:] + 1], 1)) and copied.stride() == (3, 1)
    assert torch.equal(counterpart(there.t()[1:]), there.cpu().t()[1:])
    for mixing in (
        lambda: there + x,
        lambda: there @ x.t(),
        lambda: torch.where(x > 2, there, there),
        lambda: there.masked_fill(x > 2, 0),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixing()
    assert torch.equal(there[torch.tensor([2, 0])].cpu(), there.cpu()[[2, 0]]) and float((there * torch.tensor(2.0)).sum()) == 150
    linear = torch.nn.Linear(4, 5)
    same = copy.deepcopy(linear).to(device)
    for one, values in ((linear, there.cpu()), (same, there)):
        one(values).softmax(-1).square().t().reshape(-1).sum().backward()
    assert linear.weight.grad is not None and same.weight.grad is not None
    torch.testing.assert_close(same.weight.grad.cpu(), linear.weight.grad)


def test_the_device_computes_as_the_cpu_does_and_mixes_with_nothing() -> None:
    elsewhere(tensors)


def read_columns(device: torch.device) -> None:
    """Few tokens read columns of a weight, by the function that stands for a GPU's kernel; training rearranges the weight."""
    kind, found = device.type, list[int]()
    masked_products.DTYPES[kind], masked_products.SMALLEST[kind], masked_products.FEW[kind] = (torch.float32,), 1, 2

    def sums(x: torch.Tensor, columns: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        assert columns.is_contiguous()
        found.append(len(x))
        return x.masked_fill(x.abs() < least, 0.0) @ columns

    masked_products.thresholded_sums = sums  # type: ignore[assignment]
    linear = torch.nn.Linear(24, 40)
    here = masked_products.MaskedProjection(linear, (0, "input"), masked_products.ActivationMask(linear.weight)).eval()
    here.mask.threshold.fill_(0.7)
    there = copy.deepcopy(here).to(device)
    with torch.no_grad():
        for count in (1, 2, 3):
            x = torch.randn(1, count, 24)
            torch.testing.assert_close(there(x.to(device)).cpu(), here(x))
    assert found == [1, 2] and there.layer.weight.t().is_contiguous()
    there.train()(x.to(device)).sum().backward()
    assert found == [1, 2] and there.layer.weight.is_contiguous() and torch.equal(there.layer.weight.cpu(), linear.weight)


def test_masked_layers_read_columns() -> None:
    elsewhere(read_columns)


# ── Models on it ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def verify(device: torch.device, spec: str) -> None:
    model = model_for(spec).to(device)
    try:
        report = apply_reported(model, spec, count_flops=False).report
    except VerificationError as error:
        report = error.report
    assert report is not None
    checks = {one.name: one for one in report.checks if one.name != "round trip"}
    assert len(checks) > 7 and not [one for one in checks.values() if one.status == "failed"], report
    assert checks["method"].status == "passed" and not checks["method"].why, report


@pytest.mark.parametrize("spec", cases(SPECS, SHORT))
def test_every_check_passes(spec: str) -> None:
    elsewhere(verify, spec)


def fitted(model: Any, spec: str, ids: torch.Tensor) -> Any:
    torch.manual_seed(2)  # some starts draw numbers
    return retrofit.apply(model, spec, calibration=ids, verify=False)


def fit(device: torch.device, spec: str) -> None:
    """Calibrated, then decoded and trained by a step: the same weights, tokens and loss."""
    dense = model_for(spec)
    ids = texts(dense)
    here, there = (fitted(copy.deepcopy(dense).to(one), spec, ids) for one in (torch.device("cpu"), device))
    assert {parameter.device.type for parameter in there.parameters()} == {device.type}
    for (name, value), other in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        torch.testing.assert_close(other.cpu(), value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    made = [
        model.generate(ids[:2].to(where), max_new_tokens=6, do_sample=False).cpu()
        for model, where in ((here, "cpu"), (there, device))
    ]
    assert torch.equal(*made)
    losses = []
    for model, where in ((here, "cpu"), (there, device)):
        torch.manual_seed(2)
        batch = ids.to(where)
        loss = model.train()(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(float(loss))
        assert {one.grad.device.type for one in model.parameters() if one.grad is not None} == {torch.device(where).type}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("spec", cases(FITTED, ("sparse-ffn(sparsity=4)",)))
def test_a_start_is_fitted_and_trained_as_on_the_cpu(spec: str) -> None:
    elsewhere(fit, spec)


# ── Tables that stay on the host ─────────────────────────────────────────────────────────────────────────────────────────────────


def train_with_tables_on_host(device: torch.device, spec: str) -> None:
    """Two steps and some tokens: those of the CPU, and nothing as large as a table was ever on the device."""
    dense = model_for(spec)
    ids, found = texts(dense, 2), []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(3)
        model = retrofit.apply(copy.deepcopy(dense).to(where), spec, verify=False)
        model.to(torch.float64).to(where).to(torch.float32)
        tables = tables_of(model)
        assert tables and {(table.device.type, table.dtype) for table in tables} == {("cpu", torch.float32)}
        assert {one.device.type for one in model.parameters() if one not in tables} == {where.type}
        optimizer = retrofit.optimizer(model, 1e-2)
        for _ in range(2):
            model(input_ids=ids.to(where), labels=ids.to(where)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tokens = model.generate(ids.to(where), max_new_tokens=4, do_sample=False).cpu()
        found.append((tokens, {name: value.cpu() for name, value in model.state_dict().items()}, [one.detach() for one in tables]))
    (first, weights, moved), (second, others, _) = found
    assert torch.equal(first, second) and all(table.any() for table in moved)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert max(one.numel() for one in counterparts.values()) < min(table.numel() for table in moved)


@pytest.mark.parametrize(
    "spec",
    [
        "memory(lookup=ngram, heads=1, buckets=5000, tables=host)",
        pytest.param("memory(lookup=token-id, rank=64, tables=host)", marks=pytest.mark.long),
    ],
)
def test_tables_on_the_host_train_and_decode_as_on_the_cpu(spec: str) -> None:
    elsewhere(train_with_tables_on_host, spec)
