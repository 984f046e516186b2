"""Hooks of a user's on a model that is rewritten: each acts once, as on the dense model, or the refusal names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from support.tiny_models import gpt2, llama, t5
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.passes.shared_moe.mixture_of_experts import MoEBlock

IDS = torch.arange(3, 15)[None]
MLP = "model.layers.1.mlp"


def louder(module: nn.Module, args: Any, output: Any) -> Any:
    return tuple(1.25 * one if isinstance(one, Tensor) else one for one in output) if isinstance(output, tuple) else 1.25 * output


def logits(model: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, **more).logits
    return found


def hooked(make: Callable[..., Any], path: str) -> Any:
    model = make()
    model.get_submodule(path).register_forward_hook(louder)
    return model


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("make", "recipe", "path"),
    [
        (llama, "shared-moe(groups=0)", f"{MLP}.act_fn"),
        (llama, "altup(k=2,init=lockstep)", "model.layers.0"),
        (llama, "sum", "model.embed_tokens"),
        (llama, "reversible", f"{MLP}"),
        (t5, "memory", "decoder.block.0.layer.1"),
        (llama, "shared-moe(groups=0)", "model.layers.0"),
        (llama, "memory", MLP),
        (llama, "memory(beside=ffns)", f"{MLP}.down_proj"),
        (llama, "altup(k=2,embedding=recycled)", "model.embed_tokens"),
        (llama, "reversible", "model.layers.0.self_attn"),
        (gpt2, "memory(lookup=softmax)", "transformer.h.0.attn"),
    ],
)
def test_a_hook_that_acts_once(make: Callable[..., Any], recipe: str, path: str) -> None:
    expected = logits(hooked(make, path))
    assert (expected - logits(make())).abs().max() > 1e-2
    torch.testing.assert_close(logits(retrofit.apply(hooked(make, path), recipe)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        ("shared-moe(groups=0)", MLP),
        ("sparse-ffn(sparsity=4,active=4)", f"{MLP}.up_proj"),
        ("sparse-loss(modules=4)", "lm_head"),
        ("altup(k=2)", "model.embed_tokens"),
        ("altup(k=2)", "model.norm"),  # for each block
    ],
)
def test_a_hook_that_would_not_act_once(recipe: str, path: str) -> None:
    model = hooked(llama, path)
    expected, modules = logits(model), dict(model.named_modules())
    with pytest.raises(DoesNotFitError) as refusal:
        retrofit.apply(model, recipe, verify=False)
    assert all(part in str(refusal.value) for part in (path, "forward hook", "louder")) and "hook" in refusal.value.remedy
    assert dict(model.named_modules()) == modules and torch.equal(logits(model), expected)


class Halves(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Louder(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 1.25 * output


KINDS: dict[str, Callable[[Any], Any]] = {
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda *call: None, with_kwargs=True),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *call: None),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda *call: None),
    "state-dict hook": lambda module: module.register_state_dict_post_hook(lambda *call: None),
    "state-dict pre-hook": lambda module: module.register_state_dict_pre_hook(lambda *call: None),
    "hook on loading a state dict": lambda module: module.register_load_state_dict_post_hook(lambda *call: None),
    "forward of its own": lambda module: add_hook_to_module(module, Louder()),
    "parametrization": lambda module: parametrize.register_parametrization(module, "weight", Halves()),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_every_kind(kind: str) -> None:
    """On a module that a pass would replace, and on one that it keeps."""
    model = llama()
    KINDS[kind](model.lm_head)
    with pytest.raises(DoesNotFitError) as refusal:
        retrofit.apply(model, "sparse-loss(modules=4)", verify=False)
    assert "lm_head" in refusal.value.what and kind in f"{refusal.value.what}; {refusal.value.why}"
    expected = logits(model)
    torch.testing.assert_close(logits(retrofit.apply(model, "shared-moe(groups=0)", verify=False)), expected, rtol=1e-4, atol=1e-4)


def test_pruning_and_gradient_hooks() -> None:
    """A layer that is pruned is left alone, and a parameter that a pass keeps keeps its hooks."""
    model = llama()
    pruned = model.get_submodule(MLP)
    prune.l1_unstructured(pruned.up_proj, "weight", amount=0.3)
    expected = logits(model)
    retrofit.apply(model, "shared-moe(groups=0)", verify=False)
    assert model.get_submodule(MLP) is pruned and isinstance(model.model.layers[0].mlp, MoEBlock)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.lm_head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(DoesNotFitError) as refusal:
        retrofit.apply(model, "sparse-loss(modules=4)", verify=False)
    assert (refusal.value.code, refusal.value.site) == ("hooked", "lm_head.weight") and "gradient hook" in refusal.value.what
    retrofit.apply(model, "reversible", verify=False)


def test_hooks_that_move_tensors_to_a_device_follow() -> None:
    """accelerate has one on every module with weights of a model that it has dispatched to several devices."""
    model = llama()
    expected = logits(model)
    for module in (model.get_submodule(MLP), *model.get_submodule(MLP).children()):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    retrofit.apply(model, "shared-moe(groups=0)", verify=False)
    block = model.get_submodule(MLP)
    assert isinstance(block, MoEBlock) and type(block._hf_hook) is AlignDevicesHook
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_hooks_by_which_transformers_records_outputs() -> None:
    model = llama()
    states = model(IDS, output_hidden_states=True, output_attentions=True).hidden_states
    retrofit.apply(model, "shared-moe(groups=0)", "sparse-loss(modules=4)", verify=False)
    again = model(IDS, output_hidden_states=True).hidden_states
    assert len(again) == len(states)
    torch.testing.assert_close(again[:2], states[:2])
