"""Modules that own what a pass asks for: what is wrapped is that and nothing else, each module once, or there is a reason."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import peft
import pytest
import torch
from support import zoo
from support.feed_forward_models import IDS, Layer, Model, Plain
from support.functional_models import Functional
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.anatomy.feed_forward_parsing import feed_forwards
from retrofit.emitted import graph_module
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.rewriting import apply_reported
from retrofit.sdk import Anatomy, Edit, Pass, Plan, Site, WrappedModule, Wrapper, map_first, option

FACTOR = 1.5

# model, kind: what the parameters of the last product of each such branch are called; sites, and calls of these
LAST: dict[tuple[str, str], tuple[str, int, int]] = {
    ("masked/bert", "ffn"): (r"layer\.\d\.output\.dense", 2, 2),
    ("masked/bert", "attention"): (r"attention\.output\.dense", 2, 2),
    ("masked/albert", "ffn"): (r"\.ffn_output", 1, 2),
    ("seq2seq/t5", "attention"): (r"\.o\.weight", 6, 6),
    ("causal/llama", "ffn"): (r"mlp\.down_proj", 2, 2),
    ("causal/gpt2", "attention"): (r"attn\.c_proj", 2, 2),
    ("causal/gpt_neox", "ffn"): (r"dense_4h_to_h", 2, 2),  # beside the attention
    ("causal/gpt_neox", "attention"): (r"attention\.dense", 2, 2),
    ("causal/mixtral", "moe"): (r"experts\.down_proj", 2, 2),
    ("causal/deepseek_v3", "moe"): (r"experts\.down_proj", 1, 1),  # with the experts of all tokens
    ("causal/xlnet", "ffn"): (r"ff\.layer_2", 2, 2),  # the module of the feed-forward adds it to the stream, too
    ("seq2seq/t5", "ffn"): (r"\.wo\.", 4, 4),
    ("seq2seq/bart", "ffn"): (r"fc2", 4, 4),
    ("seq2seq/bart", "cross-attention"): (r"encoder_attn\.out_proj", 2, 2),
    ("image/vit", "ffn"): (r"mlp\.fc2", 2, 2),
    ("image/vit", "attention"): (r"attention\.o_proj", 2, 2),
    ("masked/electra", "attention"): (r"attention\.output\.dense", 2, 2),
}


class Scaled(Wrapper):
    """What `layer` returns at `key`, times a number that is one at the start."""

    def __init__(self, layer: nn.Module, key: int | str | None) -> None:
        super().__init__(layer)
        self.key, self.factor = key, nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_first(self.layer(*args, **kwargs), lambda y: self.factor * y, self.key)


@dataclasses.dataclass(frozen=True)
class ScalePlan(Plan):
    places: tuple[WrappedModule, ...] = ()


@dataclasses.dataclass(frozen=True)
class Scale(Pass[ScalePlan]):
    name: ClassVar[str] = "scale-sites"
    summary: ClassVar[str] = "scale what some modules return"
    paper: ClassVar[str] = "none"

    kind: str = option("ffn", "what is scaled")

    @property
    def exact(self) -> bool:
        return True

    def plan(self, anatomy: Anatomy) -> ScalePlan:
        places, near_misses = anatomy.sites(self.kind)
        sites = tuple(Site(place.path, "scaled") for place in places)
        return ScalePlan(sites, tuple(near_misses), len(sites), places=tuple(places))

    def apply(self, plan: ScalePlan, edit: Edit) -> None:
        for place in plan.places:
            place.install(edit, functools.partial(Scaled, key=place.stream_out))


@dataclasses.dataclass(frozen=True)
class ScaleByName(Scale):
    """The same by the module that a branch is computed in, as one would write it."""

    name: ClassVar[str] = "scale-by-name"

    def plan(self, anatomy: Anatomy) -> ScalePlan:
        names = [branch.name for layer in anatomy.layers for branch in layer.ffns]
        return ScalePlan(tuple(Site(name, "scaled") for name in names), new_parameters=len(names))

    def apply(self, plan: ScalePlan, edit: Edit) -> None:
        for site in plan.sites:
            edit.replace_module(site.name, Scaled(edit.model.get_submodule(site.name), None))


@torch.no_grad()
def scale(model: nn.Module, last: str = "") -> int:
    """Every parameter whose name has `last` in it is scaled, or where that is empty, every factor; returns how many were."""
    if not last:
        found = [module.factor for module in model.modules() if isinstance(module, Scaled)]
    else:
        found = [parameter for name, parameter in model.named_parameters() if re.search(last, name)]
    for parameter in found:
        parameter.mul_(FACTOR)
    return len(found)


@pytest.mark.first(3)
@pytest.mark.parametrize(("name", "kind"), LAST)
@torch.no_grad()
def test_what_is_wrapped_is_what_was_asked_for_and_nothing_else(name: str, kind: str) -> None:
    entry, (last, sites, calls) = zoo.entry(name), LAST[name, kind]
    dense, model = zoo.shallow(entry), zoo.shallow(entry)
    inputs, others = zoo.inputs(entry, model), zoo.inputs(entry, model, batch=3, length=7, seed=4)
    places, near_misses = retrofit.inspect(model, inputs).sites(kind)
    assert (len(places), sum(len(place.depths) for place in places), near_misses) == (sites, calls, [])
    assert all(any(branch.role.endswith(kind) for branch in place.branches) for place in places)
    unscaled = zoo.logits(dense(**others))
    assert scale(dense, last)
    expected = zoo.logits(dense(**others))
    assert not torch.allclose(expected, unscaled, atol=1e-3)
    retrofit.apply(model, Scale(kind=kind), example_inputs=inputs, verify=False)
    torch.testing.assert_close(zoo.logits(model(**others)), unscaled, atol=1e-5, rtol=1e-4)
    assert scale(model) == sites
    torch.testing.assert_close(zoo.logits(model(**others)), expected, atol=1e-5, rtol=1e-4)


def test_an_attention_of_two_modules_passes_every_check_as_one() -> None:
    entry = zoo.entry("masked/bert")
    model = zoo.shallow(entry)
    applied = apply_reported(model, Scale(kind="attention"), example_inputs=zoo.inputs(entry, model))
    assert applied.report is not None and applied.report.ok
    assert {fate.kind for fate in applied.fates.values()} == {"kept", "moved"}
    method = applied.report["method"]
    assert method.status == "skipped" and "formula" in method.why and "scale-sites" in method.why


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "last"), [("ffn", (6, 7)), ("attention", (2,))])
@torch.no_grad()
def test_parts_of_code_are_wrapped_in_the_graph(kind: str, last: tuple[int, ...]) -> None:
    dense, ids = Functional(), torch.arange(14).view(2, 7)
    model = retrofit.apply(Functional(), Scale(kind=kind), example_inputs={"ids": ids}, verify=False)
    for first in range(0, len(dense.w), 8):
        for number in last:
            dense.w[first + number].mul_(FACTOR)
    assert scale(model) == 3
    torch.testing.assert_close(model(ids=ids), dense(ids), atol=1e-5, rtol=1e-4)


@pytest.mark.long
@torch.no_grad()
def test_modules_of_a_graph_are_sites_as_those_of_the_model() -> None:
    entry = zoo.entry("masked/bert")
    model = zoo.shallow(entry)
    inputs, last = zoo.inputs(entry, model), LAST["masked/bert", "attention"][0]
    graph = retrofit.apply(graph_module(model, inputs), Scale(kind="attention"), verify=False)
    assert scale(model, last)
    expected = zoo.logits(model(**inputs))
    assert scale(model, last) and scale(graph) == 2
    for name, parameter in model.named_parameters():  # the graph is on the same parameters
        if re.search(last, name):
            parameter.div_(FACTOR**2)
    torch.testing.assert_close(zoo.logits(graph(**inputs)), expected, atol=1e-5, rtol=1e-4)


def test_a_module_that_several_layers_hold_is_one_site_of_all_their_depths() -> None:
    torch.manual_seed(0)
    shared = Plain(8, 24, "gelu", True)
    anatomy = retrofit.inspect(Model(8, shared, Plain(8, 24, "gelu", True), shared).eval(), {"ids": IDS})
    both, near_misses = anatomy.sites("ffn")
    assert [(place.path, place.depths) for place in both] == [("layers.0.f", ((0, 0), (0, 2))), ("layers.1.f", ((0, 1),))]
    assert not near_misses
    chosen, near_misses = anatomy.sites("ffn", layers=[0, 1])
    assert [place.path for place in chosen] == ["layers.1.f"] and [miss.name for miss in near_misses] == ["layers.0.f"]
    assert len(anatomy.sites("ffn", layers=[0, 2])[0]) == 1


class UsedTwice(Model):
    """Its first feed-forward also makes the features that the head reads."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.layers[0].f(x).relu())


