"""The shared-moe pass with every check that there is, among other passes, and on its way through stock from_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.mixtures import build, logits, mixtures

import retrofit
from retrofit.passes import AltUp, Memory, SharedMoE
from retrofit.rewriting import apply_reported
from retrofit.surgery.auxiliary_losses import auxiliary_losses


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "spec"),
    [
        ("causal/llama", SharedMoE()),
        ("causal/gpt2", SharedMoE(groups=2, k=1, share_attention=True)),
        ("seq2seq/bart", SharedMoE(experts=3, share_attention=True, capacity=None, renormalize=False)),
        ("image/vit", SharedMoE(groups=0, reinit=0.5, k=1)),
    ],
)
def test_verification_passes(identity: str, spec: SharedMoE) -> None:
    """Function, causality, padding, cache, gradients, save and load with stock from_pretrained, parameters and cost."""
    model, inputs = build(identity)
    report = apply_reported(model, spec, example_inputs=inputs).report
    assert report is not None and report.ok


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", [SharedMoE(groups=0), SharedMoE(experts=2, k=1), SharedMoE(groups=0, slices=2)])
def test_what_the_rest_of_the_model_shares_is_copied(spec: SharedMoE) -> None:
    """As in an ONNX file, where biases that are equal, all of them zero, are one: their count is what was measured."""
    model, inputs = build("causal/gpt2")
    for layer in model.transformer.h:
        layer.mlp.c_proj.bias = layer.attn.c_proj.bias
    report = apply_reported(model, spec, example_inputs=inputs, checks=["parameters", "cost"]).report
    assert report is not None and report.ok
    assert model.transformer.h[0].attn.c_proj.bias.shape == (model.config.n_embd,)


def test_relative_positions_that_all_layers_share_stay_where_they_are() -> None:
    model, inputs = build("seq2seq/t5", num_layers=2, num_decoder_layers=2)
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    one = apply_reported(model, SharedMoE(share_attention=True), verify=False, count_flops=False).rewrites[0]
    assert not one.skipped
    first, second = (block.layer[0].SelfAttention for block in model.encoder.block)
    assert first.relative_attention_bias.weight is bias
    assert first.q.weight is second.q.weight
    assert logits(model, inputs).isfinite().all()


@pytest.mark.parametrize(
    "recipe",
    [
        (AltUp(k=2), SharedMoE(groups=0)),
        (SharedMoE(groups=0), AltUp(k=2)),
        (SharedMoE(groups=0), Memory(lookup="softmax", buckets=8)),
        (SharedMoE(groups=0, layers="0-1"), SharedMoE(groups=0, layers="2-3", experts=2)),
    ],
)
@pytest.mark.long
def test_exact_passes_compose_in_any_order(recipe: tuple[Any, ...], tmp_path: Path) -> None:
    model, inputs = build("causal/llama")
    expected = logits(model, inputs)
    retrofit.apply(model, *recipe, verify=False)
    found = logits(model, inputs)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), inputs), found)
    with auxiliary_losses() as losses:
        model.train()(**inputs)
    assert len(losses) == len(mixtures(model)) == 4


def test_the_base_class_loads_the_base_as_it_is_in_the_model(tmp_path: Path) -> None:
    model, inputs = build("causal/gpt2", SharedMoE(share_attention=True))
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.eval().base_model(**inputs).last_hidden_state
        assert torch.equal(base(**inputs).last_hidden_state, expected)
    assert len({id(moe) for moe in mixtures(base)}) == 1
    assert base.h[0].attn.c_attn.bias is base.h[1].attn.c_attn.bias
    base.tie_weights()
    assert base.h[0].attn.c_attn.bias.shape == model.transformer.h[0].attn.c_attn.bias.shape
