"""Upcycled models as architectures of transformers: the same outputs, from plain directories; else a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from support.refusals import refused
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError, DoesNotFitError
from retrofit.native import Match, native_form
from retrofit.native.architectures import (
    Architecture,
    Layout,
    Shapes,
    Wanted,
    architectures_like,
    combinations,
    equal_layout,
    extra_parameter,
    layouts_for,
    sized,
)

IDS = torch.arange(3, 20)[None]


def upcycled(dense: Any, options: str = "") -> Any:
    """A model with a mixture in every layer whose experts differ, as if it had trained."""
    torch.manual_seed(0)
    model = retrofit.apply(dense, f"shared-moe(groups=0, experts=4, k=2{options})", verify=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.long
def test_a_llama_becomes_a_mixtral(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = upcycled(tiny_models.llama(hidden_size=32, intermediate_size=48))
    retrofit.save(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_notes.json").write_text("{}")
    assert main(["export", str(tmp_path / "model"), "--native", "mixtral"]) == 0
    said = capsys.readouterr().out
    assert "MixtralForCausalLM" in said and "num_local_experts=4" in said
    output = tmp_path / "model.native"
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == "mixtral" and "quantization_config" not in config and (output / "tokenizer_notes.json").exists()
    native = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert type(native) is transformers.MixtralForCausalLM and retrofit.recipe(native) is None
    with torch.no_grad():
        torch.testing.assert_close(native(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    from safetensors import safe_open

    with safe_open(output / "model.safetensors", "pt") as file:  # by the names that other engines read
        assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in set(file.keys())


@pytest.mark.long
def test_a_model_in_half_precision_has_a_native_form(tmp_path: Path) -> None:
    dense = tiny_models.llama(hidden_size=32, intermediate_size=48)
    dense.save_pretrained(tmp_path)
    half = type(dense).from_pretrained(tmp_path, dtype=torch.bfloat16)  # its rotary frequencies are in float32
    model = upcycled(half, ", renormalize=true")
    native = retrofit.to_native(model, "mixtral")
    assert native.dtype is torch.bfloat16 and type(native) is transformers.MixtralForCausalLM
    with torch.no_grad():  # the same numbers: only what is rounded when differs
        torch.testing.assert_close(native.float()(IDS).logits, model.float()(IDS).logits, atol=1e-5, rtol=1e-5)


def test_rotary_frequencies_that_were_rounded_in_memory_are_named() -> None:
    model = upcycled(tiny_models.llama(hidden_size=32, intermediate_size=48), ", renormalize=true").to(torch.bfloat16)
    with refused(DoesNotFitError, "LlamaForCausalLM", "bfloat16", site="model.rotary_emb.inv_freq") as error:
        retrofit.to_native(model, "mixtral")
    assert "dtype=" in error.value.remedy


def test_of_parameters_that_are_too_many_or_too_few_the_numbers_are_said() -> None:
    model: Any = nn.ModuleList([nn.LayerNorm(8, bias=False), nn.LayerNorm(8, bias=False)])

    def said(count: int) -> str:
        return extra_parameter(model, [], Wanted(Shapes({(8,): count}), 4, 0, Shapes(), (), (0,), 1))

    assert said(2) == ""
    assert said(3) == "it has 2 parameters 8 outside the mixtures of 1 layer, the model 3"
    assert said(1) == "it has 2 parameters 8 outside the mixtures of 1 layer, the model 1: 0.weight, 1.weight"


@pytest.mark.long
def test_mixtures_in_some_layers_are_in_the_same_layers_of_the_native_form() -> None:
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = upcycled(transformers.Qwen3ForCausalLM(config).eval(), ", renormalize=true, layers=1-2")
    native = retrofit.to_native(model, "qwen3_moe")
    assert native.config.mlp_only_layers == [0, 3]
    with torch.no_grad():
        torch.testing.assert_close(native(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_gates_that_are_not_renormalized_need_another_architecture() -> None:
    model = upcycled(tiny_models.llama(hidden_size=32, intermediate_size=48), ", renormalize=false")
    with refused(DoesNotFitError, "mixtral", "mixture", code="no-native-form"):
        retrofit.to_native(model, "mixtral")
    form = native_form(model, "qwen2_moe")
    native = form.model
    with torch.no_grad():
        torch.testing.assert_close(native(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert all(one.numel() for one in native.parameters()), "llama.cpp and vLLM read no empty tensors"
    for layer in native.model.layers:  # the shared expert that the model has nothing for: zero, and able to learn
        assert layer.mlp.shared_expert_gate.weight.all(), "llama.cpp divides by what it makes"
        assert not layer.mlp.shared_expert.down_proj.weight.any()
    assert {name.rpartition(".mlp.")[2] for name in form.zeros} == {"shared_expert.down_proj.weight"}
    native(IDS, labels=IDS).loss.backward()
    assert native.model.layers[0].mlp.shared_expert.down_proj.weight.grad.any()


def test_what_has_no_native_form_is_refused() -> None:
    with refused(CheckpointError, code="not-rewritten"):
        retrofit.to_native(tiny_models.llama())
    with refused(DoesNotFitError, code="no-mixture"):
        retrofit.to_native(retrofit.apply(tiny_models.llama(), "sum", verify=False))
    model = upcycled(tiny_models.gpt2())
    with refused(DoesNotFitError, "mixtral", code="no-native-form", option="") as error:
        retrofit.to_native(model, "mixtral")
    assert "docs/native.md" in error.value.remedy
    with refused(DoesNotFitError, "nothing", option="architecture"):
        retrofit.to_native(model, "nothing")


class Fused(nn.Module):
    """Σ of all experts' outputs, its up matrices of two experts and both halves in one."""

    def __init__(self, experts: int, swapped: bool) -> None:
        super().__init__()
        self.both, self.down = nn.Parameter(torch.empty(experts, 12, 4)), nn.Parameter(torch.empty(experts, 4, 6))
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = torch.einsum("btd,ehd->ebth", x, self.both).chunk(2, -1)
        gate, up = (other, one) if self.swapped else (one, other)
        return torch.einsum("ebth,edh->btd", gate.sigmoid() * up, self.down)


