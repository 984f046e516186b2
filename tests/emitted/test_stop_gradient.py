"""A graph module learns as the model does where its code stops gradients, or computes its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.functional_models import VOCABULARY, Functional, layer
from support.refusals import refused
from torch import Tensor
from torch.nn import functional as F

import retrofit
from retrofit.emitted import graph_module
from retrofit.errors import CaptureError, CheckpointError


def ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


class Truncated(Functional):
    """Its layers, with one set of weights, are run twice without gradients and once with."""

    def __init__(self, says_so: bool = False) -> None:
        super().__init__(layers=1)
        self.says_so = says_so

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.emb) + self.pos[: ids.shape[1]]
        with torch.no_grad():
            for _ in range(2):
                x = layer(x, list(self.w), 0.0, self.training)
        with torch.set_grad_enabled(True) if self.says_so else contextlib.nullcontext():
            x = layer(x, list(self.w), 0.0, self.training)
        return F.layer_norm(x, (x.shape[-1],), self.norm) @ self.out.t()


class Scaled(torch.autograd.Function):
    """x ↦ 2x, with the gradient that is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient * gradients[0], None


class WithOwn(Functional):
    def __init__(self, gradient: float) -> None:
        super().__init__(layers=2)
        self.gradient = gradient

    def forward(self, ids: Tensor) -> Tensor:
        return Scaled.apply(super().forward(ids), self.gradient)


def gradients(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    found = torch.autograd.grad(model(ids()).logsumexp(-1).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(parameters, found, strict=True)]


@pytest.mark.long
def test_gradients_stop_where_the_models_code_stops_them() -> None:
    model = Truncated().eval()
    graph = graph_module(model, ids())
    assert torch.equal(graph(ids(3, 5)), model(ids(3, 5)))
    parameters = list(model.parameters())
    for ours, theirs in zip(gradients(graph, parameters), gradients(model, parameters), strict=True):
        torch.testing.assert_close(ours, theirs)
    unstopped = graph_module(Functional(layers=1).eval(), ids())
    assert sum("detach" in str(node.target) for node in graph.graph.nodes) == 1
    assert not any("detach" in str(node.target) for node in unstopped.graph.nodes)
    assert torch.no_grad.__enter__.__module__ == "torch.autograd.grad_mode"
    with pytest.raises(CaptureError) as caught:
        graph_module(Truncated(says_so=True).eval(), ids())
    assert "set_grad_enabled" in caught.value.why


def test_a_backward_that_is_the_derivative_is_none_of_a_graphs_business_and_another_is_refused() -> None:
    model = WithOwn(2.0).eval()
    graph = graph_module(model, ids())
    parameters = list(model.parameters())
    for ours, theirs in zip(gradients(graph, parameters), gradients(model, parameters), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(CaptureError) as caught:
        retrofit.apply(WithOwn(3.0).eval(), "altup(k=2)", example_inputs=ids(), emit="graph")
    assert "Scaled" in caught.value.why and "emit='module'" in caught.value.remedy


def exported(model: torch.nn.Module, path: Path) -> Path:
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    torch.export.save(torch.export.export(model, (ids(),), dynamic_shapes=(free,), strict=False), path)
    return path


@pytest.mark.first(1)
@pytest.mark.parametrize("says_so", [False, True])
def test_a_program_exported_with_gradients_learns_as_its_model(says_so: bool, tmp_path: Path) -> None:
    """torch exports what runs without gradients as a graph of its own."""
    model = Truncated(says_so).eval()
    graph = retrofit.load(exported(model, tmp_path / "model.pt2"))
    assert torch.equal(graph(ids(3, 5)), model(ids(3, 5)))
    held = [one for one in model.parameters() if one.requires_grad]
    read = [next(its for its in graph.parameters() if torch.equal(its, one)) for one in held]  # under other names
    theirs = gradients(model, held)
    for one, its in zip(gradients(graph, read), theirs, strict=True):
        torch.testing.assert_close(one, its)
    assert not theirs[0].any() and theirs[-1].any()  # the embedding lies before, the last matrix after


class Cast(Functional):
    def __init__(self, enabled: bool) -> None:
        super().__init__(layers=1)
        self.enabled = enabled

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return super().forward(ids)


@pytest.mark.long
def test_a_program_with_autocast(tmp_path: Path) -> None:
    """Switched off it is no more than its operations; switched on it changes their types, which no graph module could keep."""
    model = Cast(False).eval()
    assert torch.equal(retrofit.load(exported(model, tmp_path / "off.pt2"))(ids(3, 5)), model(ids(3, 5)))
    with refused(CheckpointError, "on.pt2") as caught:
        retrofit.load(exported(Cast(True).eval(), tmp_path / "on.pt2"))
    assert "wrap_with_autocast" in caught.value.why
