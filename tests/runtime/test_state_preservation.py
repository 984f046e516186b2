"""Running a model without leaving a trace in it."""

from __future__ import annotations

import copy
import random

import numpy
import torch
from torch import nn

from retrofit.runtime.state_preservation import preserve_random_state, preserve_state


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        self.last = x
        return x * self.weight


def test_buffers_attributes_gradients_and_modes_are_what_they_were() -> None:
    model = Counting().train()
    model(torch.ones(2)).sum().backward()
    gradient, count, last = model.weight.grad, model.count, model.last
    with preserve_state(model):
        assert not model.training and model.weight.grad is None
        model(torch.zeros(2)).sum().backward()
        model.new = 1
    assert model.training and model.weight.grad is gradient
    assert model.count is count and float(count) == 1
    assert model.calls == 1 and model.last is last and not hasattr(model, "new")


def test_what_is_written_into_a_buffer_leaves_no_graph_behind() -> None:
    model = Counting()
    model.register_buffer("kept", torch.zeros(2))
    with preserve_state(model):
        model.kept.copy_(model(torch.ones(2)))
        assert model.kept.requires_grad
    assert not model.kept.requires_grad and not model.kept.any()
    copy.deepcopy(model)


def test_a_changed_weight_is_the_callers_own() -> None:
    model = Counting()
    with preserve_state(model):
        model.weight.data.zero_()
    assert not model.weight.any()


def test_random_numbers_go_on_where_they_were() -> None:
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    expected = (torch.rand(3), random.random(), numpy.random.rand())
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    with preserve_random_state():
        torch.rand(7), random.random(), numpy.random.rand()
    assert torch.equal(torch.rand(3), expected[0]) and (random.random(), numpy.random.rand()) == expected[1:]
