"""The shared-moe pass on whole models: against the dense model, and a plain loop over its feed-forwards."""

from __future__ import annotations

import copy
import xml.etree.ElementTree
from typing import Any

import pytest
import torch
from support.feed_forward_models import IDS, Model, Plain
from support.mixtures import blocks, build, logits, mixtures
from support.refusals import refused
from support.tiny_models import llama
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passes import SharedMoE
from retrofit.passes.shared_moe.mixture_of_experts import expert_load
from retrofit.rewriting import apply_reported

# Gated and plain feed-forwards, both gates in one, Conv1D, parallel branches, two modules, one set of weights for all, images.
MODELS = ("causal/llama", "causal/glm", "causal/gpt2", "causal/gpt_neox", "masked/bert", "masked/albert", "image/vit")


@pytest.mark.first(1)
@pytest.mark.parametrize("identity", MODELS)
def test_a_mixture_a_layer_computes_the_dense_function(identity: str) -> None:
    dense, inputs = build(identity)
    expected, size = logits(dense, inputs), sum(parameter.numel() for parameter in dense.parameters())
    one = apply_reported(dense, SharedMoE(groups=0), verify=False, count_flops=False).rewrites[0]
    found = logits(dense, inputs)
    assert one.exact
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert sum(parameter.numel() for parameter in dense.parameters()) - size == one.new_parameters
    layers = list(dict.fromkeys(mixtures(dense)))
    assert len(layers) == len(blocks(dense))
    moe = layers[0]
    copies = sum(parameter.numel() for parameter in moe.parameters()) - moe.router.weight.numel()
    assert one.new_parameters == len(layers) * (moe.router.weight.numel() + copies * 3 // 4)


@pytest.mark.first(1)
@pytest.mark.parametrize("experts", [1, 2])
def test_gates_of_all_experts_sum_to_one_by_themselves(experts: int) -> None:
    dense, inputs = build("causal/llama")
    expected, spec = logits(dense, inputs), SharedMoE(groups=0, experts=experts, k=experts, renormalize=False)
    one = apply_reported(dense, spec, verify=False, count_flops=False).rewrites[0]
    assert spec.exact and one.exact
    assert float((logits(dense, inputs) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.first(1)
@pytest.mark.parametrize(("groups", "renormalize"), [(1, True), (2, False), (4, False)])
def test_wide_net_is_a_plain_loop_over_the_dense_feed_forwards(groups: int, renormalize: bool) -> None:
    dense, inputs = build("causal/llama")
    model = copy.deepcopy(dense)
    retrofit.apply(model, SharedMoE(experts=3, k=2, groups=groups, renormalize=renormalize), verify=False)
    depth = len(dense.model.layers)
    feed_forwards = [layer.mlp for layer in dense.model.layers]
    expected = copy.deepcopy(dense)
    for index, layer in enumerate(expected.model.layers):
        first = index * groups // depth * depth // groups  # the group's first layer
        members = feed_forwards[first : first + depth // groups]
        experts = [members[int((e + 0.5) * len(members) / 3)] for e in range(3)]
        router = mixtures(model)[index].router.weight.detach().clone()

        def loop(x: Tensor, experts: list[nn.Module] = experts, router: Tensor = router) -> Tensor:
            p = F.linear(x, router).softmax(-1)
            kept = p * (p >= p.sort(-1, descending=True).values[..., 1:2])
            kept = kept / kept.sum(-1, keepdim=True) if renormalize else kept
            return sum(kept[..., e : e + 1] * expert(x) for e, expert in enumerate(experts))

        layer.mlp.forward = loop
    torch.testing.assert_close(logits(model, inputs), logits(expected, inputs), rtol=1e-4, atol=1e-5)


def test_one_mixture_for_all_layers_and_norms_of_their_own() -> None:
    model, _ = build("causal/llama", SharedMoE(share_attention=True))
    layers = model.model.layers
    assert len({id(moe) for moe in mixtures(model)}) == 1
    assert len({id(layer.self_attn.q_proj.weight) for layer in layers}) == 1
    assert len({id(layer.input_layernorm.weight) for layer in layers}) == len(layers)
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(len(layers)))


def test_one_expert_is_one_feed_forward_for_all_layers() -> None:
    applied = apply_reported(llama(), SharedMoE(experts=1, k=1))  # every check passes
    assert applied.model.model.layers[0].mlp.moe is applied.model.model.layers[1].mlp.moe
    assert applied.rewrites[0].unreached == ("model.layers.0.mlp.moe.router.weight",)
    gradients = next(check for check in applied.report.checks if check.name == "gradients")
    assert gradients.measured.endswith("1 without effect")


def test_encoder_and_decoder_are_grouped_by_themselves() -> None:
    model, _ = build("seq2seq/bart", SharedMoE())
    homes = {path.split(".")[1]: block.moe for path, block in blocks(model).items()}
    assert set(homes) == {"encoder", "decoder"}
    assert homes["encoder"] is not homes["decoder"]


@pytest.mark.first(1)
@pytest.mark.parametrize("reinit", [0.25, 1.0])
def test_reinitialisation_leaves_one_expert_and_the_other_units(reinit: float) -> None:
    dense, _ = build("causal/gpt2")
    model = copy.deepcopy(dense)
    one = apply_reported(model, SharedMoE(groups=0, reinit=reinit), verify=False, count_flops=False).rewrites[0]
    assert not one.exact
    for moe, layer in zip(mixtures(model), dense.transformer.h, strict=True):
        old = layer.mlp.c_fc.weight.t()
        assert torch.equal(moe.up.weight[0], old)
        for e in range(1, 4):
            changed = (moe.up.weight[e] != old).all(1)
            assert int(changed.sum()) == round(reinit * len(old))
            assert torch.equal((moe.down.weight[e] != layer.mlp.c_proj.weight.t()).all(0), changed)
            assert torch.equal(moe.up.weight[e][~changed], old[~changed])
            assert float(moe.up.weight[e][changed].std()) == pytest.approx(float(old.std()), rel=0.1)


# ── Composition, load, refusals ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_decoding_with_the_cache_goes_on_in_half_precision() -> None:
    model, inputs = build("causal/llama", SharedMoE(share_attention=True))
    model = model.to(torch.bfloat16).eval()
    found = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)
    again = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(found, again)


def test_the_load_is_what_the_routers_do_and_can_be_seen() -> None:
    model, inputs = build("causal/llama", SharedMoE(experts=3, k=2))
    with torch.no_grad():
        for moe in mixtures(model):
            moe.router.weight[2] = 0  # equal logits: the third expert wins where both others are negative, so seldom or never twice
    seen: dict[str, list[Tensor]] = {}
    handles = [
        block.moe.router.register_forward_hook(lambda module, args, output: seen.setdefault("all", []).append(output))
        for block in list(blocks(model).values())[:1]
    ]
    logits(model, inputs)
    for handle in handles:
        handle.remove()
    load = expert_load(model, inputs["input_ids"])
    assert list(load.shares) == list(blocks(model))
    assert load.tokens == inputs["input_ids"].numel()
    for shares, output in zip(load.shares.values(), seen["all"], strict=True):
        least = output.argmin(-1)  # with two of three experts a token, all but the least likely
        expected = [float((least != e).float().mean()) / 2 for e in range(3)]
        assert shares == pytest.approx(expected)
    root = xml.etree.ElementTree.fromstring(load.svg())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for path, shares in load.shares.items():
        assert path in texts
        assert {f"{share:.0%}" for share in shares} <= set(texts)
    assert load.svg() == load.svg() and "dc:date" not in load.svg()


def test_padding_does_not_count_in_the_load() -> None:
    model, inputs = build("causal/llama", SharedMoE())
    ids = inputs["input_ids"]
    padded = {
        "input_ids": torch.cat([ids, torch.zeros_like(ids)], 1),
        "attention_mask": torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], 1),
    }
    assert expert_load(model, padded) == expert_load(model, ids)


