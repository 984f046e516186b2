"""Sparse QKV: the layers against loops written from their formulas, their start against general solvers, models that have them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cached_decoding, zoo
from support.own_models import MASKS, Asking, Block, Masked, Own
from support.sparse_attentions import AGAINST_DENSE, DECODERS, FORMS, LONG, built, inputs, original, rewritten, rough
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import retrofit
from retrofit.anatomy.attention_parsing import find_attention_sites
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passes import SparseQKV
from retrofit.passes.sparse_qkv.fitting import best_d, best_e, best_taps, dense_matrices, fit, fit_to_data, joined
from retrofit.passes.sparse_qkv.modular_projection import FEW, ModularConvolution, ModularProjection, ModularShape, neighbours
from retrofit.passes.sparse_qkv.sparse_attention import ColumnProjection, IdentityProjection, SparseAttention
from retrofit.rewriting import apply_reported

small = st.integers(1, 3)


# ── The layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def convolved(m: Tensor, layer: ModularConvolution, gates: Tensor | None) -> Tensor:
    """y[t,s,n] = b[n] + Σ_τ g[t,τ] Σ_o Σ_m m[t−τ, r·s+o−⌊F/2⌋, m] W[o,τ,m,n] for one sequence, zeros where m ends."""
    kernel, stride = layer.kernel, layer.stride
    tokens, modules, _ = m.shape
    y = torch.zeros(tokens, modules // stride, layer.weight.shape[-1], dtype=m.dtype) + layer.bias
    for t, s, tau, o in itertools.product(range(tokens), range(modules // stride), range(kernel), range(kernel)):
        place = stride * s + o - kernel // 2
        if t - tau >= 0 and 0 <= place < modules:
            gate = 1.0 if gates is None or tau == 0 else float(gates[t, tau - 1])
            y[t, s] += gate * (m[t - tau, place] @ layer.weight[o, tau])
    return y


@given(
    kernel=st.integers(1, 4),
    size=small,
    filters=small,
    groups=small,
    stride=small,
    tokens=st.integers(1, FEW + 4),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_the_convolution_is_its_formula_for_few_tokens_and_for_many(
    kernel: int, size: int, filters: int, groups: int, stride: int, tokens: int, gated: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = rough(ModularConvolution(kernel, size, filters, stride, torch.empty(0, dtype=torch.float64)), seed)
    m = torch.randn(2, tokens, groups * stride, size, generator=generator, dtype=torch.float64)
    gates = torch.rand(2, tokens, kernel - 1, generator=generator) > 0.5 if gated else None
    y = layer(nn.functional.pad(m, (0, 0, 0, 0, kernel - 1, 0)), gates)
    for row in range(2):
        expected = convolved(m[row], layer, None if gates is None else gates[row])
        torch.testing.assert_close(y[row], expected)


@pytest.mark.parametrize("variant", ["mult-conv", "mult", "conv"])
def test_the_parameters_number_what_the_paper_says(variant: str) -> None:
    d, modules, kernel = 24, 4, 3
    size = d // modules
    layer = ModularProjection(variant, d, modules, size, dict.fromkeys("qkv", 1), kernel, torch.empty(0))
    mult, conv = d * d // modules + d * modules, kernel**2 * size**2 + size
    expected = {"mult-conv": mult + 3 * conv, "mult": 3 * mult, "conv": 3 * conv}[variant]
    assert sum(parameter.numel() for parameter in layer.parameters()) == expected
    assert ModularShape(variant, d, modules, size, dict.fromkeys("qkv", 1), kernel).count() == expected


@pytest.mark.parametrize("variant", ["mult-conv", "mult", "conv"])
def test_without_earlier_tokens_a_projection_is_its_dense_matrix(variant: str) -> None:
    layer = rough(ModularProjection(variant, 12, 4, 3, {"q": 1, "k": 2}, 3, torch.empty(0, dtype=torch.float64)))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    x = torch.randn(5, 1, 12, dtype=torch.float64)
    q, k = layer(x).split([12, 6], -1)
    dense = {letter: value.double().flatten(1) for letter, value in dense_matrices(layer).items()}
    torch.testing.assert_close(q, x @ dense["q"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k, x @ dense["k"], atol=1e-5, rtol=1e-5)


# ── Where they start ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def represented(d: Tensor, e: Tensor, reach: dict[str, Tensor], taps: dict[str, Tensor]) -> Tensor:
    """The dense matrices of all letters as one vector."""
    made = [torch.einsum("osg,is,im,omn->ign", reach[letter], d, e, tap) for letter, tap in taps.items()]
    return torch.cat([one.flatten() for one in made])


@pytest.mark.parametrize("kernel", [2, 3])
def test_each_step_of_the_alternation_is_a_least_squares_solution(kernel: int) -> None:
    """Against `lstsq` on the matrix of the linear map from what is sought, found column by column."""
    generator = torch.Generator().manual_seed(kernel)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width, modules, size = 5, 4, 3
    strides = {"q": 1, "k": 2}
    identity = torch.eye(modules, dtype=torch.float64).unsqueeze(-1)
    reach = {letter: neighbours(identity, kernel, stride).permute(2, 0, 1) for letter, stride in strides.items()}
    d, e = drawn(width, modules), drawn(width, size)
    taps = {letter: drawn(kernel, size, size) for letter in strides}
    targets = {letter: drawn(width, modules // stride, size) for letter, stride in strides.items()}
    target = torch.cat([one.flatten() for one in targets.values()])
    rows = slice(0, width)

    def best(count: int, made: Any) -> Tensor:
        columns = torch.stack([made(unit) for unit in torch.eye(count, dtype=torch.float64)], 1)
        wanted = targets["q"].flatten() if len(columns) == targets["q"].numel() else target
        return torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution.flatten()

    found = best_d(e, reach, taps, targets, rows)
    torch.testing.assert_close(
        found.flatten(), best(d.numel(), lambda unit: represented(unit.view_as(d), e, reach, taps)), atol=1e-3, rtol=1e-3
    )
    found = best_e(d, reach, taps, targets, rows)
    torch.testing.assert_close(
        found.flatten(), best(e.numel(), lambda unit: represented(d, unit.view_as(e), reach, taps)), atol=1e-3, rtol=1e-3
    )
    found = best_taps(d, e, reach["q"], targets["q"])
    error = (represented(d, e, {"q": reach["q"]}, {"q": found}) - targets["q"].flatten()).norm()
    least = best(found.numel(), lambda unit: represented(d, e, {"q": reach["q"]}, {"q": unit.view_as(found)})).view_as(found)
    bound = (represented(d, e, {"q": reach["q"]}, {"q": least}) - targets["q"].flatten()).norm()
    assert error <= bound * 1.001 + 1e-6


def test_the_start_is_nearer_where_it_was_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {letter: torch.randn(32, 32, generator=generator) for letter in "qkv"}
    x = torch.randn(400, 8, generator=generator) @ torch.randn(8, 32, generator=generator)  # few of the directions are used
    moments = x.t() @ x / len(x)
    errors = []
    for is_calibrated in (False, True):
        torch.manual_seed(0)
        layer = ModularProjection("mult-conv", 32, 4, 8, dict.fromkeys("qkv", 1), 3, torch.empty(0))
        reported = fit(layer, weights)
        if is_calibrated:
            reported = fit_to_data(layer, weights, moments, moments)[1]
        y = layer(x.unsqueeze(1)).squeeze(1).detach()
        dense = torch.cat([x @ weight for weight in weights.values()], -1)
        errors.append(float((y - dense).norm() / dense.norm()))
        assert reported.keys() == weights.keys()
    assert errors[1] < 0.7 * errors[0] < 0.7
    assert errors[1] == pytest.approx((sum(value**2 for value in reported.values()) / 3) ** 0.5, rel=0.2)


def test_projections_that_share_a_layer_are_fitted_together() -> None:
    """What is reported of each is how far it is from its dense matrix once all have started."""
    generator = torch.Generator().manual_seed(0)
    weights = {letter: torch.randn(24, 24, generator=generator) for letter in "kv"}
    keys = ModularProjection("mult-conv", 24, 4, 6, {"k": 1}, 3, torch.empty(0))
    values = ModularProjection("mult-conv", 24, 4, 6, {"v": 1}, 3, torch.empty(0), keys.mult)
    reported = fit(joined([keys, values]), weights)
    for letter, layer in {"k": keys, "v": values}.items():
        error = (dense_matrices(layer)[letter].detach().flatten(1) - weights[letter]).norm() / weights[letter].norm()
        assert reported[letter] == pytest.approx(float(error), rel=1e-4)
        assert error < 0.95


# ── Models ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.long) if form in LONG else form for form in FORMS])
def test_models_come_through_every_check(form: str) -> None:
    model = original(form)
    applied = apply_reported(model, FORMS[form][1], example_inputs=inputs(form, model))
    assert applied.report is not None and applied.report.ok
    (rewrite,) = applied.rewrites
    assert not rewrite.exact and not rewrite.skipped
    attentions = [module for module in model.modules() if isinstance(module, SparseAttention)]
    assert len(attentions) == (
        0 if form == "albert" else len(rewrite.sites)
    )  # ALBERT's code reads x itself: its projections compute for themselves
    named = {site.name for site in rewrite.sites}
    assert all(any(note.startswith(f"{name}: relative error of ") for note in rewrite.notes) for name in named)
    projections = [module for module in model.modules() if isinstance(module, ModularProjection)]
    counted = {id(parameter): parameter.numel() for one in projections for parameter in one.parameters()}
    assert rewrite.new_parameters == sum(counted.values())


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name",
    [
        *(f"causal/{one}" for one in AGAINST_DENSE),
        "seq2seq/bart",
        pytest.param("seq2seq/t5gemma", marks=pytest.mark.long),
        "masked/albert",
        "masked/mobilebert",
        pytest.param("causal/gemma3n_text", marks=pytest.mark.long),
    ],
)
def test_the_rewritten_model_is_the_dense_one_with_the_matrices_of_its_projections(name: str) -> None:
    """At the start no filter reads earlier tokens: q, k and v are products with these matrices, all else is the same."""
    model = built(name)
    given_inputs = zoo.inputs(zoo.entry(name), model)
    dense = copy.deepcopy(model)
    anatomy = retrofit.inspect(dense, given_inputs)
    sites, _ = find_attention_sites(anatomy, [(stack, depth) for stack in anatomy.stacks for depth in range(len(stack.layers))])
    retrofit.apply(model, SparseQKV(output="keep"), example_inputs=given_inputs, verify=False)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for site in sites:
            wrapped = isinstance(modules[site.name], SparseAttention)
            found = dense_matrices(modules[site.name].sparse) if wrapped else {}
            for projection in site.projections:
                path = projection.matrix.module.replace(site.name, f"{site.name}.layer") if wrapped else projection.matrix.module
                own = getattr(modules[path], "sparse", None)
                found |= dense_matrices(own) if own is not None else {}
                weight = dense.get_parameter(projection.matrix.weight)
                weight = weight.t() if projection.matrix.out_first else weight
                for letter, places in projection.columns:
                    weight[:, list(places)] = found[letter].flatten(1)
        torch.testing.assert_close(zoo.logits(model(**given_inputs)), zoo.logits(dense(**given_inputs)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "rule", ["xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "orthogonal_"]
)
def test_code_that_sets_up_fresh_weights_finds_some(rule: str) -> None:
    """A model's `_init_weights` may read the weight and bias of every projection by name."""
    for biased in (True, False):
        gone = IdentityProjection(biased)
        getattr(nn.init, rule)(gone.weight)
        assert (gone.bias is not None) == biased
        if gone.bias is not None:
            nn.init.zeros_(gone.bias)
    getattr(nn.init, rule)(ColumnProjection(0, 2, [0, 1], nn.Parameter(torch.ones(2)), None, torch.device("cpu")).weight)


