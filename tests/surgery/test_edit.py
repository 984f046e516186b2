"""Edits: undo takes back any sequence of them, and the account says where every dense parameter is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from retrofit.errors import DoesNotFitError
from retrofit.surgery import Edit, Rearranged


class Model(nn.Module):
    """Two branches that share a module, tied weights, a buffer that is not saved, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.second = nn.ModuleDict({"shared": self.first[0], "own": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.second["own"].weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.scale = 2.0
        self.config = {"width": 4}


def state(model: nn.Module) -> list[Any]:
    """Everything an edit can change, by identity."""
    found: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        registries = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
        found.append((path, id(module), sorted(module._non_persistent_buffers_set), module.training))
        found += [(path, name, [(key, id(value)) for key, value in getattr(module, name).items()]) for name in registries]
    plain = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    return [*found, plain, dict(model.config)]


def replace_module(edit: Edit, path: str) -> None:
    edit.replace_module(path, nn.Sequential(edit.model.get_submodule(path)))


def widen_head(edit: Edit) -> None:
    old = edit.model.head.weight
    new = nn.Parameter(torch.cat([old.detach(), torch.zeros_like(old)], 1))
    edit.widen_parameter(old, new, (slice(None), slice(0, old.shape[1])), "twice as wide")


EDITS: dict[str, Callable[[Edit], None]] = {
    "attribute": lambda edit: edit.set_attribute(edit.model, "scale", 3.0),
    "new attribute": lambda edit: edit.set_attribute(edit.model, "extra", object()),
    "buffer": lambda edit: edit.set_attribute(edit.model, "table", torch.zeros(2)),
    "parameter": lambda edit: edit.set_attribute(edit.model.head, "weight", nn.Parameter(torch.zeros(4, 4))),
    "item": lambda edit: edit.set_item(edit.model.config, "width", 8),
    "new item": lambda edit: edit.set_item(edit.model.config, "depth", 2),
    "shared module": lambda edit: replace_module(edit, "first.0"),
    "module": lambda edit: replace_module(edit, "second.own"),
    "child": lambda edit: edit.add_module(edit.model, "extra_head", nn.Linear(4, 2)),
    "saved": lambda edit: edit.make_persistent(edit.model, "table"),
    "hook": lambda edit: edit.add_handle(edit.model.head.register_forward_pre_hook(lambda module, args: None)),
    "widen": widen_head,
}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(sorted(EDITS)), max_size=8), st.booleans())
def test_undo_restores_everything(names: list[str], training: bool) -> None:
    model = Model().train(training)
    before, values = state(model), {name: value.clone() for name, value in model.state_dict().items()}
    edit = Edit(model)
    changed = []
    for name in names:
        EDITS[name](edit)
        changed.append(state(model))
    assert all(after != before for after in changed)
    edit.undo()
    assert state(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items()) and edit.journal == []
    assert {fate.kind for fate in edit.account().values()} == {"kept"}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(sorted(EDITS)), max_size=8))
def test_the_account_names_every_dense_parameter_where_it_is(names: list[str]) -> None:
    model = Model()
    dense = dict(model.named_parameters(remove_duplicate=False))
    edit = Edit(model)
    for name in names:
        EDITS[name](edit)
    now = dict(model.named_parameters(remove_duplicate=False))
    account = edit.account()
    assert account.keys() == dense.keys()
    for name, fate in account.items():
        if fate.kind in ("kept", "moved"):
            assert now[fate.name] is dense[name] and (fate.name == name) == (fate.kind == "kept")
        elif fate.kind == "widened":
            assert torch.equal(now[fate.name][fate.index], fate.scale * dense[name])
        else:
            assert fate.kind == "dropped" and not any(one is dense[name] for one in now.values())


def test_a_dropped_parameter_has_its_reason() -> None:
    model = Model()
    edit = Edit(model)
    bias = model.first[1].bias
    edit.drop_parameter(bias, "the new layer has no bias")
    edit.replace_module("first.1", nn.Linear(4, 4, bias=False))
    account = edit.account()
    assert account["first.1.bias"].why == "the new layer has no bias"
    assert account["first.1.weight"].why == "no module of the rewritten model holds it"
    assert account["first.0.weight"].kind == "kept"


def test_a_rearranged_parameter_is_read_back_through_its_layout() -> None:
    model = Model()
    edit = Edit(model)
    old = model.first[1].weight
    order = torch.tensor([2, 0, 3, 1])
    layout = Rearranged(transposed=True, order="order", dim=0)
    owner = nn.Module()
    owner.register_buffer("order", order)
    owner.weight = nn.Parameter(layout.ordered(old.detach(), order).t().clone())
    edit.replace_module("first.1", owner)
    edit.rearrange_parameter(old, owner.weight, owner, layout, "rows by block")
    fate = edit.account()["first.1.weight"]
    assert (fate.kind, fate.name, fate.layout.order) == ("rearranged", "first.1.weight", "first.1.order")
    assert torch.equal(fate.layout.dense(model.get_parameter(fate.name), model.get_buffer(fate.layout.order)), old)
    assert torch.equal(owner.weight.t(), old[order]), "unit i is the dense unit order[i]"


def test_a_module_is_replaced_under_every_name_and_takes_over_hooks_and_mode() -> None:
    model = Model().eval()
    calls: list[str] = []
    own = model.first[0].register_forward_hook(lambda module, args, output: calls.append(type(module).__name__))
    model.first[0].register_forward_hook(lambda module, args, output: calls.append("a user's"))
    edit = Edit(model)
    edit.add_handle(own)
    edit.replace_module("first.0", nn.Identity())
    assert model.first[0] is model.second["shared"] and not model.first[0].training
    model.first[0](torch.zeros(4))
    assert calls == ["Identity"]


@pytest.mark.parametrize("again", ["first.0", "second.shared", "first.0.0"])
def test_a_pass_replaces_a_module_once_under_whatever_name(again: str) -> None:
    model = Model()
    before = state(model)
    edit = Edit(model)
    edit.begin_pass("scale")
    replace_module(edit, "first.0")
    replace_module(edit, "first.1")
    with pytest.raises(DoesNotFitError) as refused:
        replace_module(edit, again)
    assert again in refused.value.what and "scale" in refused.value.what and refused.value.why and refused.value.remedy
    edit.begin_pass("another")
    replace_module(edit, again)
    edit.undo()
    assert state(model) == before


def test_findings_belong_to_the_pass_under_way() -> None:
    model = Model()
    edit = Edit(model)
    edit.begin_pass()
    edit.note("one finding")
    edit.expect_late_gradient(model.head.weight)
    assert edit.notes == ["one finding"] and edit.late_parameters() == ("second.own.weight",), "by its first name"
    edit.begin_pass()
    assert edit.notes == [] and edit.late_parameters() == ()
