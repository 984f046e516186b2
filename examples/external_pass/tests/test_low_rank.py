"""The pass by itself: held against the formula, and against every check of retrofit."""

from __future__ import annotations

import torch
import transformers
from retrofit_low_rank import LowRank, LowRankAdapter
from torch import nn

import retrofit


def small_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 99}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def test_an_adapter_is_the_papers_formula() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(3, 5, 6)
    adapter = LowRankAdapter(layer, (0, "input"), (6, 4), rank=2, alpha=3.0)
    nn.init.normal_(adapter.b)
    delta = 3.0 / 2 * adapter.a @ adapter.b  # (d_in, d_out)
    torch.testing.assert_close(adapter(x), x @ (layer.weight.t() + delta) + layer.bias)


def test_every_check_passes_and_the_plan_says_what_is_done() -> None:
    model, ids = small_llama(), torch.arange(24).view(2, 12)
    before = model(ids).logits
    plan = retrofit.plan_of(model, LowRank(rank=4))
    dense = sum(parameter.numel() for parameter in model.parameters())
    retrofit.apply(model, LowRank(rank=4))  # verified, or taken back
    assert torch.equal(model(ids).logits, before)
    adapters = [path for path, module in model.named_modules() if isinstance(module, LowRankAdapter)]
    assert adapters == [site.name for site in plan.passes[0].plan.sites]
    assert sum(parameter.numel() for parameter in model.parameters()) - dense == plan.passes[0].plan.new_parameters


def test_only_what_is_asked_for_is_adapted() -> None:
    model = small_llama()
    retrofit.apply(model, LowRank(branches="attention", layers="1"), verify=False)
    adapters = [path for path, module in model.named_modules() if isinstance(module, LowRankAdapter)]
    assert set(adapters) == {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}


def test_adapters_alone_learn() -> None:
    model, ids = small_llama(), torch.arange(24).view(2, 12)
    retrofit.apply(model, LowRank(), verify=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".a", ".b")))
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1