def test_calibration_text_puts_the_load_into_the_report() -> None:
    model, inputs = build("causal/llama")
    one = apply_reported(model, SharedMoE(), calibration=inputs["input_ids"], verify=False, count_flops=False).rewrites[0]
    load = expert_load(model, inputs["input_ids"])
    noted = {note.site: tuple(note.values.values()) for note in one.notes if note.kind == "part of the dispatches"}
    assert noted == load.shares


def test_dropout_in_the_models_code_is_not_applied_twice() -> None:
    model, _ = build("seq2seq/bart", None, activation_dropout=0.4, dropout=0.0, attention_dropout=0.0)
    one = apply_reported(model, SharedMoE(groups=0), verify=False, count_flops=False).rewrites[0]
    assert len(one.notes) == len(blocks(model)) and all("40%" in note for note in one.notes)
    hidden = next(iter(blocks(model).values())).hidden
    z = torch.randn(50, 16)
    assert torch.equal(hidden.train()(z), hidden.eval()(z))


def test_layers_that_are_left_out_and_those_that_do_not_fit() -> None:
    model, _ = build("causal/llama", SharedMoE(groups=0, layers="1-2"))
    assert [path.split(".")[2] for path in blocks(model)] == ["1", "2"]
    with refused(DoesNotFitError, "mixture of experts"):
        retrofit.apply(model, SharedMoE(layers="1-2"), verify=False)


