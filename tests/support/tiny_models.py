"""Small random models, one of each kind of transformer, whose every norm and bias is its own."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 61


def built(config: PretrainedConfig, kind: type[PreTrainedModel]) -> Any:
    """The model, with noise on every parameter, the constant ones too; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def gpt2(**options: Any) -> Any:
    """Decoder, tied head, learned positions."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    given = {"vocab_size": VOCABULARY, "initializer_range": 0.3, **sizes, **options}
    return built(transformers.GPT2Config(**given), transformers.GPT2LMHeadModel)


def llama(**options: Any) -> Any:
    """Decoder, untied head, rotary positions, grouped queries."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "initializer_range": 0.3, **sizes, **options}
    return built(transformers.LlamaConfig(**given), transformers.LlamaForCausalLM)


def bert(**options: Any) -> Any:
    """Encoder of text."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **sizes, **options}
    return built(transformers.BertConfig(**given), transformers.BertForMaskedLM)


def t5(**options: Any) -> Any:
    """Encoder and decoder, relative positions."""
    sizes = {"num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
    given = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, **sizes, **options}
    return built(transformers.T5Config(**given), transformers.T5ForConditionalGeneration)


def vit(**options: Any) -> Any:
    """Encoder of images."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    given = {"image_size": 8, "patch_size": 4, "num_labels": 5, **sizes, **options}
    return built(transformers.ViTConfig(**given), transformers.ViTForImageClassification)


class Plain(nn.Module):
    """A causal model of no library: ids in, logits out; its padding mask is ignored unless it is `honest`."""

    def __init__(self, honest: bool = True) -> None:
        super().__init__()
        self.honest = honest
        self.embedding = nn.Embedding(31, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head: Any = nn.Linear(8, 31)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        scores = self.query(x) @ self.key(x).mT + torch.full((ids.shape[1], ids.shape[1]), -1e9).triu(1)
        if self.honest and attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None].to(scores.dtype)) * -1e9
        logits: torch.Tensor = self.head(x + scores.softmax(-1) @ self.value(x))
        return logits