class Apart(nn.Module):
    """The same with two matrices, stored the other way round."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.gate = (nn.Parameter(torch.empty(experts, 6, 4)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (torch.einsum("btd,ehd->ebth", x, one) for one in (self.gate, self.up))
        return torch.einsum("ebth,edh->btd", gate.sigmoid() * up, self.down)


@pytest.mark.parametrize("swapped", [False, True])
def test_layouts_are_decided_by_what_is_computed(swapped: bool) -> None:
    source, target = Apart(3), Fused(3, swapped)
    weights = {name: torch.randn(one.shape) for name, one in source.named_parameters()}
    found, gap = equal_layout(source, target, weights, torch.randn(1, 5, 4))
    names = ("up", "gate") if swapped else ("gate", "up")
    assert found["both"] == Layout(tuple((name, None) for name in names)) and gap < 1e-5
    assert found["down"] == Layout((("down", None),))
    back, _ = equal_layout(target, source, {"both": torch.randn(3, 12, 4), "down": torch.randn(3, 4, 6)}, torch.randn(1, 5, 4))
    assert back["gate"].sources == (("both", 1 if swapped else 0),)


def test_every_weight_takes_part_once() -> None:
    weights = {"a": torch.randn(2, 6, 4), "b": torch.randn(2, 6, 4)}
    for chosen in combinations({"one": torch.Size((2, 6, 4)), "other": torch.Size((2, 4, 6)), "none": torch.Size((7,))}, weights):
        parts = [part for layout in chosen.values() for part in layout.sources]
        elements = sum(0.5 if half is not None else 1 for _, half in parts)
        assert len(set(parts)) == len(parts) and {name for name, _ in parts} == {"a", "b"} and elements == 2
        assert not chosen["none"].sources and chosen["other"].transposed
    assert [one.sources for one in layouts_for(torch.Size((3, 1)), weights)] == [()]


class PartsConfig(PreTrainedConfig):
    """No entry is called after experts; by default there are too many, too large ones in every layer."""

    model_type = "parts"

    def __init__(self, every: int = 1, inner: int = 400, parts: int = 60, **more: Any) -> None:
        self.every, self.inner, self.parts = every, inner, parts
        super().__init__(**more)


class Parts(PreTrainedModel):
    """Two layers, of which every so many is a mixture and the others are dense."""

    config_class = PartsConfig

    def __init__(self, config: PartsConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for depth, layer in enumerate(self.layers):
            if config.every and (depth + 1) % config.every == 0:
                layer.router = nn.Linear(8, config.parts, bias=False)
                layer.up = nn.Parameter(torch.empty(config.parts, config.inner, 8))
                layer.down = nn.Parameter(torch.empty(config.parts, 8, config.inner))
            else:
                layer.dense = nn.Linear(8, 8, bias=False)
        self.norm = nn.Parameter(torch.empty(8))


def test_mixtures_are_known_by_their_weights_and_not_given_up_for_being_too_large() -> None:
    routers = Shapes({(4, 8): 2})
    wanted = Wanted(Shapes({(8,): 1}), 4, 2 * 2 * 4 * 8 * 12, routers, (4, 8, 12, 2), (0, 1), 2)
    found = sized(Architecture(Parts, {}, ("every", "inner", "parts")), wanted)
    assert (found.why, found.has_stacks) == ("", True)
    config = found.architecture.skeleton().config
    assert (config.every, config.inner, config.parts) == (1, 12, 4) and wanted.cost(found.architecture.skeleton()) == 0
    dense = sized(Architecture(Parts, {"every": 0}, ("inner", "parts")), wanted)
    assert (dense.why, dense.has_stacks) == ("it has no mixtures", False)


def test_every_architecture_for_the_task_is_tried() -> None:
    tried = {one.name for one in architectures_like(tiny_models.llama())}
    assert {"mixtral", "mistral"} <= tried and "vit" not in tried


def test_of_equals_the_one_with_nothing_strange_comes_first() -> None:
    """An expert that has no elements is nothing to compute, and still none that the model has."""

    def match(own: int, *sources: int) -> Match:
        layouts: Any = {str(place): SimpleNamespace(sources=("weight",) * count) for place, count in enumerate(sources)}
        architecture: Any = SimpleNamespace(own=("entry",) * own)
        return Match(architecture, layouts, 0, SimpleNamespace())  # type: ignore[arg-type]

    plain, few_entries, with_empty = match(5, 1, 1), match(4, 1, 1), match(1, 1, 0)
    assert sorted([with_empty, plain, few_entries], key=Match.strangeness) == [few_entries, plain, with_empty]
