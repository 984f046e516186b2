"""Models rewritten with sparse-qkv, and their originals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import retrofit
from retrofit.passes.sparse_qkv.modular_projection import ModularProjection
from retrofit.passes.sparse_qkv.sparse_qkv import SparseQKV
from support import zoo

DECODERS = ("gemma2", "gpt2", "gpt_neox", "afmoe")


def built(name: str) -> Any:
    return zoo.build(zoo.entry(name), **OVERRIDES.get(name, {}))


def original(form: str) -> Any:
    return built(FORMS[form][0])


def inputs(form: str, model: Any, **how: int) -> dict[str, Tensor]:
    return zoo.inputs(zoo.entry(FORMS[form][0]), model, **how)


def rewritten(form: str) -> Any:
    """The model with sparse QKV and no zeros in it: filters look at earlier tokens too."""
    model = original(form)
    retrofit.apply(model, FORMS[form][1], example_inputs=inputs(form, model), verify=False)
    for module in model.modules():
        if isinstance(module, ModularProjection):
            rough(module)
    return model


LONG = ("falcon", "big_bird", "albert", "gemma2")


def rough(module: nn.Module, seed: int = 0) -> Any:
    """The module with every parameter drawn anew: none of them is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / parameter.shape[-1] ** 0.5)
    return module


# Between them: one matrix a letter and one for all by chunks, by heads and by indices, rotary, learned and relative positions,
# grouped queries, gates from a matrix of their own and from the queries', a stream that the attention's code reads too, or the
# module of its output layer, a layer at all depths, biases, encoder-decoder models, images; every variant and every output.
FORMS: dict[str, tuple[str, SparseQKV]] = {
    "gemma2": ("causal/gemma2", SparseQKV(output="mult-conv")),
    "gpt2": ("causal/gpt2", SparseQKV(output="conv", kernel=2)),
    "gpt_neox": ("causal/gpt_neox", SparseQKV(modules=8)),
    "llama": ("causal/llama", SparseQKV(variant="mult", output="mult")),
    "afmoe": ("causal/afmoe", SparseQKV()),
    "falcon": ("causal/falcon", SparseQKV(output="keep")),
    "qwen3_next": ("causal/qwen3_next", SparseQKV(output="keep")),
    "albert": ("masked/albert", SparseQKV()),
    "big_bird": ("causal/big_bird", SparseQKV()),
    "bart": ("seq2seq/bart", SparseQKV(layers="0-1")),
    "bert": ("masked/bert", SparseQKV(variant="conv", output="mult")),
    "vit": ("image/vit", SparseQKV()),
}


# Two layers with a dense feed-forward each: the attention is the same, and tested in less time.
OVERRIDES: dict[str, dict[str, Any]] = {
    "causal/big_bird": {"num_hidden_layers": 2},
    "causal/falcon": {"num_hidden_layers": 2},
    "masked/mobilebert": {"num_hidden_layers": 2},
    "causal/afmoe": {"num_hidden_layers": 2, "num_dense_layers": 2, "layer_types": ["full_attention"] * 2},
    "causal/qwen3_next": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1]},
}


AGAINST_DENSE = ["gpt2", "gpt_neox", "gpt_bigcode", "gemma2", "falcon", "qwen3_next", "afmoe"]
