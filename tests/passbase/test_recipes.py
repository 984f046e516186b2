"""Passes one after another; and passes that fail, which leave the model as it was."""

from __future__ import annotations

import copy
import dataclasses
from typing import ClassVar

import pytest
import torch
from support import retrofitted, zoo
from support.refusals import refused
from support.tiny_models import gpt2, llama
from torch import nn

import retrofit
from retrofit.errors import DoesNotFitError, RetrofitError, TrainingError, VerificationError
from retrofit.passbase.protocol import Pass, parse_recipe
from retrofit.passbase.replaying import CorrespondingSite, correspondence
from retrofit.passes import AltUp, SumEmbedding

ORDERS = {
    "altup-sum": (AltUp(k=2), SumEmbedding()),
    "sum-altup": (SumEmbedding(), AltUp(k=2)),
    "sum-hop": (SumEmbedding(), AltUp(k=3, init="hop")),
    "sum-recycled": (SumEmbedding(), AltUp(k=2, embedding="recycled")),
}


def tiny(name):
    entry = zoo.entry(name)
    model = zoo.build(entry)
    return model, zoo.inputs(entry, model)


# One after another


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("causal/llama", "altup-sum"),
        ("causal/llama", "sum-recycled"),
        ("causal/gpt2", "altup-sum"),
        ("causal/gpt2", "sum-hop"),
        ("masked/albert", "sum-altup"),
        ("seq2seq/bart", "sum-altup"),
    ],
)
def test_two_passes_keep_the_function_and_the_trip_to_disk(name, order, tmp_path):
    model, given = tiny(name)
    dense = retrofitted.logits(model, given)
    for one in ORDERS[order]:
        retrofit.apply(model, one, verify=False)
    assert retrofit.recipe(model) == ORDERS[order]
    torch.testing.assert_close(retrofitted.logits(model, given), dense, rtol=1e-4, atol=1e-4)
    retrofitted.moved(model)
    expected = retrofitted.logits(model, given)
    assert (expected - dense).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert retrofit.recipe(loaded) == ORDERS[order]
    assert torch.equal(retrofitted.logits(loaded, given), expected)


def test_passes_in_one_call_are_passes_in_two():
    once, given = tiny("causal/llama")
    retrofit.apply(once, "sum", "altup(k=2)", verify=False)
    twice, _ = tiny("causal/llama")
    retrofit.apply(twice, "sum", verify=False)
    retrofit.apply(twice, "altup(k=2)", verify=False)
    assert retrofit.recipe(once) == retrofit.recipe(twice)
    assert set(once.state_dict()) == set(twice.state_dict())
    assert torch.equal(retrofitted.logits(once, given), retrofitted.logits(twice, given))


def test_a_pass_works_again_on_other_layers():
    model, _ = tiny("causal/llama")
    layers = len(retrofit.inspect(model).stacks[0].layers)
    specs = ("sparse-ffn(sparsity=4, layers=0)", f"sparse-ffn(sparsity=2, layers=1-{layers - 1})")
    retrofit.apply(model, *specs, verify=False)
    assert retrofit.recipe(model) == parse_recipe(specs)
    assert [module.sparsity for module in model.modules() if hasattr(module, "sparsity")] == [4] + [2] * (layers - 1)


# Failing


def snapshot(model):
    """All that a model is made of: every module, what it holds, its hooks, every value, its config."""
    modules = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = {}
        for name, value in vars(module).items():
            table = isinstance(value, dict) and (name in ("_parameters", "_buffers", "_modules") or "hooks" in name)
            held[name] = {key: id(item) for key, item in value.items()} if table else repr(value)
        modules[path] = (id(module), type(module), module.training, held)
    values = {name: (id(tensor), tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    settings = {name: module.config.to_dict() for name, module in model.named_modules() if hasattr(module, "config")}
    return modules, values, settings


def assert_same(before, after):
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert after[1].keys() == before[1].keys()
    for name, (place, value) in before[1].items():
        assert after[1][name][0] == place and torch.equal(after[1][name][1], value), name


class Halfway(Exception):
    """What no pass expects."""


@dataclasses.dataclass(frozen=True)
class Broken(Pass):
    """Rewrites with another pass and then fails."""

    name: ClassVar[str] = "broken"
    summary: ClassVar[str] = "fail after the rewriting"
    paper: ClassVar[str] = ""
    inner: ClassVar[Pass] = AltUp(k=2)
    error: ClassVar[type[BaseException]] = Halfway

    exact = True

    def plan(self, anatomy):
        return self.inner.plan(anatomy)

    def apply(self, plan, edit):
        self.inner.apply(plan, edit)
        raise self.error("halfway")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("causal/llama", KeyboardInterrupt),
        ("causal/gpt2", Halfway),
        ("seq2seq/t5", Halfway),
        ("masked/albert", Halfway),
        ("image/vit", Halfway),
    ],
)
def test_a_pass_that_fails_halfway_leaves_the_model_as_it_was(name, error, monkeypatch):
    model, given = tiny(name)
    dense, before = retrofitted.logits(model, given), snapshot(model)
    monkeypatch.setattr(Broken, "error", error)
    with pytest.raises(error, match="halfway"):
        retrofit.apply(model, Broken(), verify=False)
    assert_same(before, snapshot(model))
    assert retrofit.recipe(model) is None
    assert torch.equal(retrofitted.logits(model, given), dense)


