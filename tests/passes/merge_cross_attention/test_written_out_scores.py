"""The merge-cross-attention pass on attentions whose scores are written out, held against the same weights under torch's own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models, zoo
from support.refusals import refused
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.passes import MergeCrossAttention
from retrofit.passes.merge_cross_attention.joint_attention import JointSoftmax
from retrofit.passes.merge_cross_attention.merged_layer import OtherTokens
from retrofit.rewriting import apply_reported

SIZES = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.3,
}


def t5(implementation: str) -> Any:
    return tiny_models.t5(num_layers=2, initializer_factor=2.0, attn_implementation=implementation)


def bart(implementation: str) -> Any:
    """Where scores are written out a model of the same weights whose code multiplies (batch · heads, tokens, width)."""
    if implementation == "sdpa":
        return tiny_models.built(transformers.BartConfig(**SIZES), transformers.BartForConditionalGeneration)
    model = tiny_models.built(transformers.MvpConfig(**SIZES), transformers.MvpForConditionalGeneration)
    model.load_state_dict(dense("bart", "sdpa").state_dict())
    return model


BUILD = {"t5": t5, "bart": bart}


@functools.cache
def dense(name: str, implementation: str) -> Any:
    return BUILD[name](implementation).eval()


@functools.cache
def rewritten(name: str, implementation: str, **options: Any) -> Any:
    return retrofit.apply(copy.deepcopy(dense(name, implementation)), MergeCrossAttention(**options), verify=False)


def ids(batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(5, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(length: int = 13) -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids(), "attention_mask": mask, "decoder_input_ids": ids(2, length, 1)}


@torch.no_grad()
def logits(model: Any, **given: Any) -> Tensor:
    return zoo.logits(model(**given)).clone()


HOW = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "options"), [("t5", {}), ("t5", {"attentions": 1, "weight": 0.5}), ("bart", {"weight": 0.5})], ids=str
)
def test_it_is_what_torchs_own_attention_computes(name: str, options: dict[str, Any]) -> None:
    ours, theirs = (rewritten(name, one, **options) for one in ("eager", "sdpa"))
    assert sum(isinstance(one, JointSoftmax) for one in ours.modules()) == 2 * options.get("attentions", 2)
    for length in (13, 3):
        expected = logits(theirs, **inputs(length))
        torch.testing.assert_close(logits(ours, **inputs(length)), expected, rtol=2e-4, atol=2e-5 * float(expected.abs().max()))
    given = inputs()
    for how in ({"num_beams": 3}, {"do_sample": False, "use_cache": False}):
        found, expected = (
            one.generate(given["input_ids"], attention_mask=given["attention_mask"], **HOW, **how) for one in (ours, theirs)
        )
        assert torch.equal(found, expected)


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(**inputs(), labels=ids(2, 13, seed=5)).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def test_its_gradients_are_those_of_torchs_own_attention() -> None:
    found, expected = (gradients(copy.deepcopy(rewritten("t5", one, weight=0.5))) for one in ("eager", "sdpa"))
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()), msg=name)


def test_dropout_of_weights_is_that_of_the_models_code() -> None:
    """With everything dropped but the stream, no attention adds anything, whichever keys it has."""
    model = copy.deepcopy(rewritten("bart", "eager"))
    given = inputs()
    for part in model.modules():
        if isinstance(part, nn.Module) and isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    attentions = [one for one in model.get_decoder().modules() if hasattr(one, "out_proj")]
    for one in attentions:
        one.dropout = 1.0
    model.train()
    with torch.no_grad():
        for one in attentions:
            nn.init.zeros_(one.out_proj.bias)
        first = zoo.logits(model(**given)).clone()
        for one in attentions:
            one.v_proj.weight.mul_(-3)
        assert torch.equal(zoo.logits(model(**given)), first)


def test_it_begins_at_the_dense_model_on_its_dial() -> None:
    model, given, dial = copy.deepcopy(rewritten("t5", "eager")), inputs(), OtherTokens()
    assert dial.fits(model)
    dial.turn(model, 0.0)
    assert torch.equal(logits(model, **given), logits(dense("t5", "eager"), **given))
    dial.turn(model, 1.0)
    assert torch.equal(logits(model, **given), logits(rewritten("t5", "eager"), **given))


@pytest.mark.long
def test_every_check_passes() -> None:
    report = apply_reported(copy.deepcopy(dense("bart", "eager")), MergeCrossAttention(weight=0.5)).report
    assert report is not None and report.ok
    assert all(report[name].status == "passed" for name in ("method", "causality", "padding", "cache", "gradients", "round trip"))


@pytest.mark.long
def test_a_compiled_step_has_the_same_gradients() -> None:
    model = copy.deepcopy(rewritten("t5", "eager"))
    expected = gradients(model)
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    step(**inputs(), labels=ids(2, 13, seed=5), use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max()))


def test_an_attention_that_is_not_written_out_any_more_is_an_error_and_not_dense() -> None:
    model = copy.deepcopy(rewritten("t5", "eager"))
    model.set_attn_implementation("sdpa")
    if model.decoder.config._attn_implementation != "sdpa":
        pytest.skip("this version of transformers does not tell the decoder")
    with refused(RetrofitError, "softmax", "attn_implementation"):
        model(**inputs())
