"""The sparse-ffn pass on whole models: its start, what calibration is worth, and what still works afterwards."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import zoo
from support.feed_forward_models import IDS, Gated, Model, Plain
from support.refusals import refused

import retrofit
from retrofit.anatomy.feed_forward_parsing import feed_forwards
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.inputs.calibration import Calibration
from retrofit.passes import AltUp, SparseFFN
from retrofit.passes.sparse_ffn.controller_fit import (
    ContributionMoments,
    Contributions,
    Controller,
    Kept,
    fit_start,
    gate_scores,
    held_out_tokens,
    leading_singular_vectors,
)
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.passes.sparse_ffn.sparse_ffn import ENERGY, TOKENS, most_tokens, record_inputs, spread_out
from retrofit.rewriting import apply_reported

# Plain and gated, fused and Conv1D, with and without bias, parallel, spread over two modules, shared across depth, images.
MODELS = "causal/llama causal/gpt2 causal/glm causal/phi masked/bert masked/albert seq2seq/t5 image/vit".split()


def build(name: str, **how: int) -> tuple[Any, dict[str, Any]]:
    entry = zoo.entry(name)
    model = zoo.shallow(entry)
    return model, zoo.inputs(entry, model, **how)


def blocks_of(model: torch.nn.Module) -> list[SparseFeedForward]:
    return [module for module in model.modules() if isinstance(module, SparseFeedForward)]


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return zoo.logits(model(**inputs)).clone()


def stack(gated: bool, layers: int = 2, d: int = 16, d_ff: int = 96) -> Model:
    torch.manual_seed(0)
    kind = Gated if gated else Plain
    return Model(d, *(kind(d, d_ff, "relu", True) for _ in range(layers))).eval()


# ── The start ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_one_are_the_dense_function(name: str) -> None:
    model, inputs = build(name)
    expected = logits(model, inputs)
    (rewrite,) = apply_reported(
        model, SparseFFN(sparsity=1), example_inputs=inputs, verify=False, calibration=None, count_flops=False
    ).rewrites
    torch.testing.assert_close(logits(model, inputs), expected, atol=1e-5, rtol=1e-4)
    assert blocks_of(model) and rewrite.exact and rewrite.new_parameters == 0 and not rewrite.skipped


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_controller_is_all_that_is_new_and_the_weights_are_the_dense_ones(name: str) -> None:
    model, inputs = build(name)
    before = sum(parameter.numel() for parameter in model.parameters())
    (rewrite,) = apply_reported(
        model, SparseFFN(sparsity=4, rank=3), example_inputs=inputs, verify=False, calibration=[inputs], count_flops=False
    ).rewrites
    expected = sum(block.width * 3 + 3 * block.units + block.units for block in blocks_of(model))
    assert sum(parameter.numel() for parameter in model.parameters()) - before == expected == rewrite.new_parameters
    assert any(block.order.tolist() != list(range(block.units)) for block in blocks_of(model))
    assert [note.site for note in rewrite.notes if getattr(note, "kind", "") == ENERGY] == [site.name for site in rewrite.sites]


@pytest.mark.first(1)
@pytest.mark.parametrize("calibrated", [False, True])
def test_without_the_mask_it_would_be_the_dense_model(calibrated: bool) -> None:
    """However the units were permuted, all of them together do what they did, with the dense output matrix."""
    sparse = SparseFFN(sparsity=4, fit_output=False)
    for name in ("causal/gpt2", "causal/glm", "masked/bert"):
        model, inputs = build(name)
        expected = logits(model, inputs)
        retrofit.apply(model, sparse, example_inputs=inputs, calibration=[inputs] if calibrated else None, verify=False)
        for block in blocks_of(model):
            block.active = block.sparsity
        torch.testing.assert_close(logits(model, inputs), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["causal/llama", "causal/gpt2", "masked/bert", "masked/albert"])
def test_every_check_passes(name: str) -> None:
    model, inputs = build(name)
    report = apply_reported(model, SparseFFN(sparsity=4), example_inputs=inputs, calibration=[inputs], count_flops=False).report
    assert report is not None and report.ok
    assert report["gradients"].status == report["parameters"].status == report["round trip"].status == "passed"


def test_moments_of_data_are_those_of_a_plain_loop() -> None:
    model = stack(gated=True, layers=1)
    x = torch.randn(2500, 16) * torch.rand(16) + torch.randn(16)
    with torch.no_grad():
        contributions = Contributions(site_of(model), model)
        moments, together = ContributionMoments.of_data(contributions, x)
        ffn = model.layers[0].f
        h = torch.relu(ffn.g(x)) * ffn.a(x)
        c = h.abs() * torch.stack([ffn.b.weight[:, unit].norm() for unit in range(96)])
    torch.testing.assert_close(contributions(x), c)
    share = c / c.norm(dim=1, keepdim=True)
    weight = torch.stack([min(x.norm(dim=1).median() / one.norm(), torch.ones(())) ** 2 for one in x]).double()
    joint = torch.cov(torch.cat([x, share], 1).t().double(), correction=0, aweights=weight).float()
    mean = ((weight[:, None] * torch.cat([x, share], 1)).sum(0) / weight.sum()).float()
    for ours, theirs in (
        (moments.xx, joint[:16, :16]),
        (moments.xc, joint[:16, 16:]),
        (moments.x, mean[:16]),
        (moments.c, mean[16:]),
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(together, (share.square().t() @ share.square()) / len(x), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_moments_without_data_are_those_of_normal_inputs(gated: bool) -> None:
    """Stein's lemma against a large sample."""
    model = stack(gated, layers=1)
    with torch.no_grad():
        contributions = Contributions(site_of(model), model)
        ours = ContributionMoments.of_standard_normal(contributions)
        x = torch.randn(60_000, 16, generator=torch.Generator().manual_seed(1))
        c = contributions(x)
    for mine, sampled in ((ours.c, c.mean(0)), (ours.xc, x.t() @ (c - c.mean(0)) / len(x))):
        assert float((mine - sampled).norm() / sampled.norm()) < (0.15 if gated else 0.08)


