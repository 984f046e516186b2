"""A graph module learns as the model does where its code stops gradients, or computes its own."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.functional_models import VOCABULARY, Functional, layer
from torch import Tensor
from torch.nn import functional as F

import retrofit
from retrofit.errors import CaptureError
from retrofit.graphs.graph_module import graph_module


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
    with pytest.raises(CaptureError, match="cannot be made a graph module") as caught:
        graph_module(Truncated(says_so=True).eval(), ids())
    assert "set_grad_enabled" in caught.value.why


def test_a_backward_that_is_the_derivative_is_none_of_a_graphs_business_and_another_is_refused() -> None:
    model = WithOwn(2.0).eval()
    graph = graph_module(model, ids())
    parameters = list(model.parameters())
    for ours, theirs in zip(gradients(graph, parameters), gradients(model, parameters), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(CaptureError, match="learns") as caught:
        retrofit.apply(WithOwn(3.0).eval(), "altup(k=2)", example_inputs=ids(), emit="graph")
    assert "Scaled" in caught.value.why and "emit='module'" in caught.value.remedy
