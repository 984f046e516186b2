"""`plan_of`: it does nothing to the model, and says beforehand what `apply` then does."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.functional_models import VOCABULARY, Functional
from support.own_models import Block, Own
from support.refusals import refused
from support.tiny_models import Plain, bert, gpt2, llama, t5, vit
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import retrofit
from retrofit.anatomy.parts import NearMiss, Site
from retrofit.checks.method import dense_path
from retrofit.errors import CaptureError, DoesNotFitError, SpecError
from retrofit.inputs.model_memory import without_weights
from retrofit.passbase.protocol import Plan
from retrofit.preview import PlannedPass, RecipePlan
from retrofit.rewriting import apply_reported


def functional() -> nn.Module:
    """A model whose layers are code, with a table of ids that no module holds."""
    return Functional(layers=2)


def half() -> Any:
    return llama().bfloat16()


def retrofitted() -> Any:
    """A model that a pass has rewritten already."""
    return retrofit.apply(llama(), "altup(k=2)", verify=False)


def rewritten_twice() -> Any:
    """A model with a tied head that two passes have rewritten, one after the other."""
    return retrofit.apply(retrofit.apply(gpt2(), "sum", verify=False), "sparse-ffn(sparsity=8)", verify=False)


def inputs_for(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor] | None:
    if build is not functional:
        return None
    return {"ids": torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))}


ALTUP, FFN, QKV, LOSS = "altup(k=2)", "sparse-ffn(sparsity=8)", "sparse-qkv", "sparse-loss(modules=2)"
CASES: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (llama, (ALTUP,)),
    (llama, (FFN,)),
    (llama, (QKV,)),
    (llama, (LOSS,)),
    (llama, ("sum", FFN, LOSS)),
    (llama, (ALTUP, FFN)),
    (llama, (FFN, ALTUP)),
    (llama, ("recurrence(rank=4)",)),
    (gpt2, ("sum", QKV)),
    (gpt2, ("altup(k=2, embedding=recycled)",)),
    (bert, ("sum", FFN)),
    (t5, (FFN, "sum")),
    (vit, (FFN,)),
    (half, (ALTUP, FFN)),
    (functional, (FFN,)),
    (retrofitted, (FFN,)),
    (rewritten_twice, (ALTUP,)),
]
EACH_KIND = [case for case in CASES if case[0] is not llama or len(case[1]) == 3]  # of model, and one longer recipe


def identify(case: Any) -> str:
    return case.__name__ if callable(case) else " + ".join(spec.partition("(")[0] for spec in case)


# ── Nothing is done ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """Containers and plain data by what they hold, which a capture may rebuild, and anything else by its identity."""
    return repr(value) if isinstance(value, (dict, list, tuple, set, str, int, float, bool)) else id(value)


def everything_about(model: nn.Module) -> dict[str, Any]:
    """The objects and values that make a model what it is, and the state of the random number generators."""
    return {
        "modules": {path: id(module) for path, module in model.named_modules(remove_duplicate=False)},
        "classes": {path: type(module) for path, module in model.named_modules()},
        "tensors": {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
        "gradients": {name: (one.requires_grad, one.grad) for name, one in model.named_parameters()},
        "attributes": {path: {key: plain(value) for key, value in vars(module).items()} for path, module in model.named_modules()},
        "modes": {path: module.training for path, module in model.named_modules()},
        "config": str(getattr(model, "config", None)),
        "random": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
    }


@pytest.mark.first(1)
@pytest.mark.parametrize(("build", "specs"), EACH_KIND, ids=identify)
def test_nothing_about_the_model_changes(build: Callable[[], nn.Module], specs: tuple[str, ...]) -> None:
    model = build().train()
    next(model.children()).eval()
    model.register_forward_hook(lambda module, args, output: output)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = everything_about(model)
    retrofit.plan_of(model, *specs, example_inputs=inputs_for(build))
    after = everything_about(model)
    assert [name for name in before if before[name] != after[name]] == []
    state = model.state_dict()
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(state[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_no_weight_is_copied() -> None:
    model = gpt2()
    model.transformer.loose = (
        torch.ones(3) * model.transformer.ln_f.weight[:3]
    )  # an attribute, and not a leaf of the autograd graph
    skeleton: Any = without_weights(model)
    tensors = [*skeleton.parameters(), *skeleton.buffers(), skeleton.transformer.loose]
    assert all(tensor.is_meta for tensor in tensors)
    assert skeleton.lm_head.weight is skeleton.transformer.wte.weight
    assert [(name, one.shape, one.dtype) for name, one in skeleton.named_parameters(remove_duplicate=False)] == [
        (name, one.shape, one.dtype) for name, one in model.named_parameters(remove_duplicate=False)
    ]


# ── What it says is what happens ─────────────────────────────────────────────────────────────────────────────────────────────────


def without_wrappers(model: nn.Module, sites: tuple[Site, ...]) -> list[Site]:
    """The sites by names that a later pass, which wraps modules, does not change."""
    return [dataclasses.replace(site, name=dense_path(model, site.name)) for site in sites]


@pytest.mark.first(1)
@pytest.mark.parametrize(("build", "specs"), CASES, ids=identify)
def test_a_plan_says_what_apply_then_does(build: Callable[[], nn.Module], specs: tuple[str, ...]) -> None:
    model = build()
    plan = retrofit.plan_of(model, *specs, example_inputs=inputs_for(build))
    applied = apply_reported(model, *specs, example_inputs=inputs_for(build), verify=False)
    assert plan.fits
    for planned, rewrite in zip(plan.passes, applied.rewrites, strict=True):
        assert planned.spec == rewrite.spec
        assert planned.exact == rewrite.exact
        assert without_wrappers(applied.model, planned.plan.sites) == without_wrappers(applied.model, rewrite.sites)
        assert planned.plan.near_misses == rewrite.skipped
        assert (planned.plan.new_parameters, planned.plan.formula) == (rewrite.new_parameters, rewrite.formula)
    assert plan.parameters_before == applied.parameters_before
    assert plan.parameters_after == applied.parameters_after == sum(one.numel() for one in applied.model.parameters())
    assert (plan.flops_before, plan.flops_after) == (applied.flops_before, applied.flops_after)


@pytest.mark.parametrize(("specs", "captures"), [((FFN,), 1), (("sum", FFN), 2)], ids=["a pass", "two passes"])
def test_the_result_of_a_plan_is_run_and_not_captured(
    specs: tuple[str, ...], captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports: list[nn.Module] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda model, *args, **more: exports.append(model) or export(model, *args, **more))
    retrofit.plan_of(llama(), *specs)
    assert len(exports) == captures


class TracedOtherwise(nn.Module):
    """A module with one product more than its trace has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out if get_proxy_mode() else out + 0 * self.more(x[..., :4]).sum()


