"""Gradients of large weights in slices: together they are what autograd gives, and no gradient of a weight's size is ever made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from retrofit.checks import sliced_gradients
from retrofit.checks.gradients import collect_gradients
from retrofit.checks.sliced_gradients import SlicedGradients


class Model(nn.Module):
    """A table that is looked up and read as a head, a plain product, and one by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 8, padding_idx=2)
        self.product = nn.Linear(8, 12)
        self.by_rows = Conv1D(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.by_rows(self.product(self.table(ids)).tanh())
        return nn.functional.linear(hidden, self.table.weight)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(sliced_gradients, "LARGE", 1)
    monkeypatch.setattr(sliced_gradients, "SLICE", 24)
    torch.manual_seed(0)
    return Model()


IDS = torch.tensor([[5, 2, 7, 5], [1, 1, 22, 2]])


class Largest(TorchDispatchMode):
    """The most elements of a matrix that an operation made within this context."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "view" not in function._schema.name and function is not torch.ops.aten.t.default:
            self.elements = max(self.elements, result.numel())
        return result


def test_the_slices_are_the_gradient_that_autograd_gives(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_gradients, "is_bounded", lambda outs, ins: False)  # so none is left out
    outputs = model(IDS)
    outputs.square().sum().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    seen: dict[str, list[torch.Tensor]] = {}
    with SlicedGradients(dict(model.named_parameters()), lambda name, part: seen.setdefault(name, []).append(part)):
        same = model(IDS)
        same.square().sum().backward()
    torch.testing.assert_close(same, outputs)
    matrices = {"table.weight", "product.weight", "by_rows.weight"}
    assert seen.keys() == matrices and all(dict(model.named_parameters())[name].grad is None for name in matrices)
    torch.testing.assert_close(torch.cat(seen["product.weight"]), wanted["product.weight"])
    torch.testing.assert_close(torch.cat(seen["by_rows.weight"]).t(), wanted["by_rows.weight"])
    head, (rows,) = torch.cat(seen["table.weight"][:-1]), seen["table.weight"][-1:]
    torch.testing.assert_close(head.index_add(0, torch.tensor([1, 5, 7, 22]), rows), wanted["table.weight"])
    for name in ("product.bias", "by_rows.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad, wanted[name])


@pytest.mark.parametrize(("zeros", "seen"), [(0, 1), (6, 3), (12, 4)])
def test_slices_end_with_the_first_that_is_not_zero(model: Model, zeros: int, seen: int) -> None:
    cotangent = torch.ones(5, 12)
    cotangent[:, :zeros] = 0
    parts: list[torch.Tensor] = []
    x = torch.rand(5, 8) + 1
    with SlicedGradients({"weight": model.product.weight}, lambda name, part: parts.append(part)):
        model.product(x).backward(cotangent)
    assert [bool(part.any()) for part in parts] == [False] * (seen - 1) + [zeros < 12] and all(len(part) <= 3 for part in parts)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_no_slice_is_left_out_where_one_may_be_infinite(model: Model, value: float) -> None:
    cotangent = torch.ones(5, 12)
    cotangent[2, 11] = value  # in the last slice
    parts: list[torch.Tensor] = []
    with SlicedGradients({"weight": model.product.weight}, lambda name, part: parts.append(part)):
        model.product(torch.full((5, 8), 2.0)).backward(cotangent)
    assert len(torch.cat(parts)) == 12 and not bool(torch.cat(parts)[11].isfinite().any())


def test_nothing_as_large_as_a_weight_is_made() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_gradients, "LARGE", 1 << 16)
        patch.setattr(sliced_gradients, "SLICE", 1 << 12)
        model = nn.Linear(512, 512, bias=False)
        x = torch.randn(3, 512)
        with SlicedGradients({"weight": model.weight}, lambda name, part: None), Largest() as largest:
            model(x).square().sum().backward()
        assert largest.elements < model.weight.numel() / 16


def test_a_gradient_that_a_hook_changes_is_looked_at_whole(model: Model) -> None:
    model.product.weight.register_hook(torch.zeros_like)
    model.by_rows.weight.register_hook(lambda gradient: gradient * float("nan"))
    found = collect_gradients(model, {"ids": IDS}, torch.Size((2, 4, 23)))
    assert found.zero == {"product.weight"} and found.broken == {"by_rows.weight"}


def test_infinities_and_zeros_are_found_in_slices(model: Model) -> None:
    with torch.no_grad():
        model.by_rows.weight.zero_()  # so nothing comes back to the product
    assert {"product.weight", "product.bias"} <= collect_gradients(model, {"ids": IDS}, torch.Size((2, 4, 23))).zero
    model.product.register_forward_hook(lambda module, args, output: output * float("inf"))
    assert {"product.weight", "table.weight"} <= collect_gradients(model, {"ids": IDS}, torch.Size((2, 4, 23))).broken