def site_of(model: Model) -> Any:
    (site,), _ = feed_forwards(retrofit.inspect(model, {"ids": IDS}))
    return site


def test_the_leading_vectors_are_those_of_the_singular_value_decomposition() -> None:
    torch.manual_seed(0)
    for shape, rank in (((30, 80), 4), ((12, 5), 3), ((6, 4), 6)):
        matrix = torch.randn(*shape, dtype=torch.float64) @ torch.diag(0.7 ** torch.arange(shape[1], dtype=torch.float64))
        basis = leading_singular_vectors(matrix, rank)
        u, _, _ = torch.linalg.svd(matrix)
        kept = min(rank, *shape)
        assert basis.shape == (shape[0], rank)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(rank, dtype=torch.float64))
        torch.testing.assert_close(
            (u[:, :kept].t() @ basis).norm(), torch.tensor(kept**0.5, dtype=torch.float64), atol=1e-3, rtol=0
        )


def test_a_controller_that_can_tell_chooses_the_largest() -> None:
    """Contributions that are linear in x, and fewer causes than the rank: nothing is lost."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 12, generator=generator)
    maps = torch.randn(12, 3, generator=generator) @ torch.randn(3, 40, generator=generator)
    c = x @ maps
    joint = torch.cov(torch.cat([x, c], 1).t(), correction=0)
    moments = ContributionMoments(x.mean(0), c.mean(0), joint[:12, :12], joint[:12, 12:])
    order = torch.randperm(40, generator=generator)
    controller = Controller.fit(moments, order, 5, 3)
    chosen = (x @ controller.c1 @ controller.c2 + controller.bias).unflatten(1, (-1, 5)).argmax(-1)
    largest = c[:, order].unflatten(1, (-1, 5)).argmax(-1)
    assert float((chosen == largest).float().mean()) > 0.97
    torch.testing.assert_close(controller.c1.t() @ controller.c1, torch.eye(3), atol=1e-4, rtol=0)


# ── Calibration ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def energies(notes: Any) -> list[list[float]]:
    """Kept, kept without calibration, kept by the best choice: of each site."""
    return [list(note.values.values()) for note in notes if getattr(note, "kind", "") == ENERGY]


@pytest.mark.long
def test_calibration_keeps_more_than_none_and_no_more_than_the_best_choice() -> None:
    model, _ = build("causal/llama")
    windows = torch.randint(10, 40, (40, 32), generator=torch.Generator().manual_seed(0))
    applied = apply_reported(model, SparseFFN(sparsity=8), calibration=windows, verify=False, count_flops=False)
    kept = energies(applied.rewrites[0].notes)
    assert len(kept) == len(model.model.layers)
    assert all(0 < without < ours < best < 1 for ours, without, best in kept)


@torch.no_grad()
@pytest.mark.parametrize(("gated", "options"), [(False, {}), (False, {"active": 2}), (True, {"active": 2, "controller": "gate"})])
def test_the_energy_reported_is_that_of_the_units_that_are_active(gated: bool, options: dict[str, Any]) -> None:
    """Token by token, from h of the module itself; the best choice by trying every set of k units of a block."""
    model = stack(gated, layers=1)
    dense = copy.deepcopy(model.layers[0].f)
    ids = torch.randint(31, (64, 16), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []  # rounded, as inputs are recorded
    handle = model.layers[0].f.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1).bfloat16().float()))
    model(ids)
    handle.remove()
    sparse = SparseFFN(sparsity=6, fit_output=False, **options)  # the gate reads the output matrix
    applied = apply_reported(model, sparse, example_inputs={"ids": IDS}, calibration=ids, verify=False, count_flops=False)
    x, block = torch.cat(seen), model.layers[0].f
    x = x[held_out_tokens(len(x))]
    k, lengths = options.get("active", 1), dense.b.weight.norm(dim=0)
    active: list[torch.Tensor] = []
    block.down.register_forward_pre_hook(lambda module, args: active.append(args[0]))
    block.prefers_gather = lambda x: False
    block(x)
    kept, best, whole = [], [], []
    for token, h in zip(x, active[0], strict=True):
        z = torch.relu(dense.g(token)) * dense.a(token) if gated else torch.relu(dense.a(token))
        energy = (z * lengths).square()[block.order]
        kept.append(float(energy[h != 0].sum()))
        whole.append(float(energy.sum()))
        sets = [max(sum(float(one) for one in some) for some in itertools.combinations(part, k)) for part in energy.view(-1, 6)]
        best.append(sum(sets))
    ((ours, _, highest),) = energies(applied.rewrites[0].notes)
    for figure, some in ((ours, kept), (highest, best)):
        of_tokens = sum(one / all_of_it for one, all_of_it in zip(some, whole, strict=True)) / len(some)
        assert figure == pytest.approx((of_tokens + sum(some) / sum(whole)) / 2, abs=1e-4)


@torch.no_grad()
def with_massive_activations() -> tuple[Model, Any, torch.Tensor]:
    """A feed-forward as trained models have them: at a few tokens one direction of x makes one unit thousands of times larger."""
    model = stack(gated=False, layers=1, d=16, d_ff=64)
    ffn = model.layers[0].f
    x = torch.randn(3000, 16, generator=torch.Generator().manual_seed(1))
    x[:, :4] = 0
    ffn.a.weight[:, :4] = 0
    for direction in range(4):
        ffn.a.weight[7 + 16 * direction, direction] = 4000.0
        x[8 * direction :: 96, direction] = 10.0  # the same place in every window: a split of every eighth would fit none of them
    return model, site_of(model), x


@torch.no_grad()
def test_a_few_massive_tokens_are_kept_and_do_not_decide_for_the_others() -> None:
    model, site, x = with_massive_activations()
    contributions, units = Contributions(site, model), torch.arange(64)
    start = fit_start(site, model, 8, 1, 4, x)
    assert start.controller is not None and start.order is not None and start.finding is not None
    massive, others = x[(x[:, :4] != 0).any(1)], x[(x[:, :4] == 0).all(1)]
    assert Kept.measure(contributions, massive, 8, 1, [(start.controller, start.order)])[0].of_tokens > 0.99
    ours = Kept.measure(contributions, others, 8, 1, [(start.controller, start.order)])[0].of_tokens
    raw = contributions(x)  # what a plain least-squares fit of the contributions is led by
    joint = torch.cov(torch.cat([x, raw], 1).t(), correction=0)
    led = Controller.fit(ContributionMoments(x.mean(0), raw.mean(0), joint[:16, :16], joint[:16, 16:]), units, 8, 4)
    assert ours > Kept.measure(contributions, others, 8, 1, [(led, units)])[0].of_tokens + 0.1


@pytest.mark.long
@torch.no_grad()
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 2, 5]), st.booleans(), st.booleans(), st.integers(16, 80))
def test_no_calibrated_start_is_worse_than_none(seed: int, k: int, gated: bool, gate: bool, tokens: int) -> None:
    """Few tokens, from which nothing can be learnt, and massive ones among them; on what was held out."""
    torch.manual_seed(seed)
    model = Model(16, (Gated if gated else Plain)(16, 48, "silu", True)).eval()
    x = torch.randn(tokens, 16) * torch.where(torch.rand(tokens, 1) < 0.1, 50.0, 1.0)
    site, rank = site_of(model), None if gated and gate else 4
    contributions, held_out = Contributions(site, model), held_out_tokens(tokens)
    kept = []
    for start in (fit_start(site, model, 8, k, rank, x), fit_start(site, model, 8, k, rank, None)):
        order = torch.arange(48) if start.order is None else start.order
        scores = start.controller or gate_scores(site, contributions, order)
        kept += Kept.measure(contributions, x[held_out], 8, k, [(scores, order)])
    assert kept[0].share >= kept[1].share


@torch.no_grad()
def test_more_active_units_keep_more_and_all_of_them_everything() -> None:
    model = stack(gated=True, layers=1)
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 16) + 1
    site = site_of(model)
    start, contributions = fit_start(site, model, 8, 3, 4, x), Contributions(site, model)
    assert start.controller is not None and start.order is not None
    kept = [Kept.measure(contributions, x, 8, k, [(start.controller, start.order)])[0] for k in range(1, 9)]
    assert all(more.of_tokens >= less.of_tokens and more.of_all >= less.of_all for less, more in itertools.pairwise(kept))
    assert kept[-1].of_tokens == pytest.approx(1) and kept[-1].of_all == pytest.approx(1)
    again = fit_start(site, model, 8, 3, 4, x)
    assert again.controller is not None and torch.equal(again.controller.c2, start.controller.c2), "the same data, the same start"


def test_calibration_data_are_read_at_even_distances() -> None:
    batches = tuple({"ids": torch.full((4, 1024), index)} for index in range(9))
    assert [int(batch["ids"][0, 0]) for batch in spread_out(Calibration(batches), 8192).batches] == [0, 4, 8]
    assert spread_out(Calibration(batches[:2]), 8192).batches == batches[:2]


@pytest.mark.long
def test_a_calibrated_model_comes_back_from_its_files(tmp_path: Any) -> None:
    model, inputs = build("causal/gpt2")
    dense = copy.deepcopy(model)
    retrofit.apply(model, SparseFFN(sparsity=8), calibration=[inputs], verify=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    report = retrofit.verify(loaded, reference=dense)
    assert report.ok and report["parameters"].status == "passed" and "fitted" in report["parameters"].measured


# ── In use ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.parametrize("options", [{"active": 2}, {"active": 2, "controller": "gate"}])
def test_onnx_selects_the_units_of_all_blocks_in_one_operation(options: dict[str, Any], tmp_path: Any) -> None:
    """The export compares ONNX Runtime with torch itself; each layer has its one TopK."""
    onnx = pytest.importorskip("onnx")
    model, inputs = build("causal/llama")
    retrofit.apply(model, SparseFFN(sparsity=8, **options), example_inputs=inputs, verify=False)
    retrofit.export_onnx(model, tmp_path / "model.onnx")
    nodes = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert nodes.count("TopK") == len(blocks_of(model))


@pytest.mark.parametrize("recipe", [("sparse-ffn(sparsity=4)", "altup(k=2)"), ("altup(k=2)", "sparse-ffn(sparsity=4)")])
@pytest.mark.long
def test_it_composes_with_altup_in_either_order(recipe: tuple[str, ...]) -> None:
    model, inputs = build("causal/llama")
    sparse = copy.deepcopy(model)
    retrofit.apply(sparse, "sparse-ffn(sparsity=4)", example_inputs=inputs, verify=False)
    report = apply_reported(model, *recipe, example_inputs=inputs, count_flops=False).report
    assert report is not None and report.ok
    torch.testing.assert_close(logits(model, inputs), logits(sparse, inputs), atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_one_token_at_a_time_with_gathered_rows_is_the_whole_sequence_at_once() -> None:
    model, inputs = build("causal/llama", batch=1, length=24)
    retrofit.apply(model, SparseFFN(sparsity=16), example_inputs=inputs, calibration=[inputs], verify=False)
    calls = {"gathered": 0}
    for block in blocks_of(model):

        def counted(*args: Any, inner: Any = block.compute_gathered) -> torch.Tensor:
            calls["gathered"] += 1
            return inner(*args)

        block.compute_gathered = counted
    with torch.enable_grad():  # the dense products and the mask
        whole = model(**inputs).logits.detach()
    assert calls["gathered"] == 0
    cache, steps = None, []
    for column in inputs["input_ids"].unbind(1):
        answer = model(column[:, None], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        steps.append(answer.logits)
    assert calls["gathered"] == 24 * len(blocks_of(model))
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-3)


def test_gradient_checkpointing_recomputes_the_same_choices() -> None:
    model, inputs = build("causal/llama")
    retrofit.apply(model, SparseFFN(sparsity=4), example_inputs=inputs, verify=False)
    gradients = []
    for checkpointed in (False, True):
        one = copy.deepcopy(model).train()
        if checkpointed:
            one.gradient_checkpointing_enable()
        torch.manual_seed(3)
        one(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in one.named_parameters()})
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, atol=1e-6, rtol=1e-4, msg=name)


def test_lora_attaches_to_its_matrices_and_takes_part() -> None:
    peft = pytest.importorskip("peft")
    model, inputs = build("causal/llama", batch=1, length=3)
    retrofit.apply(model, SparseFFN(sparsity=16), example_inputs=inputs, verify=False)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up", "gate", "down"], r=2, init_lora_weights=False)).eval()
    few, many = ({"input_ids": inputs["input_ids"].repeat(rows, 1)} for rows in (1, 20))
    torch.testing.assert_close(logits(tuned, few)[0], logits(tuned, many)[0], atol=1e-4, rtol=1e-3)
    merged = copy.deepcopy(tuned).merge_and_unload()
    torch.testing.assert_close(logits(merged, few), logits(tuned, few), atol=1e-4, rtol=1e-3)


@pytest.mark.first(1)
@pytest.mark.parametrize("training", [False, True])
def test_it_compiles_without_a_break(training: bool) -> None:
    model = stack(gated=True)
    retrofit.apply(model, SparseFFN(sparsity=16), example_inputs={"ids": IDS}, verify=False)
    block = model.layers[0].f.train(training)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for tokens in (1, 2, 50):
        x = torch.randn(tokens, 16)
        torch.manual_seed(0)
        ours = compiled(x)
        assert ours.shape == x.shape
        if not training:
            torch.testing.assert_close(ours, block(x), atol=1e-5, rtol=1e-4)


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_d_ff_that_does_not_divide_is_named_with_its_divisors() -> None:
    with refused(DoesNotFitError, "d_ff = 96", "N = 31") as caught:  # 31 divides another matrix's size
        retrofit.apply(stack(gated=False), SparseFFN(sparsity=31), example_inputs={"ids": IDS})
    assert "sparsity=24 or 32" in str(caught.value)


def test_layers_that_fit_are_rewritten_and_the_others_named() -> None:
    torch.manual_seed(0)
    model = Model(16, Plain(16, 96, "relu", True), Plain(16, 90, "relu", True)).eval()
    (rewrite,) = apply_reported(
        model, SparseFFN(sparsity=16), example_inputs={"ids": IDS}, verify=False, count_flops=False
    ).rewrites
    assert [site.name for site in rewrite.sites] == ["layers.0.f"]
    assert [miss.name for miss in rewrite.skipped] == ["layers.1.f"] and "90" in rewrite.skipped[0].why


def test_a_weight_that_others_use_stays_where_it_is() -> None:
    model = stack(gated=False)
    model.layers[1].f.a.weight = model.layers[0].f.a.weight
    with refused(DoesNotFitError, "layers.0.f.a.weight"):
        retrofit.apply(model, SparseFFN(sparsity=4), example_inputs={"ids": IDS})


def test_only_the_selected_layers_become_sparse() -> None:
    model = stack(gated=False, layers=3)
    retrofit.apply(model, SparseFFN(sparsity=4, layers="0+2"), example_inputs={"ids": IDS}, verify=False)
    assert [isinstance(layer.f, SparseFeedForward) for layer in model.layers] == [True, False, True]


def test_more_active_units_than_a_block_has_are_refused() -> None:
    with pytest.raises(SpecError) as refused:
        SparseFFN(sparsity=8, active=9)
    assert refused.value.option == "active"


def test_a_plain_feed_forward_has_no_gate_to_select_by() -> None:
    with refused(DoesNotFitError, "gate") as caught:
        retrofit.apply(stack(gated=False), SparseFFN(sparsity=8, controller="gate"), example_inputs={"ids": IDS})
    assert "controller=low-rank" in str(caught.value)


@pytest.mark.long
def test_a_gate_with_weights_of_its_own_is_refused() -> None:
    model = stack(gated=True)
    for layer in model.layers:
        layer.f.act = torch.nn.PReLU()
    with refused(DoesNotFitError, "activation", "weights"):
        retrofit.apply(model, SparseFFN(sparsity=8, controller="gate"), example_inputs={"ids": IDS})


@pytest.mark.first(3)
@pytest.mark.parametrize(("options", "flops"), [({}, 1 / 8), ({"active": 2}, 2 / 8), ({"active": 8}, 1.0)])
@pytest.mark.parametrize("controller", ["low-rank", "gate"])
def test_the_cost_of_a_token_is_that_of_the_rows_it_reads(options: dict[str, Any], flops: float, controller: str) -> None:
    model, d, d_ff = stack(gated=True), 16, 96
    one = SparseFFN(sparsity=8, controller=controller, rank=3, **options)
    (planned,) = retrofit.plan_of(model, one, example_inputs={"ids": IDS}).passes
    dense = 2 * 3 * 2 * d * d_ff
    choice = 2 * 2 * 3 * (d + d_ff) if controller == "low-rank" else 0
    whole = 2 * 2 * d * d_ff if controller == "gate" else 0
    expected = dense if flops == 1 else int((dense - whole) * flops + whole + choice)
    (note,) = (one for one in planned.plan.notes if "has no effect with" not in one)  # as the rank of what has none
    assert f" {expected:,} FLOPs, not {dense:,}" in note
    parameters = 2 * (d * 3 + 3 * d_ff + d_ff) if controller == "low-rank" and flops < 1 else 0
    assert planned.plan.new_parameters == parameters and planned.exact == (flops == 1)


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0},
        {"active": 0},
        {"controller": "none"},
        {"rank": 0},
        {"hard": 1.5},
        {"temperature": 0.0},
        {"sparsity": "many"},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        SparseFFN(**options)
    assert refused.value.option in options


def test_it_goes_with_altup_as_text() -> None:
    spec = SparseFFN(sparsity=8, rank=None).spec()
    assert retrofit.apply(stack(gated=False), AltUp(k=2, embedding="recycled"), spec, example_inputs={"ids": IDS}, verify=False)


# ── The plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_counts_the_controllers_and_leaves_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    model = Model(16, Plain(16, 96, "relu", True), Gated(16, 90, "relu", True), Gated(16, 96, "silu", False)).eval()
    model.layers[2].f.act = act = torch.nn.PReLU()
    before = {name: (id(one), one.detach().clone()) for name, one in model.named_parameters()}
    plan = retrofit.plan_of(model, SparseFFN(sparsity=16, rank=3), example_inputs={"ids": IDS})
    (planned,) = plan.passes
    assert [site.name for site in planned.plan.sites] == ["layers.0.f", "layers.2.f"]
    assert [(miss.name, miss.remedy) for miss in planned.plan.near_misses] == [("layers.1.f", "use sparsity=2 or 3 or 6")]
    assert planned.plan.new_parameters == 2 * (16 * 3 + 3 * 96 + 96) == plan.parameters_after - plan.parameters_before
    assert {name: id(one) for name, one in model.named_parameters()} == {name: held for name, (held, _) in before.items()}
    assert all(torch.equal(one, before[name][1]) for name, one in model.named_parameters())
    applied = apply_reported(model, SparseFFN(sparsity=16, rank=3), example_inputs={"ids": IDS}, verify=False, count_flops=False)
    assert applied.rewrites[0].sites == planned.plan.sites and applied.rewrites[0].formula == planned.plan.formula
    assert not any(one.is_meta for one in model.parameters())
    assert model.layers[2].f.hidden.get_submodule("act") is act, "the plan on the copy without weights did not take the module"


def test_as_many_tokens_are_recorded_as_there_may_be() -> None:
    """Of ids no more than were given; an encoder of sound has more tokens than its decoder's ids and its input's channels."""
    ids, sound = torch.ones(2, 8, dtype=torch.long), torch.zeros(2, 80, 3000)
    assert most_tokens(Calibration(({"input_ids": ids}, {"input_ids": ids}))) == 32
    assert most_tokens(Calibration(({"input_features": sound, "decoder_input_ids": ids},))) == TOKENS


def test_layers_that_share_a_feed_forward_are_all_recorded() -> None:
    """Of ALBERT's calls of one module, the inputs that a plain hook sees, also where there is room for some of them only."""
    model, inputs = build("masked/albert")
    seen: list[torch.Tensor] = []
    path = SparseFFN(sparsity=4).plan(retrofit.inspect(model, inputs)).feed_forwards[0].entry_path
    handle = model.get_submodule(path).register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    logits(model, inputs)
    handle.remove()
    rows = torch.cat(seen).bfloat16()
    calibration = Calibration((inputs,))
    for room in (TOKENS, len(rows) // 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("retrofit.passes.sparse_ffn.sparse_ffn.TOKENS", room)
            found = record_inputs(model, calibration, {path: len(seen)})[path]
        assert torch.equal(found, rows[:: len(rows) // len(found)]) and len(found) == min(room, len(rows)) and len(seen) > 1