def test_a_feed_forward_of_another_form_is_left_alone_with_a_reason() -> None:
    model, _ = build("causal/llama")
    odd = model.model.layers[2].mlp
    odd.act_fn = nn.Tanh()
    one = apply_reported(model, SharedMoE(), verify=False, count_flops=False).rewrites[0]
    assert model.model.layers[2].mlp is odd
    assert [(miss.name, "Tanh" in miss.why) for miss in one.skipped] == [("model.layers.2.mlp", True)]


@pytest.mark.parametrize(
    "options",
    [
        {"experts": 2, "k": 3},
        {"experts": 0},
        {"capacity": 0},
        {"reinit": 1.5},
        {"groups": -1},
        {"balance": -0.1},
        {"k": 1, "balance": 0.0},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        SharedMoE(**options)
    assert refused.value.option in options


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("recipe", "code"), [((SharedMoE(groups=9),), "too-few-layers"), ((SharedMoE(share_attention=True), SharedMoE()), "not-parsed")]
)
def test_a_refusal_leaves_the_model_as_it_was(recipe: tuple[SharedMoE, ...], code: str) -> None:
    model, _ = build("causal/llama")
    before = {name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    with refused(DoesNotFitError, code=code):
        retrofit.apply(model, *recipe, verify=False)
    after = {name: (id(parameter), parameter) for name, parameter in model.named_parameters()}
    assert list(before) == list(after)
    assert all(before[name][0] == after[name][0] and torch.equal(before[name][1], after[name][1]) for name in before)
    assert "forward" not in vars(model)


def test_feed_forwards_that_compute_the_same_are_one_group_however_they_are_written() -> None:
    """Another activation is another function; a module used by several layers, or the formula, is not."""

    class Written(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h * 0.5 * (1 + torch.erf(h / 2**0.5)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    ffns = [Written(8, 24, "gelu", True), Plain(8, 24, "gelu", True), Plain(8, 24, "relu", True), Plain(8, 24, "gelu", True)]
    model = Model(8, *ffns).eval()
    (one,) = apply_reported(model, SharedMoE(groups=1), example_inputs={"ids": IDS}, verify=False, count_flops=False).rewrites
    assert [site.name for site in one.sites] == ["layers.0.f", "layers.1.f", "layers.3.f"]
    assert [miss.name for miss in one.skipped] == ["layers.2.f"] and "hidden function" in one.skipped[0].why


# ── The plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "spec", "exact"),
    [
        ("causal/llama", SharedMoE(groups=2, experts=3, share_attention=True), False),
        ("causal/gpt2", SharedMoE(groups=0), True),
        ("masked/albert", SharedMoE(experts=2), True),
    ],
)
def test_a_plan_is_what_the_rewrite_does_and_leaves_the_model_as_it_is(identity: str, spec: SharedMoE, exact: bool) -> None:
    model, inputs = build(identity)
    before = {name: (id(one), one.detach().clone()) for name, one in model.named_parameters()}
    modules = {path: id(module) for path, module in model.named_modules()}
    plan = retrofit.plan_of(model, spec, example_inputs=inputs)
    (planned,) = plan.passes
    assert planned.exact == exact
    assert {name: id(one) for name, one in model.named_parameters()} == {name: held for name, (held, _) in before.items()}
    assert all(torch.equal(one, before[name][1]) for name, one in model.named_parameters())
    assert {path: id(module) for path, module in model.named_modules()} == modules and "forward" not in vars(model)
    (rewrite,) = apply_reported(model, spec, example_inputs=inputs, verify=False, count_flops=False).rewrites
    assert (rewrite.sites, rewrite.skipped, rewrite.exact) == (planned.plan.sites, planned.plan.near_misses, exact)
    assert (rewrite.new_parameters, rewrite.formula) == (planned.plan.new_parameters, planned.plan.formula)
    assert sum(parameter.numel() for parameter in model.parameters()) == plan.parameters_after