class OneActivation(Layer):
    """A feed-forward in the layer's code, with an activation that it is given."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(8, nn.Identity())
        self.up, self.act, self.down = nn.Linear(8, 24), activation, nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.m(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(self.act(self.up(self.n(x))))


class WeightsOfAModule(Layer):
    """Its code multiplies by the weights of its feed-forward, which is never called."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.m(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + F.linear(F.gelu(F.linear(self.n(x), self.f.a.weight)), self.f.b.weight)


@torch.no_grad()
def test_a_module_whose_weights_are_applied_outside_of_it_does_not_own_what_they_compute() -> None:
    torch.manual_seed(0)
    dense = Model(8).eval()
    dense.layers = nn.ModuleList(WeightsOfAModule(8, Plain(8, 24, "gelu", True)) for _ in range(2))
    places, near_misses = retrofit.inspect(dense.eval(), {"ids": IDS}).sites("ffn")
    assert not places and [miss.name for miss in near_misses] == ["layers.0", "layers.1"]
    graph = retrofit.apply(dense, Scale(), example_inputs={"ids": IDS}, verify=False)
    assert scale(graph) == 2
    found = graph(ids=IDS)
    assert scale(dense, r"\.b\.weight")
    expected = dense(IDS)
    for layer in dense.layers:  # the graph is on the same parameters
        layer.f.b.weight.div_(FACTOR)
    torch.testing.assert_close(found, expected)


