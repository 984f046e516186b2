"""Several passes over one model: the account of each names its sites as they are called once the later passes have run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, XLMConfig, XLMWithLMHeadModel

import retrofit
from retrofit.checks.reference import Reference
from retrofit.passes.recurrence.recurrent_feed_forward import RecurrentFeedForward
from retrofit.rewriting import apply_reported, rewrites

LSH = "lsh-attention(rounds=2, buckets=4, chunk=4)"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.mark.first(1)
@pytest.mark.parametrize("later", ["recurrence(rank=2)", "memory", "altup(k=2)"])
@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one after the other"])
def test_sites_are_named_as_they_are_once_later_passes_have_wrapped_them(later: str, together: bool) -> None:
    model = llama()
    reference = Reference.of(model)
    for passes in ((LSH, later),) if together else ((LSH,), (later,)):
        retrofit.apply(model, *passes, verify=False)
    assert retrofit.verify(model, reference, checks=["graph", "method"]).ok, "these checks know sites by their names"
    first, _ = rewrites(model) or ()
    alone = llama()
    retrofit.apply(alone, LSH, verify=False)
    (expected,) = rewrites(alone) or ()
    kinds = [type(alone.get_submodule(site.name)) for site in expected.sites]
    assert [type(model.get_submodule(site.name)) for site in first.sites] == kinds
    assert len(kinds) == SIZES["num_hidden_layers"]


def test_a_recurrence_goes_around_a_mixture_that_lays_out_tokens_in_one_dimension() -> None:
    model = llama()
    apply_reported(model, "shared-moe(experts=3, groups=0)", "recurrence(rank=2)", count_flops=False)
    around = [path for path, one in model.named_modules() if isinstance(one, RecurrentFeedForward)]
    assert around == [f"model.layers.{depth}.layer.mlp" for depth in range(SIZES["num_hidden_layers"])]
    assert not any(model.get_submodule(path).layout.flat for path in around), "it reads (batch, tokens, d)"  # type: ignore[union-attr]


def test_a_layer_is_found_to_take_a_mask_behind_hashes_that_show_keys_too() -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES))
    apply_reported(model, LSH, "recurrence(rank=2)", count_flops=False)  # verified where sequences are padded, too
    layer = model.bert.encoder.layer[0]
    assert layer.mask is not None, "the recurrence learns of padding by it"


def test_a_recurrence_behind_hashed_attention_goes_along_tokens_and_is_continued() -> None:
    """Its rows do not depend on each other, and decoding goes on from the state of the tokens before."""
    torch.manual_seed(0)
    model = llama().eval()
    retrofit.apply(model, LSH, "recurrence(rank=2)", verify=False)
    assert retrofit.inspect(model).stacks[0].causal
    for one in model.modules():
        if isinstance(one, RecurrentFeedForward):
            nn.init.normal_(one.recurrence.w_out)
    ids = torch.randint(64, (2, 11))
    with torch.no_grad():
        whole = model(ids).logits
        torch.testing.assert_close(model(ids[1:]).logits, whole[1:], atol=1e-5, rtol=1e-4)
        begun = model(ids[:, :-2], use_cache=True)
        rest = model(ids[:, -2:], past_key_values=begun.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, -2:], atol=1e-4, rtol=1e-3)


def test_gradients_of_padding_that_a_model_sets_to_zero_are_nobodys() -> None:
    """Causal XLM's attention masks no padding: its tokens are multiplied by the mask, before and after."""
    torch.manual_seed(0)
    model = XLMWithLMHeadModel(XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=2, causal=True, n_langs=1))
    apply_reported(model, "sparse-qkv", count_flops=False)
