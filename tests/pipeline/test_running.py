"""Several passes over one model: the account of each names its sites as they are called once the later passes have run."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.rewriting import apply_reported, rewrites

LSH = "lsh-attention(rounds=2, buckets=4, chunk=4)"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one after the other"])
@pytest.mark.parametrize("later", ["recurrence(rank=2)", "memory", "altup(k=2)"])
def test_sites_are_named_as_they_are_once_later_passes_have_wrapped_them(later: str, together: bool) -> None:
    model = llama()
    for passes in ((LSH, later),) if together else ((LSH,), (later,)):
        apply_reported(model, *passes, count_flops=False)  # verified: the check of the graph knows them by these names
    first, _ = rewrites(model) or ()
    alone = llama()
    retrofit.apply(alone, LSH, verify=False)
    (expected,) = rewrites(alone) or ()
    kinds = [type(alone.get_submodule(site.name)) for site in expected.sites]
    assert [type(model.get_submodule(site.name)) for site in first.sites] == kinds
    assert len(kinds) == SIZES["num_hidden_layers"]