def test_the_second_of_two_passes_fails_and_takes_the_first_with_it():
    model, _ = tiny("causal/gpt2")
    before = snapshot(model)
    with pytest.raises(Halfway):
        retrofit.apply(model, SumEmbedding(), Broken(), verify=False)
    assert_same(before, snapshot(model))


def test_a_failing_pass_leaves_an_earlier_recipe():
    model, given = tiny("causal/llama")
    retrofit.apply(model, SumEmbedding(), verify=False)
    retrofitted.moved(model)
    expected, before = retrofitted.logits(model, given), snapshot(model)
    with pytest.raises(Halfway):
        retrofit.apply(model, Broken(), verify=False)
    assert_same(before, snapshot(model))
    assert retrofit.recipe(model) == (SumEmbedding(),)
    assert torch.equal(retrofitted.logits(model, given), expected)


@dataclasses.dataclass(frozen=True)
class Wrong(AltUp):
    """AltUp that is not what it says: its head is off."""

    def rewrite(self, anatomy, edit):
        done = super().rewrite(anatomy, edit)
        edit.set_attribute(anatomy.model, "lm_head", nn.Linear(128, 99, bias=False))
        return done


def test_a_rewrite_that_fails_its_checks_is_taken_back():
    model, given = tiny("causal/llama")
    dense, before = retrofitted.logits(model, given), snapshot(model)
    with refused(VerificationError, "function") as failed:
        retrofit.apply(model, Wrong(k=2))
    assert not failed.value.report.ok
    assert_same(before, snapshot(model))
    assert torch.equal(retrofitted.logits(model, given), dense)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("form", "again"),
    [
        ("llama", AltUp(k=2)),
        ("llama", AltUp(k=3, init="hop", embedding="recycled")),
        ("llama-recycled", AltUp(k=2)),
        ("gpt2", AltUp(k=2, embedding="recycled")),
        ("albert", AltUp(k=2)),
        ("vit", AltUp(k=2)),
    ],
)
def test_altup_on_altup_is_refused(form, again):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    expected, before = retrofitted.logits(model, given), snapshot(model)
    with refused(DoesNotFitError, "altup", "already") as error:
        retrofit.apply(model, again, verify=False)
    assert error.value.remedy
    assert_same(before, snapshot(model))
    assert torch.equal(retrofitted.logits(model, given), expected)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "altup", "why"),
    [
        ("masked/albert", AltUp(k=2, embedding="recycled"), "share their weights"),
        ("causal/llama", AltUp(k=2, stacks="encoder"), "stacks=encoder"),
        ("causal/llama", AltUp(k=2, layers="0-9"), "depth 9"),
        ("causal/llama", AltUp(k=2, layers="first"), "first"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(name, altup, why):
    model, _ = tiny(name)
    before = snapshot(model)
    with pytest.raises(RetrofitError, match=why):
        retrofit.apply(model, altup, verify=False)
    assert_same(before, snapshot(model))


@pytest.mark.long
def test_a_site_is_followed_through_the_wrappers_of_later_passes() -> None:
    dense = llama()
    model = retrofit.apply(
        copy.deepcopy(dense), "sparse-ffn(sparsity=4)", "altup(k=2)", "sequence-altup(k=2, layers=1)", verify=False
    )
    sites = correspondence(model, dense).sites
    assert [(site.dense, site.method) for site in sites] == [
        ("model.layers.0.mlp", "sparse-ffn"),
        ("model.layers.1", "sequence-altup"),
        ("model.layers.1.mlp", "sparse-ffn"),
    ]
    for site in sites:
        assert type(dense.get_submodule(site.dense)) is not type(model.get_submodule(site.rewritten))
    assert sites[0].rewritten == "model.layers.0.layer.mlp"  # inside AltUp's wrapper


def test_exact_passes_leave_nothing_to_learn() -> None:
    dense = gpt2()
    model = retrofit.apply(copy.deepcopy(dense), "altup(k=2)", verify=False)
    assert correspondence(model, dense).sites == ()


def test_other_teachers_are_refused_with_what_differs() -> None:
    dense = llama()
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=4)", verify=False)
    with refused(TrainingError, code="other-model", option="teacher") as wider:
        correspondence(model, llama(intermediate_size=40))
    assert "24" in wider.value.why and "40" in wider.value.why
    with refused(TrainingError, code="rewritten", option="teacher"):
        correspondence(model, model)
    with refused(TrainingError, code="not-rewritten"):
        correspondence(dense, dense)


def test_a_site_names_both_paths_where_they_differ() -> None:
    assert str(CorrespondingSite("a.mlp", "a.layer.mlp", "sparse-ffn")) == "a.layer.mlp (of the dense model: a.mlp)"
    assert str(CorrespondingSite("a", "a", "sparse-ffn")) == "a"