def test_without_weights_the_same_columns_are_found() -> None:
    """A skeleton's lists of indices have no values where it is captured."""
    found = []
    for device in ("cpu", "meta"):
        model = zoo.build(zoo.entry("causal/falcon"), device, num_hidden_layers=2)
        anatomy = retrofit.inspect(model)
        sites, missed = find_attention_sites(anatomy, [(stack, depth) for stack in anatomy.stacks for depth in range(2)])
        assert len(sites) == 2 and not missed
        found.append([[one.columns for one in site.projections] for site in sites])
    assert found[0] == found[1]
    letters = dict(found[0][0][0])
    assert letters["q"][-1] < letters["k"][0] <= letters["k"][-1] < letters["v"][0]


def test_queries_keys_and_values_see_the_last_tokens_and_no_later_ones() -> None:
    model = rewritten("gpt_neox")
    ids = inputs("gpt_neox", model, batch=1, length=10)["input_ids"]
    attention = next(module for module in model.modules() if isinstance(module, SparseAttention))
    other = ids.clone()
    other[:, 4] = ids[:, 4] + 1
    seen: list[Tensor] = []
    handle = attention.layer.query_key_value.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    with torch.no_grad():
        model(ids), model(other)
    handle.remove()
    moved = (seen[0] != seen[1]).any(-1).nonzero().flatten().tolist()
    assert moved == [4, 5, 6]  # F = 3


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["gpt2", "gpt_neox"])  # a sliding window is not cropped
@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been(form: str) -> None:
    model = rewritten(form)
    ids = inputs(form, model, batch=2, length=9)["input_ids"]
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], past_key_values=cache)
    model(ids[:, :3] + 1, past_key_values=cache)  # guesses that are not taken
    cache.crop(-3)
    pieces = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids).logits[:, 5:], atol=1e-4, rtol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("form", DECODERS)
