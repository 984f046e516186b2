"""Decoders with random weights, rewritten without any: of their shape alone, and filled on the device afterwards.

Times do not depend on the values, so no pass fits a start, and a model of a billion parameters takes a second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit

SPREAD = 0.02  # of random weights


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    width: int
    units: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.units,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            max_position_embeddings=8192,
        )


TINY = Shape(32, 64, 3, 4, 2, 64)
REAL = Shape(2048, 8192, 4, 16, 4, 32000)


def rewritten(spec: str, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A decoder of this shape, rewritten by the pass; an empty spec leaves it dense."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(shape.config()).to(dtype).eval()
    if spec:
        model = retrofit.apply(model, spec, verify=False)
    return filled(model, device)


@torch.no_grad()
def filled(model: Any, device: str) -> Any:
    """The model on the device: random matrices, vectors of ones, indices in their order; tensors that modules share stay shared."""
    made: dict[Any, Any] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                values = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
                made[parameter] = nn.Parameter(values.normal_(std=SPREAD) if parameter.dim() > 1 else values)
            module.register_parameter(name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer not in made:
                made[buffer] = numbers(buffer, device)
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, made[buffer], persistent=persistent)
    return model


def numbers(like: torch.Tensor, device: str) -> torch.Tensor:
    """Values for a buffer."""
    if like.is_floating_point():
        return torch.rand(like.shape, dtype=like.dtype, device=device)
    return torch.arange(like.numel(), device=device).view(like.shape).to(like.dtype)
