"""Layers that torch's own dynamic quantization has packed: refused with the fix, and unpacked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.errors import CaptureError, CheckpointError

IDS = torch.arange(24).view(2, 12)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, attention_bias=True
    )
    return LlamaForCausalLM(config).eval()


def quantized(model: Any, dtype: torch.dtype = torch.qint8) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this quantization is to go
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(IDS, use_cache=False).logits
    return out


def test_what_reads_weights_names_the_fix(tmp_path: Path) -> None:
    model = quantized(llama())
    for attempt in (lambda: retrofit.apply(model, "sum"), lambda: retrofit.export_onnx(model, tmp_path / "model.onnx")):
        with refused(CaptureError, code="quantized") as error:
            attempt()
        assert "model.layers.0.self_attn.q_proj and 14 more" in error.value.why
        assert "retrofit.dequantize(model)" in error.value.remedy
    for name in ("model.pt", "directory"):
        with refused(CheckpointError, code="quantized"):
            retrofit.save(model, tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_unpacked_weights_are_the_numbers_that_the_packed_ones_stand_for(dtype: torch.dtype) -> None:
    model = quantized(retrofit.apply(llama(), "sum", verify=False), dtype)
    packed: Any = model.model.layers[1].mlp.up_proj
    expected, bias = packed.weight(), model.model.layers[1].self_attn.q_proj.bias()
    assert retrofit.dequantize(model) is model
    linear = model.model.layers[1].mlp.up_proj
    assert type(linear) is nn.Linear and linear.bias is None
    assert torch.equal(linear.weight, expected.dequantize().float())
    assert torch.equal(model.model.layers[1].self_attn.q_proj.bias, bias)
    before = logits(model)
    retrofit.apply(model, "altup(k=2)", verify=False)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    assert [one.name for one in retrofit.recipe(model) or ()] == ["sum", "altup"]


def test_a_packed_layer_that_takes_no_floats_is_refused() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.static = torch.ao.nn.quantized.Linear(8, 8)

    with refused(CheckpointError, "Holder", code="packed") as error:
        retrofit.dequantize(Holder())
    assert "static" in error.value.why
