"""A rewrite that needs no analysis: everything that saving and loading must support, in its smallest form.

Every layer is wrapped, so its weights have new names, next to new parameters (one frozen) and buffers (one not saved); the token
embedding has moved into a wider one, so a tied head is tied to another name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

RECIPE = ("standin(k=2)",)
HEADED = ("standin(k=2, headed=true)",)  # also rewrites the norm before a head, where there is one


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        first = next(layer.parameters())
        like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self.layer = layer
        self.p = nn.Parameter(torch.empty(2, 2, **like))
        self.g = nn.Parameter(torch.empty(2, **like))
        self.plane = nn.Parameter(torch.empty(3, **like), requires_grad=False)
        self.register_buffer("offset", torch.empty(1, **like))
        self.register_buffer("ramp", torch.empty(4, **like), persistent=False)
        self.rebuild_buffers()

    def rebuild_buffers(self) -> None:
        self.ramp.copy_(torch.arange(4.0) / 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(x, *args, **kwargs)
        scale = 1 + self.p.sum() + self.g.sum() + self.plane.sum() + self.offset + self.ramp.sum()
        return out * scale if isinstance(out, torch.Tensor) else (out[0] * scale, *out[1:])


class WideEmbedding(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.delta = nn.Parameter(torch.empty_like(embedding.weight))

    @property
    def weight(self) -> nn.Parameter:
        return self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) + nn.functional.embedding(ids, self.delta)


def replay(
    model: nn.Module, specs: Sequence[str], record: object = None, *, same_model: bool = True, program: object = None
) -> None:
    assert tuple(specs) in ((), RECIPE, HEADED)
    if not specs:
        return
    if tuple(specs) == HEADED and model.get_output_embeddings() is not None:
        model.base_model.norm = Wrapped(model.base_model.norm)
    table = model.get_input_embeddings()
    places = [(owner, name, child) for owner in model.modules() for name, child in owner._modules.items()]
    for owner, name, child in places:
        if isinstance(owner, nn.ModuleList) and child._modules and any(True for _ in child.parameters()):
            owner._modules[name] = Wrapped(child)
    if isinstance(table, nn.Embedding):
        wide = WideEmbedding(table)
        for owner, name, child in places:
            if child is table:
                owner._modules[name] = wide


def rewritten(model: nn.Module, recipe: Sequence[str] = RECIPE) -> nn.Module:
    """The model, replayed in place, its new parameters and buffers drawn at random."""
    replay(model, recipe)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Wrapped):
                for tensor in (module.p, module.g, module.plane, module.offset):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) / 16)
            elif isinstance(module, WideEmbedding):
                module.delta.copy_(torch.randn(module.delta.shape, generator=generator))
    return model


def tiny(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny dense model in eval mode and inputs for it."""
    torch.manual_seed(0)
    ids = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 32]])
    small = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    llama = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    bert = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vit = {**bert, "image_size": 8, "patch_size": 4}
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **llama)),
        "llama-tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **llama, tie_word_embeddings=True)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **gpt2)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**small, **t5)),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**small, **bert)),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**small, **llama, num_local_experts=4, sliding_window=None)
        ),
        "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**vit)),
    }
    model = made[name]().eval()
    if name == "vit":
        return model, {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)}
    return model, {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}


def outputs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return copy.copy(model(**inputs)[0])
