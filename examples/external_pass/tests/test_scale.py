"""The small pass by itself: what it scales is what was asked for, and nothing else."""

from __future__ import annotations

import torch
import transformers

import retrofit


def small_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 99}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


@torch.no_grad()
def test_a_scaled_feed_forward_is_one_whose_last_matrix_is_scaled() -> None:
    model, dense, ids = small_llama(), small_llama(), torch.arange(24).view(2, 12)
    retrofit.apply(model, "scale(kind=ffn)")  # verified, or taken back
    assert torch.equal(model(ids).logits, dense(ids).logits)
    for name, parameter in model.named_parameters():
        if name.endswith(".alpha"):
            parameter.fill_(0.5)
    for layer in dense.model.layers:
        layer.mlp.down_proj.weight.mul_(1.5)
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)


def test_the_plan_says_what_is_done() -> None:
    model = small_llama()
    plan = retrofit.plan_of(model, "scale(kind=attention)").passes[0].plan
    dense = sum(parameter.numel() for parameter in model.parameters())
    retrofit.apply(model, "scale(kind=attention)")
    assert [site.name for site in plan.sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert sum(parameter.numel() for parameter in model.parameters()) - dense == plan.new_parameters


def small(kind: str, config: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 99}
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()


def scaled(model: transformers.PreTrainedModel) -> list[str]:
    """The paths of the modules that are scaled."""
    return [name.removesuffix(".alpha") for name, _ in model.named_parameters() if name.endswith(".alpha")]


def test_layers_that_share_a_module_share_its_number() -> None:
    model = retrofit.apply(small("AlbertForMaskedLM", "AlbertConfig"), "scale", verify=False)
    assert scaled(model) == ["albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"]


def test_a_branch_of_several_modules_is_scaled_once_and_its_layer_is_not() -> None:
    model = retrofit.apply(small("BertForMaskedLM", "BertConfig"), "scale(kind=attention)", verify=False)
    assert scaled(model) == [f"bert.encoder.layer.{depth}.attention.self" for depth in range(3)]