@pytest.mark.long
def test_products_that_only_a_run_has_are_not_counted() -> None:
    model = llama()
    model.model.layers[0].input_layernorm = TracedOtherwise(model.model.layers[0].input_layernorm)
    plan = retrofit.plan_of(model, FFN)
    applied = apply_reported(model, FFN, verify=False)
    assert (plan.flops_before, plan.flops_after) == (applied.flops_before, applied.flops_after)


@pytest.mark.long
def test_a_graph_module_is_planned_where_one_is_emitted() -> None:
    model = llama()
    plan = retrofit.plan_of(model, FFN, emit="graph")
    applied = apply_reported(model, FFN, emit="graph", verify=False)
    assert plan.passes[0].plan.sites == applied.rewrites[0].sites
    assert (plan.parameters_after, plan.flops_after) == (applied.parameters_after, applied.flops_after)


# ── Where nothing fits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize(("build", "spec"), [(vit, "sum"), (retrofitted, "altup(k=2)"), (Plain, "sparse-ffn(sparsity=8)")])
def test_a_pass_that_fits_nowhere_says_why_and_apply_refuses_it(build: Callable[[], nn.Module], spec: str) -> None:
    model = build()
    plan = retrofit.plan_of(model, spec)
    (planned,) = plan.passes
    assert not plan.fits and planned.plan.sites == ()
    assert planned.plan.near_misses and all(miss.why for miss in planned.plan.near_misses)
    assert planned.plan.near_misses[0].why in str(plan)
    assert plan.parameters_after == plan.parameters_before and plan.flops_after == plan.flops_before
    with pytest.raises(DoesNotFitError) as refusal:
        retrofit.apply(model, spec)
    assert refusal.value.by == spec.partition("(")[0] and refusal.value.what == f"{refusal.value.by}: {refusal.value.matter}"
    assert all(miss.code for miss in planned.plan.near_misses) and refusal.value.code == planned.plan.near_misses[0].code


