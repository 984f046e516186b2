"""What writes into its operands gives new values, and the graph computes what the code does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from retrofit.emitted import graph_module
from retrofit.program.capture import capture
from retrofit.program.functionalize import functionalize, mutates

STEPS: dict[str, Any] = {
    "new": lambda x, y: x * 2 + y,
    "view": lambda x, y: x.view(-1).view(3, 4),
    "turned": lambda x, y: x.reshape(4, 3).t(),
    "row": lambda x, y: x[1:2].expand(3, 4),
    "flat": lambda x, y: x.view(-1),
    "by_strides": lambda x, y: x.as_strided((2, 3), (1, 2)),
    "slice": lambda x, y: x[:, 1:4],
    "strided": lambda x, y: x[..., ::2],
    "select": lambda x, y: x[1],
    "column": lambda x, y: x.select(-1, 0),
    "transposed": lambda x, y: x.transpose(0, -1),
    "permuted": lambda x, y: x.permute(*range(1, x.dim()), 0),
    "unsqueezed": lambda x, y: x.unsqueeze(-1),
    "squeezed": lambda x, y: x.squeeze(-1),
    "diagonal": lambda x, y: x.diagonal(),
    "same": lambda x, y: x.to(torch.float32),
    "dropped": lambda x, y: nn.functional.dropout(x, 0.5, False),
    "like": lambda x, y: x.type_as(y),
    "product": lambda x, y: x @ torch.eye(4),
    "parts": lambda x, y: torch.cat(x.chunk(2, 1)[::-1], 1),
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(1.5),
    "fill_": lambda x, y: x.masked_fill_(x > 0, -1.0),
    "put_": lambda x, y: x.index_put_((torch.tensor([0, 1]),), y[:2]),
    "copy_": lambda x, y: x.copy_(y),
    "part_": lambda x, y: x[..., 1:].mul_(y.mean()),
    "row_": lambda x, y: x[0].copy_(y[1]),
    "ranked_": lambda x, y: scaled_best(x) + y,
    "halves_": lambda x, y: halves_written(x),
}


def scaled_best(x: Tensor) -> Tensor:
    """The largest numbers of a row, written into, where they belong: one of two results of an operation is written into."""
    best, places = x.topk(2, -1)
    best /= best.sum(-1, keepdim=True)
    return torch.zeros_like(x).scatter(-1, places, best) + best.sum()


def halves_written(x: Tensor) -> Tensor:
    """One of two results that share the memory of what they are parts of is written into."""
    one, other = x.split(2, -1)
    one.mul_(2.0)
    return x + one.sum() + other.sum()


class Code(nn.Module):
    """Each step makes a value of two earlier ones, or writes into the first; all of them are read in the end."""

    def __init__(self, steps: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = tuple(steps)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x + 1, x - 1]
        for name, one, other in self.steps:
            values.append(STEPS[name](values[one % len(values)], values[other % len(values)].clone()))
        return tuple(value + 0 for value in values)


def checked(module: nn.Module, x: Tensor) -> bool:
    """Whether the graph could be made functional; if it could, it computes what the module does."""
    traced = make_fx(module, tracing_mode="fake", pre_dispatch=True)(x.clone())
    if not functionalize(traced.graph):
        assert any(mutates(node) for node in traced.graph.nodes)
        return False
    assert not any(mutates(node) for node in traced.graph.nodes)
    traced.graph.lint()
    for ours, theirs in zip(fx.Interpreter(traced).run(x.clone()), module(x.clone()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return True


@settings(max_examples=75, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=7))
def test_any_code_computes_what_it_did_or_is_left_alone(steps: list[tuple[str, int, int]]) -> None:
    module, x = Code(steps), torch.randn(3, 4)
    try:
        module(x.clone())
    except (RuntimeError, IndexError, ValueError):  # no such view, no two halves, several values in one place that is written
        assume(False)
    checked(module, x)


@pytest.mark.parametrize(
    ("steps", "able"),
    [
        ([("add_", 0, 1)], True),
        ([("add_", 0, 1), ("mul_", 2, 0), ("fill_", 0, 1)], True),
        ([("put_", 0, 1), ("new", 0, 2)], True),
        ([("add_", 0, 1), ("view", 0, 0), ("new", 3, 0)], True),
        ([("view", 0, 0), ("add_", 0, 1)], True),  # the view, read in the end, sees what was written
        ([("view", 0, 0), ("add_", 2, 1)], False),  # what it is a view of is read in the end too
        ([("slice", 0, 0), ("select", 2, 0), ("mul_", 3, 0), ("transposed", 0, 0), ("mul_", 4, 0)], True),
        ([("turned", 0, 0), ("mul_", 0, 0)], False),  # a reshape may be a view or not
        ([("dropped", 0, 0), ("add_", 2, 1)], False),  # in evaluation dropout returns its argument
        ([("parts", 0, 0), ("add_", 0, 1)], True),
        ([("like", 0, 1), ("add_", 2, 1)], True),  # of the same type already: the tracer records it as the same value
        ([("product", 0, 1), ("add_", 2, 1)], True),
        ([("ranked_", 0, 1), ("new", 2, 0)], True),  # the two results are memory of their own
        ([("halves_", 0, 0)], False),  # these are views
        ([("transposed", 0, 0), ("fill_", 2, 1), ("view", 0, 0)], True),  # the new contents lie in memory in another order
        ([("transposed", 0, 0), ("fill_", 2, 1), ("new", 0, 1), ("flat", 4, 0)], True),
        ([("transposed", 0, 0), ("fill_", 2, 1), ("by_strides", 0, 0)], True),
        ([("new", 0, 1), ("fill_", 0, 1), ("transposed", 2, 0), ("by_strides", 4, 0)], True),
        ([("slice", 0, 0), ("fill_", 2, 1), ("by_strides", 2, 0)], False),  # reads what lies between the elements of a slice
    ],
)
def test_memory_that_is_shared_is_left_alone(steps: list[tuple[str, int, int]], able: bool) -> None:
    assert checked(Code(steps), torch.randn(3, 4)) == able


def test_copies_in_another_order_are_viewed() -> None:
    """What is copied, from a transposed value, into one, or from a single column, lies in memory in another order."""

    class Copied(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            one, other, column = x + 1, x + 2, x + 3
            one.copy_(x.reshape(4, 3).t() * 2)
            other.t().copy_(x.reshape(4, 3))
            column.copy_(x[:, :1])
            return tuple(value for written in (one, other, column) for value in (written.view(-1), written.as_strided((5,), (2,))))

    module, x = Copied(), torch.randn(3, 4)
    graph = capture(module, {"x": x}).graph
    assert all(str(node.target) != "aten.copy.default" for node in graph.nodes)
    for ours, theirs in zip(fx.Interpreter(fx.GraphModule(module, graph)).run(x), module(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_what_is_written_keeps_its_type() -> None:
    """x.add_(y) is as x is, x + y is as the wider of the two."""

    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            half = x.half() * 2
            return (half.add_(x),)

    assert not checked(Narrow(), torch.randn(3, 4))


def test_an_input_that_is_written_into_is_left_alone() -> None:
    class Into(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.add_(1) * 2,)

    assert not checked(Into(), torch.randn(3, 4))


class Mapped(nn.Module):
    """Masks by a function of two positions, as libraries make them, and something written into."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        seen = torch.vmap(torch.vmap(lambda one, other: one - other >= 0, in_dims=(None, 0)), in_dims=(0, None))(places, places)
        made = self.mix(x)
        made[:, 0] += 1
        return seen.to(x) @ made


def test_functions_that_are_mapped_are_taken_apart() -> None:
    model = Mapped()
    graph = graph_module(model, {"x": torch.randn(2, 5, 4)})
    other = torch.randn(3, 7, 4)
    torch.testing.assert_close(graph(x=other), model(other))


class WrittenOver(nn.Module):
    """Parts of a tensor are written over with values of its shape and type, and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.row = nn.Linear(4, 4), nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.new_zeros(*x.shape[:-1], 9)
        made[..., :4].copy_(self.one(x))
        made[..., 4:7].copy_(self.row)
        return made * made


def test_what_is_written_over_learns() -> None:
    """The graph module's outputs and gradients are the module's own, on another batch and length than captured."""
    torch.manual_seed(0)
    model, x = WrittenOver(), torch.randn(2, 5, 4)
    graph = graph_module(model, {"x": x})
    other = torch.randn(3, 7, 4)
    gradients = []
    for one in (model, graph):
        one.zero_grad()
        out = one(x=other)
        out.sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in one.named_parameters()})
        assert torch.equal(out, model(x=other))
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=2e-6, atol=1e-5)  # a float64 row in a float32 tensor
