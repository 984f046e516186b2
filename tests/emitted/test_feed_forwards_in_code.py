"""Feed-forwards in a layer's code become parts: what lies between their nodes moves, and equal steps before them become one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.own_models import Own
from torch import Tensor, nn

import retrofit
from retrofit.emitted import graph_module
from retrofit.errors import DoesNotFitError
from retrofit.provenance import provenance_of

IDS = {"x": torch.arange(14).reshape(2, 7) % 50}


class Layer(nn.Module):
    """A layer whose feed-forward is written inline, as `write` says: from the layer and the stream, with its attention."""

    def __init__(self, write: Callable[[Layer, Tensor], Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.write, self.dropout = write, nn.Dropout(p) if p else nn.Identity()
        self.norm, self.other_norm = nn.LayerNorm(24), nn.LayerNorm(24)
        self.mix, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 64), nn.Linear(32, 24)
        self.gate, self.value = nn.Linear(24, 32), nn.Linear(24, 32)

    def attend(self, y: Tensor) -> Tensor:
        query, key, value = self.mix(y).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value))

    def normed(self, x: Tensor) -> Tensor:
        return self.dropout(self.other_norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


def summed_first(layer: Layer, x: Tensor) -> Tensor:
    y = layer.norm(x)
    attention = layer.attend(y)
    gate, hidden = layer.up(y).chunk(2, -1)
    return x + attention + layer.down(gate.sigmoid() * hidden)


def attended_between(layer: Layer, x: Tensor) -> Tensor:
    y = layer.norm(x)
    gate, hidden = layer.up(y).chunk(2, -1)
    attention = layer.attend(y)
    return x + attention + layer.down(gate.sigmoid() * hidden)


def bare_weights(layer: Layer, x: Tensor) -> Tensor:
    y, linear = layer.norm(x), nn.functional.linear
    gate, hidden = linear(y, layer.up.weight).chunk(2, -1)
    x = x + layer.attend(y)
    return x + linear(gate.sigmoid() * hidden, layer.down.weight)


def normed_twice(layer: Layer, x: Tensor) -> Tensor:
    x = x + layer.attend(layer.norm(x))
    return x + layer.down(layer.gate(layer.normed(x)).sigmoid() * layer.value(layer.normed(x)))


def normed_once_without_gradient(layer: Layer, x: Tensor) -> Tensor:
    x = x + layer.attend(layer.norm(x))
    with torch.no_grad():
        frozen = layer.normed(x)
    return x + layer.down(layer.gate(frozen).sigmoid() * layer.value(layer.normed(x)))


def own(write: Callable[[Layer, Tensor], Tensor], p: float = 0.0) -> Own:
    model = Own()
    model.b = nn.ModuleList(Layer(write, p) for _ in range(2))
    return model.eval()


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sparse-ffn(sparsity=4)", "shared-moe(experts=2)"])
@pytest.mark.parametrize("write", [summed_first, normed_twice])
def test_a_feed_forward_in_a_layers_code_is_rewritten_on_the_graph(write: Callable[[Layer, Tensor], Tensor], spec: str) -> None:
    rewritten = retrofit.apply(own(write), spec, example_inputs=IDS, verify=False)
    (account,) = provenance_of(rewritten).rewrites
    assert [site.name for site in account.sites] == ["b.0.ffn", "b.1.ffn"]


@pytest.mark.first(2)
@pytest.mark.parametrize("write", [summed_first, attended_between, bare_weights, normed_twice])
def test_the_graph_is_the_model_and_learns_as_it_does(write: Callable[[Layer, Tensor], Tensor]) -> None:
    model = own(write)
    graph = graph_module(model, IDS)
    part = graph.get_submodule("b.0.ffn")
    assert not any(isinstance(module, nn.LayerNorm) for module in part.modules())
    names = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in part.named_parameters()}
    assert names <= {"up", "down", "gate", "value"} and "down" in names
    ids = torch.arange(15).reshape(3, 5)
    torch.testing.assert_close(graph(ids), model(ids))
    of_model, of_graph = (
        torch.autograd.grad(one(ids).square().mean(), list(model.parameters()), allow_unused=True) for one in (model, graph)
    )
    torch.testing.assert_close(of_graph, of_model)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("write", "p"), [(normed_twice, 0.5), (normed_once_without_gradient, 0.0)])
def test_steps_that_draw_or_learn_differently_are_not_one(write: Callable[[Layer, Tensor], Tensor], p: float) -> None:
    model = own(write, p)
    graph = graph_module(model, IDS)
    model.train(), graph.train()
    found = []
    for one in (model, graph):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(torch.autograd.grad(one(**IDS).square().mean(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(*found)
    with pytest.raises(DoesNotFitError):
        retrofit.apply(own(write, p), "sparse-ffn(sparsity=4)", example_inputs=IDS)