def test_what_also_runs_elsewhere_is_left_alone_with_the_reason() -> None:
    twice = UsedTwice(8, *(Plain(8, 24, "gelu", True) for _ in range(2))).eval()
    places, near_misses = retrofit.inspect(twice, {"ids": IDS}).sites("ffn")
    assert [place.path for place in places] == ["layers.1.f"] and [miss.name for miss in near_misses] == ["layers.0.f"]
    activation = nn.GELU()
    model = Model(8).eval()
    model.layers = nn.ModuleList(OneActivation(activation) for _ in range(3))
    anatomy = retrofit.inspect(model.eval(), {"ids": IDS})
    for found, near_misses in (anatomy.sites("ffn"), feed_forwards(anatomy)):
        assert not found and len(near_misses) == 3 and all(miss.why for miss in near_misses)
    rewritten = retrofit.apply(model, "sparse-ffn(sparsity=4,active=4)", example_inputs={"ids": IDS})
    torch.testing.assert_close(rewritten(ids=IDS), model(IDS))


def test_a_dropout_that_also_runs_elsewhere_stays_where_it_is() -> None:
    entry = zoo.entry("causal/xlnet")
    model = zoo.build(entry, n_layer=1)
    (site,), _ = feed_forwards(retrofit.inspect(model, zoo.inputs(entry, model)))
    assert site.dropout == model.config.dropout and not any(path.endswith("dropout") for path in site.bypassed)
    assert not any(isinstance(module, nn.Dropout) for module in site.hidden.modules()), "it would be applied twice"


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "path"), [("ffn", "mlp"), ("attention", "self_attn")])
@torch.no_grad()
def test_adapters_are_of_the_branch_they_are_added_to(kind: str, path: str) -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.shallow(entry)
    inputs = zoo.inputs(entry, model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    for layer in model.model.layers:
        name = {"mlp": "down_proj", "self_attn": "o_proj"}[path]
        layer.get_submodule(f"{path}.{name}").register_forward_hook(lambda module, args, output: FACTOR * output)
    expected = zoo.logits(adapted(**inputs))
    for layer in model.model.layers:
        layer.get_submodule(f"{path}.{name}")._forward_hooks.clear()
    retrofit.apply(adapted, Scale(kind=kind), example_inputs=inputs, verify=False)
    assert scale(adapted) == len(model.model.layers)
    torch.testing.assert_close(zoo.logits(adapted(**inputs)), expected, atol=1e-5, rtol=1e-4)


def test_what_another_pass_has_put_beside_a_feed_forward_is_no_site() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.shallow(entry)
    inputs = zoo.inputs(entry, model)
    retrofit.apply(model, "memory(beside=ffns,lookup=softmax)", example_inputs=inputs, verify=False)
    places, near_misses = retrofit.inspect(model, inputs).sites("ffn", "moe")
    assert [place.path for place in places] == [f"model.layers.{depth}.mlp.layer" for depth in range(2)]
    assert len(near_misses) == 2


def test_a_kind_without_owners_says_why() -> None:
    entry = zoo.entry("causal/mixtral")
    anatomy = retrofit.inspect(zoo.shallow(entry), zoo.inputs(entry, zoo.shallow(entry)))
    places, near_misses = anatomy.sites("ffn")
    assert not places and len(near_misses) == 2 and all(miss.in_any_form for miss in near_misses)
    nothing, (miss,) = anatomy.sites("cross-attention")
    assert not nothing and miss.name == "" and "cross-attention" in miss.why and miss.in_any_form
    layers, _ = anatomy.sites("layer")
    assert [place.path for place in layers] == [layer.name for layer in anatomy.layers]
    for kinds in (("feed-forward",), ()):
        with pytest.raises(SpecError) as refused:
            anatomy.sites(*kinds)
        assert "cross-attention" in refused.value.why


def test_a_module_that_also_adds_the_branch_is_no_site() -> None:
    entry = zoo.entry("masked/albert")
    model = zoo.shallow(entry)
    places, near_misses = retrofit.inspect(model, zoo.inputs(entry, model)).sites("attention")
    assert not places and [miss.name.rpartition(".")[2] for miss in near_misses] == ["attention"]
    assert near_misses[0].remedy.endswith("attention.dense"), "what returns the branch, for a pass that changes only that"
    with pytest.raises(DoesNotFitError):
        retrofit.apply(model, Scale(kind="attention"), example_inputs=zoo.inputs(entry, model), verify=False)


def test_a_pass_that_wraps_a_shared_module_once_a_depth_is_refused_and_takes_nothing_along() -> None:
    entry = zoo.entry("masked/albert")
    model = zoo.shallow(entry)
    before, modules = model.state_dict(), list(model.modules())
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.apply(model, ScaleByName(), example_inputs=zoo.inputs(entry, model), verify=False)
    assert "albert_layers.0" in refused.value.what and "scale-by-name" in refused.value.what and refused.value.remedy
    assert list(model.modules()) == modules and model.state_dict().keys() == before.keys()