class ThreeMatrices(Block):
    """A layer with a feed-forward of three matrices in its code, which is no part of a graph either."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.s = nn.Linear(2 * width, 2 * width)
        self.r.register_forward_pre_hook(lambda module, given: torch.relu(self.s(given[0])))


@pytest.mark.first(1)
@pytest.mark.parametrize("emit", ["module", "graph"])
def test_no_fix_is_to_make_a_graph_where_the_graph_does_not_fit_either(emit: str) -> None:
    model = Own().eval()
    model.b = nn.ModuleList(ThreeMatrices(24) for _ in range(2))
    (planned,) = retrofit.plan_of(model, "recurrence(rank=4)", emit=emit).passes
    assert [miss.remedy for miss in planned.plan.near_misses] == ["layers= leaves depths out"] * 2


def test_passes_after_one_that_fits_nowhere_are_planned_as_if_it_were_not_there() -> None:
    plan = retrofit.plan_of(vit(), "sum", FFN)
    alone = retrofit.plan_of(vit(), FFN)
    assert [one.fits for one in plan.passes] == [False, True]
    assert plan.passes[1].spec == alone.passes[0].spec and plan.passes[1].plan.sites == alone.passes[0].plan.sites
    assert (plan.parameters_after, plan.flops_after) == (alone.parameters_after, alone.flops_after)


def test_what_no_plan_can_be_made_of_is_an_error() -> None:
    with refused(SpecError, option="passes"):
        retrofit.plan_of(llama())
    with pytest.raises(CaptureError):
        retrofit.plan_of(functional(), FFN)


# ── How it reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_thirty_sites_and_near_misses_of_one_kind_are_one_line_each() -> None:
    sites = tuple(Site(f"layers.{i}.mlp", "one hidden unit of 8 active") for i in range(30))
    misses = tuple(NearMiss(f"layers.{i}.attn", "it has no product", "none") for i in range(30))
    planned = PlannedPass("some-pass()", True, Plan(sites, misses, 7, "7 = 7", notes=("seen once",)))
    lines = str(RecipePlan((planned,), 100, 107, 10, None)).splitlines()
    assert lines == [
        "recipe           some-pass()",
        "would rewrite    30 sites, the same function at step 0",
        "                 30 × layers.0–29.mlp: one hidden unit of 8 active",
        "leaves alone     30 × layers.0–29.attn: it has no product",
        "                   fix: none",
        "adds             7 parameters: 7 = 7",
        "notes            seen once",
        "parameters       100 → 107 (+7.0%)",
        "FLOPs per token  unknown until it is applied",
    ]


def test_a_plan_is_plain_data_too() -> None:
    plan = retrofit.plan_of(llama(), "sum", ALTUP)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["parameters"] == {"before": plan.parameters_before, "after": plan.parameters_after}
    assert data["flops_per_token"]["after"] == plan.flops_after
    assert [len(one["sites"]) for one in data["passes"]] == [len(one.plan.sites) for one in plan.passes]
    assert re.match(r"recipe +sum\(\)\nwould rewrite +1 site, ", str(plan))


def test_the_stages_are_reported() -> None:
    stages: list[str] = []
    retrofit.plan_of(llama(), "sum", FFN, progress=stages.append)
    assert stages == ["capturing the dense model", "planning sum", "planning sparse-ffn", "counting the cost of the result"]


@pytest.mark.parametrize(
    ("build", "spec", "said"),
    [
        (llama, "memory(buckets=8)", "buckets=8 has no effect with lookup=token-id"),
        (llama, "shared-moe(groups=0, share_attention=true)", "share_attention=true has no effect: no group has several layers"),
        (llama, "shared-moe(experts=2, reinit=0.5)", "reinit=0.5 has no effect: no expert is a copy of another"),
        (vit, "altup(extra=8)", "extra=8 has no effect: no token table is widened"),
    ],
)
def test_an_option_without_effect_is_noted_by_plan_and_by_apply(build: Callable[[], nn.Module], spec: str, said: str) -> None:
    model = build()
    assert said in retrofit.plan_of(model, spec).passes[0].plan.notes
    assert said in apply_reported(model, spec, verify=False, count_flops=False).rewrites[0].notes
