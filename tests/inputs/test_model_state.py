"""A model that is run is left as it was."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from support.tiny_models import llama
from torch import nn

import retrofit
from retrofit.inputs.model_state import evaluation_mode, preserve_modes, preserve_random_state, preserve_state


def mixed() -> nn.Sequential:
    """A model in training mode with one frozen layer in evaluation mode."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2))).train()
    model[0].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_module_evaluates_and_has_its_own_mode_back() -> None:
    model = mixed()
    before = modes(model)
    assert True in before and False in before
    with evaluation_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_modes_come_back_after_an_error() -> None:
    model = mixed()
    before = modes(model)

    def fail() -> None:
        with preserve_modes(model):
            model.train()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert modes(model) == before


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


def test_hooks_that_a_model_adds_to_itself_are_gone_with_the_note_that_they_are_there() -> None:
    """transformers does so at the first call that asks for hidden states: with hooks and no note of them it would do it again."""
    model, ids = llama(), torch.arange(5)[None]
    keep = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
    with preserve_state(model), torch.no_grad():
        assert len(model(ids, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1
    assert all(handle.id in module._forward_hooks for handle, module in zip(keep, model.modules(), strict=True))
    for handle in keep:
        handle.remove()
    retrofit.apply(model, "sparse-ffn(sparsity=4)", example_inputs={"input_ids": ids, "output_hidden_states": True})
    with torch.no_grad():
        assert len(model(ids, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1


def test_a_hook_that_takes_itself_off_stays_off() -> None:
    model = nn.Linear(3, 3)
    handle = model.register_forward_pre_hook(lambda *_: handle.remove())
    with preserve_state(model):
        model(torch.zeros(1, 3))
    assert not model._forward_pre_hooks