def test_tokens_hidden_at_the_end_of_a_chunk_hide_no_others(form: str) -> None:
    model = rewritten(form)
    cached_decoding.check_hidden_ends(model, inputs(form, model, batch=2, length=9)["input_ids"], (4, 3, 2))


@pytest.mark.first(1)
@pytest.mark.parametrize("form", DECODERS)
@torch.no_grad()
def test_a_cache_of_fixed_length_gives_the_same_with_padding_on_the_left(form: str) -> None:
    model = rewritten(form)
    ids = inputs(form, model, batch=2, length=8)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    pieces = []
    for first, last in [(0, 6), (6, 7), (7, 8)]:
        given_mask = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        pieces.append(model(ids[:, first:last], past_key_values=cache, **given_mask).logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], atol=1e-4, rtol=1e-4)
    alone = model(ids[:1, 3:]).logits
    torch.testing.assert_close(whole[:1, 3:], alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_calls_without_a_cache_are_independent() -> None:
    model = rewritten("gpt_neox")
    ids = inputs("gpt_neox", model)["input_ids"]
    first = model(ids, use_cache=False).logits
    model(ids + 1)
    assert torch.equal(model(ids, use_cache=False).logits, first)
    assert torch.equal(copy.deepcopy(model)(ids, use_cache=False).logits, first)


@torch.no_grad()
def test_sequences_packed_into_one_row_do_not_see_one_another() -> None:
    model = rewritten("gpt_neox")
    ids = inputs("gpt_neox", model, batch=1, length=8)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    document = torch.arange(8) // 4
    mask = (document.unsqueeze(0) == document.unsqueeze(1)).tril()[None, None]
    packed = model(ids, attention_mask=mask, position_ids=positions).logits
    alone = torch.cat([model(part).logits for part in ids.split(4, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


# ── The ecosystem ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_compiled_it_computes_the_same() -> None:
    model = rewritten("gemma2")
    ids = inputs("gemma2", model)["input_ids"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)


def test_checkpointing_gives_the_same_gradients() -> None:
    model = rewritten("bart").train()
    given_inputs = inputs("bart", model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.dropout = 0.0
    for layer in model.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(**given_inputs, use_cache=False).logits.square().mean().backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_in_half_precision_and_under_autocast_it_stays_near(dtype: torch.dtype) -> None:
    model = rewritten("gpt_neox")
    ids = inputs("gpt_neox", model)["input_ids"]
    expected = model(ids).logits
    half = copy.deepcopy(model).to(dtype)(ids).logits
    assert half.dtype == dtype
    with torch.autocast("cpu", dtype=dtype):
        auto = model(ids).logits.float()
    for found in (half.float(), auto):
        assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.long
def test_a_plan_changes_nothing_and_announces_what_apply_does() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.shallow(entry, num_key_value_heads=2)
    before = {name: id(module) for name, module in model.named_modules()}
    passes = (SparseQKV(), "sparse-loss(modules=8)")
    plan = retrofit.plan_of(model, *passes)
    assert {name: id(module) for name, module in model.named_modules()} == before
    rewrites = apply_reported(model, *passes, verify=False, count_flops=False).rewrites
    for planned, rewrite in zip(plan.passes, rewrites, strict=True):
        assert (planned.plan.sites, planned.plan.new_parameters) == (rewrite.sites, rewrite.new_parameters)
    assert plan.parameters_after == sum(parameter.numel() for parameter in model.parameters())
    assert "keys and values from every 2 modules" in plan.passes[0].plan.sites[0].what  # 4 query heads


def test_calibration_gives_a_nearer_start() -> None:
    entry = zoo.entry("causal/llama")
    model = zoo.shallow(entry)
    ids = zoo.inputs(entry, model, batch=8, length=16)["input_ids"]
    plain = copy.deepcopy(model)
    retrofit.apply(plain, SparseQKV(output="keep"), verify=False)
    fitted = copy.deepcopy(model)
    retrofit.apply(fitted, SparseQKV(output="keep"), calibration=ids, verify=False)
    with torch.no_grad():
        distances = [(one(ids).logits - model(ids).logits).norm() for one in (fitted, plain)]
    assert distances[0] < 0.9 * distances[1]


# ── What does not fit ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("causal/llama", {"modules": 7}, "modules=7"),
        ("causal/minicpm3", {}, "k is made by 2 matrices"),
        ("causal/gemma2", {"modules": 1}, "no stride"),
        ("causal/gemma2", {"modules": 5}, "use modules="),
        ("masked/bert", {"output": "conv"}, "does not return"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_as_it_was(name: str, options: dict[str, Any], reason: str) -> None:
    entry = zoo.entry(name)
    model = zoo.shallow(entry)
    before = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416
    with pytest.raises(DoesNotFitError, match=reason):
        retrofit.apply(model, SparseQKV(**options), example_inputs=zoo.inputs(entry, model))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is parameter for name, parameter in before.items())


@pytest.mark.long
def test_heads_that_are_not_as_wide_as_the_stream_keep_their_output_layer() -> None:
    entry = zoo.entry("causal/gemma2")
    model = zoo.shallow(entry, head_dim=24)
    with pytest.raises(DoesNotFitError, match="output=keep"):
        retrofit.apply(model, SparseQKV(), verify=False)
    retrofit.apply(model, SparseQKV(output="keep"), verify=False)


def test_options_are_checked() -> None:
    with pytest.raises(SpecError) as refused:
        SparseQKV(kernel=0)
    assert refused.value.option == "kernel"
    with pytest.raises(SpecError) as refused:
        SparseQKV(output="dense")
    assert refused.value.option == "output"


@pytest.mark.long
def test_an_attention_that_reads_the_width_of_its_input_is_named_and_its_graph_is_rewritten() -> None:
    entry = zoo.entry("causal/trocr")
    model = zoo.shallow(entry)
    example = zoo.inputs(entry, model)
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(model, "sparse-qkv(kernel=2)", example_inputs=example)
    path, _, reason = caught.value.why.partition(": ")
    attentions = {branch.name for layer in retrofit.inspect(model, example).layers for branch in layer.attentions}
    assert path.removesuffix(".layer") in attentions and "RuntimeError: shape" in reason
    assert "emit='graph'" in caught.value.remedy
    assert retrofit.recipe(retrofit.apply(model, "sparse-qkv(kernel=2)", example_inputs=example, emit="graph"))


@pytest.mark.long
def test_projections_compute_for_themselves_where_the_attention_reads_the_width_of_its_input() -> None:
    entry = zoo.entry("image/pvt_v2")
    model = zoo.shallow(entry)
    assert retrofit.recipe(retrofit.apply(model, "sparse-qkv(kernel=2)", example_inputs=zoo.inputs(entry, model)))


class CachingAttention(nn.Module):
    """Returns its keys and values as well, for a cache of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        one, two, three = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in self.into(y).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(one, two, three, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2)), (two, three)


class CachingBlock(Block):
    def __init__(self) -> None:
        super().__init__(24)
        self.attention = CachingAttention()

    def forward(self, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        seen, kept = self.attention(self.m(y))
        y = y + seen
        return y + self.r(torch.relu(self.q(self.n(y)))), kept


class Caching(Own):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(CachingBlock() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        y, cache = self.a(x), []
        for block in self.b:
            y, kept = block(y)
            cache.append(kept)
        return self.c(y), cache


def test_keys_and_values_that_the_model_returns_are_keys_and_values() -> None:
    plan = retrofit.plan_of(Caching(), SparseQKV(modules=4, output="keep"))
    assert len(plan.passes[0].plan.sites) == 2


@pytest.mark.first(1)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_whatever_kind_keeps_padding_from_the_convolutions(mask: str) -> None:
    torch.manual_seed(0)
    x, hidden = torch.randint(50, (2, 11)), torch.arange(11) < torch.tensor([[0], [4]])  # the second sequence has 7 tokens
    model = retrofit.apply(Masked(mask).eval(), "sparse-qkv(modules=3)", example_inputs={"x": x, "hidden": hidden})
    torch.testing.assert_close(model(x, hidden)[1:, 4:], model(x[1:, 4:], hidden[1:, 4:]))


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["causal/recurrent_gemma", "causal/llama4_text"])
def test_chunks_and_windows_of_the_attention_hold_for_the_convolutions_and_positions_are_no_mask(name: str) -> None:
    """An attention that is given positions before its mask, which is computed from them; and one that sees its own chunk alone."""
    entry = zoo.entry(name)
    model = zoo.build(entry)
    made = apply_reported(model, SparseQKV(kernel=2), example_inputs=zoo.inputs(entry, model), checks=["graph", "method"])
    assert made.report is not None and [check.status for check in made.report.checks] == ["passed", "passed"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "spec"), [("image/pvt_v2", "sparse-qkv(kernel=2)"), ("causal/trocr", "sparse-qkv(kernel=1)")])
def test_where_the_code_of_an_attention_reads_its_width_its_projections_compute_for_themselves(name: str, spec: str) -> None:
    entry = zoo.entry(name)
    model = zoo.shallow(entry)
    (rewrite,) = apply_reported(model, spec, example_inputs=zoo.inputs(entry, model), count_flops=False).rewrites  # verified
    assert rewrite.sites and not rewrite.skipped


@pytest.mark.long
def test_where_the_code_of_a_causal_attention_reads_its_width_a_plan_says_which_options_fit() -> None:
    """Its projections compute for themselves and receive no cache: a filter over earlier tokens would have none to read."""
    entry = zoo.entry("causal/trocr")
    model = zoo.shallow(entry)
    before = {name: id(one) for name, one in model.named_parameters()}
    (planned,) = retrofit.plan_of(model, "sparse-qkv(kernel=2)", example_inputs=zoo.inputs(entry, model)).passes
    misses = planned.plan.near_misses
    assert not planned.fits and [one.name for one in misses] == [f"model.decoder.layers.{depth}.self_attn" for depth in range(2)]
    assert all("variant=mult" in one.remedy for one in misses)
    assert {name: id(one) for name, one in model.named_parameters()} == before
    assert not any(one._forward_pre_hooks for one in model.modules())


@pytest.mark.long
def test_values_projected_from_zeros_stay_as_they_are() -> None:
    model = Asking(at_zero=True)
    (rewrite,) = apply_reported(model, SparseQKV(), count_flops=False).rewrites  # verified: all of it learns
    assert [site.name for site in rewrite.sites] == ["b.0.p", "b.1.o", "b.1.p"]
    assert [(one.name, one.why) for one in rewrite.skipped] == [
        ("b.0.o", "b.0.o.v reads only zeros there, so its weight has no gradient")
    ]


class Merged(nn.Module):
    """A layer whose one projection makes queries, keys, values and the hidden units of its feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(16), nn.Linear(16, 112), nn.Linear(80, 16)

    def forward(self, x: Tensor) -> Tensor:
        *heads, hidden = self.into(self.norm(x)).split([16, 16, 16, 64], -1)
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in heads)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([y, hidden.relu()], -1))


def test_no_number_of_modules_is_proposed_where_none_fits() -> None:
    model = nn.Sequential(nn.Embedding(31, 16), Merged(), Merged(), nn.Linear(16, 31)).eval()
    with pytest.raises(DoesNotFitError, match=r"\b64\b") as refused:
        retrofit.apply(model, "sparse-qkv", example_inputs={"input": torch.arange(22).reshape(2, 11)})
    assert "use modules=" not in refused.value.remedy
