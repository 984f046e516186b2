"""Quantizers that replace linear layers with their own, as bitsandbytes does: after a recipe, and before one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import replacing_quantizer
from support.refusals import refused
from support.replacing_quantizer import LayersConfig, Read, WholeNumbers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.pytorch_utils import Conv1D

import retrofit
from retrofit.errors import CheckpointError
from retrofit.surgery.transformers_bookkeeping import forget_packed_reading

IDS = torch.arange(40)[None] % 61
RECIPES = ("altup(k=2)", "sparse-ffn(sparsity=8)", "sparse-ffn(sparsity=8, controller=gate)", "shared-moe", "sparse-qkv")
WITHOUT_BITSANDBYTES = "bitsandbytes is not installed: pip install bitsandbytes"
replacing_quantizer.register()


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 61}
    return varied(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)))


def gpt2() -> Any:
    torch.manual_seed(0)
    return varied(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=61, n_positions=64)))


def varied(model: Any) -> Any:
    for parameter in model.parameters():  # units that differ, so that a controller has something to choose
        parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)
    return model.eval()


def saved(model: Any, folder: Path, spec: str = "") -> Path:
    if spec:
        retrofit.apply(model, spec, verify=False)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits  # type: ignore[no-any-return]


def oracle(quantized: Any, plain: Any) -> Any:
    """The plain rewritten model with the numbers that the layers hold."""
    for path, module in quantized.named_modules():
        if isinstance(module, WholeNumbers):
            assert not module.arranged
            layer, numbers = plain.get_submodule(path), module.numbers()
            assert numbers.any()
            layer.weight.data = numbers.T.contiguous() if isinstance(layer, Conv1D) else numbers
    for module in plain.modules():
        if hasattr(module, "rebuild_buffers"):
            module.rebuild_buffers()
    return plain


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "spec"), [*((llama, spec) for spec in RECIPES), (gpt2, "altup(k=2)"), (gpt2, "sparse-ffn(sparsity=8)")]
)
def test_a_rewritten_model_is_quantized_saved_loaded_and_unpacked(kind: Any, spec: str, tmp_path: Path) -> None:
    folder = saved(kind(), tmp_path / "rewritten", spec)
    model = load(folder, quantization_config=LayersConfig())
    assert any(isinstance(module, WholeNumbers) for module in model.modules())
    expected = oracle(model, load(folder))
    torch.testing.assert_close(logits(model), logits(expected), atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized")
    assert retrofit.recipe(again) == retrofit.recipe(expected)
    torch.testing.assert_close(logits(again), logits(model), atol=1e-6, rtol=1e-6)
    assert not any(isinstance(one, WholeNumbers) for one in retrofit.dequantize(again).modules())
    torch.testing.assert_close(logits(again), logits(expected), atol=1e-5, rtol=1e-5)
    again.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(load(tmp_path / "plain")), logits(again))
    assert torch.equal(logits(retrofit.dequantize(model)), logits(again)), "the model that was saved is unpacked too"


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [llama, gpt2])
def test_a_quantized_base_is_unpacked_rewritten_and_quantized_again(kind: Any, tmp_path: Path) -> None:
    load(saved(kind(), tmp_path / "dense"), quantization_config=LayersConfig()).save_pretrained(tmp_path / "quantized")
    model = load(tmp_path / "quantized")
    with refused(CheckpointError, code="quantized"):
        retrofit.apply(model, "sum")
    before = logits(model)
    retrofit.dequantize(model)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(load(tmp_path / "plain")), logits(model))
    retrofit.apply(model, "altup(k=2)", verify=False)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "rewritten")
    again = load(tmp_path / "rewritten", quantization_config=LayersConfig())
    torch.testing.assert_close(logits(again), before, atol=2e-2, rtol=2e-2)


def test_the_steps_of_a_quantizer_are_taken_out_of_a_models_own_conversions() -> None:
    own = MergeModulelist(dim=0)
    mixed = WeightConverter(["experts.*.up.weight"], "experts.up", [Read(None), own])
    alone = WeightConverter(["weight"], "weight", [Read(None)])
    plain = WeightConverter(["experts.*.down.weight"], "experts.down", [own])
    model = nn.Module()
    model.__dict__["_weight_conversions"] = [mixed, alone, plain]
    forget_packed_reading(model)
    first, second = model.__dict__["_weight_conversions"]
    assert second is plain and first.operations == [own] and len(mixed.operations) == 2
    assert first.reverse_transform().source_patterns == ["experts.up"]


def test_what_is_undone_after_unpacking_is_saved_as_the_dense_model(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "rewritten", "altup(k=2)")
    load(folder, quantization_config=LayersConfig()).save_pretrained(tmp_path / "quantized")
    model = retrofit.undo(retrofit.dequantize(load(tmp_path / "quantized")))
    model.save_pretrained(tmp_path / "dense")
    assert torch.equal(logits(load(tmp_path / "dense")), logits(model))


def test_a_layer_that_unpacks_other_weights_than_it_computes_with_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(llama(), tmp_path / "dense")
    retrofit.dequantize(load(folder, quantization_config=LayersConfig()))
    monkeypatch.setattr(WholeNumbers, "loses_order", True)
    model = load(folder, quantization_config=LayersConfig())
    logits(model)
    with refused(CheckpointError, code="differs") as error:
        retrofit.dequantize(model)
    assert "layers.0" in error.value.site and error.value.remedy


def test_what_a_gate_measures_of_packed_layers_leaves_them_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeNumbers, "loses_order", True)
    folder = saved(llama(), tmp_path / "rewritten", "sparse-ffn(sparsity=8, controller=gate)")
    model = load(folder, quantization_config=LayersConfig())
    assert not any(module.arranged for module in model.modules() if isinstance(module, WholeNumbers))


# ── bitsandbytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

CONFIGS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "nf4, scales packed": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
        "bnb_4bit_use_double_quant": True,
    },
}


def config_of(name: str) -> Any:
    pytest.importorskip("bitsandbytes", reason=WITHOUT_BITSANDBYTES)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**CONFIGS[name])


def unpacked_by_bitsandbytes(module: Any) -> Tensor:
    from bitsandbytes import functional

    if hasattr(module.weight, "SCB"):
        return functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)  # type: ignore[no-any-return]
    return functional.dequantize_4bit(module.weight.data, module.weight.quant_state)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spec", RECIPES)
def test_bitsandbytes_quantizes_what_was_rewritten(spec: str, name: str, tmp_path: Path) -> None:
    asked = {"quantization_config": config_of(name)}
    folder = saved(llama(), tmp_path / "rewritten", spec)
    model = load(folder, **asked)
    model.save_pretrained(tmp_path / "quantized")  # before it computes: see docs/quantization.md
    replaced = {path: module for path, module in model.named_modules() if type(module).__module__.startswith("bitsandbytes")}
    assert len(replaced) >= 6
    numbers = {path: unpacked_by_bitsandbytes(module).clone() for path, module in replaced.items()}
    one, many = logits(model, IDS[:, :1]), logits(model)
    again = load(tmp_path / "quantized")
    assert retrofit.recipe(again) == retrofit.recipe(load(folder))
    torch.testing.assert_close(logits(again), many, atol=1e-6, rtol=1e-6)
    plain = retrofit.dequantize(load(tmp_path / "quantized"))
    for path, matrix in numbers.items():
        layer = plain.get_submodule(path)
        assert isinstance(layer, (nn.Linear, Conv1D))
        assert torch.equal(layer.weight.T if isinstance(layer, Conv1D) else layer.weight, matrix.to(layer.weight.dtype))
    assert (logits(plain, IDS[:, :1]) - one).abs().max() < 0.02 * one.abs().max()
    plain.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(load(tmp_path / "plain")), logits(plain))
    assert model.generate(IDS[:, :6], max_new_tokens=5, do_sample=False).shape == (1, 11)


@pytest.mark.parametrize("kind", [llama, gpt2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_base_in_bitsandbytes_is_unpacked_rewritten_and_quantized_again(name: str, kind: Any, tmp_path: Path) -> None:
    asked = {"quantization_config": config_of(name)}
    load(saved(kind(), tmp_path / "dense"), **asked).save_pretrained(tmp_path / "quantized")
    plain = retrofit.dequantize(load(tmp_path / "quantized"))
    before = logits(plain)
    retrofit.apply(plain, "altup(k=2)")
    plain.save_pretrained(tmp_path / "rewritten")
    again = logits(load(tmp_path / "rewritten", **asked))
    assert (again - before).abs().max() < 0.02 * before.abs().max(), "numbers that are on the grid already"


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_trained_on_a_rewritten_model_in_bitsandbytes(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    asked = {"quantization_config": config_of(name)}
    model = load(saved(llama(), tmp_path / "rewritten", "altup(k=2)"), **asked).train()
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    adapted(IDS, labels=IDS).loss.backward()
    trained = [one for one in adapted.parameters() if one.requires_grad]
    assert trained and all(one.grad is not None for one in trained)
