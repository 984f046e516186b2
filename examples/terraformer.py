"""Terraformer out of dense models: the recipes in terraformer.txt and terraformer_t5.txt, on a small Llama and a small T5.

    python examples/terraformer.py      # some two minutes

Both models learn the documentation of Python for a moment, the T5 as the continuation of a piece of it. Then each is rewritten by
its recipe, fitted to some of that text and checked, learns for as long again, and writes a few tokens, with its cache and without.
The sizes in the recipes are the paper's, for models that are eight times as wide: here they cost more than they do there.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import retrofit

RECIPES = Path(__file__).parent
VOCABULARY, LENGTH, BATCH, STEPS = 256, 96, 4, 40  # bytes; longer than a chunk of lsh-attention
CALIBRATION, PROMPT, WRITTEN = 16, 24, 24  # windows; tokens


def main(steps: int = STEPS) -> None:
    torch.manual_seed(0)
    for name, model in (("terraformer.txt", small_llama()), ("terraformer_t5.txt", small_t5())):
        recipe = retrofit.read_recipe(RECIPES / name)
        print(f"{name}: {' > '.join(one.name for one in recipe)}")
        dense = sum(parameter.numel() for parameter in model.parameters())
        train(model, steps)
        before = held_out_loss(model)
        fitted = windows(CALIBRATION, seed=1)
        model = retrofit.apply(model, *recipe, calibration=fitted)  # verified, or else left as it was
        print(f"parameters   {dense:,} → {sum(parameter.numel() for parameter in model.parameters()):,}")
        start = held_out_loss(model)
        train(model, steps)
        print(f"loss         dense {before:.3f}, rewritten {start:.3f}, after {steps} steps {held_out_loss(model):.3f}")
        print(f"writes       {written(model)}\n")


def small_llama() -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes)).eval()


def small_t5() -> Any:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=False, **sizes)
    return T5ForConditionalGeneration(config).eval()


@functools.cache
def text() -> Tensor:
    """All of it as bytes."""
    return torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


def windows(count: int, seed: int, held_out: bool = False) -> Tensor:
    """Pieces of the text: (count, LENGTH)."""
    border = len(text()) * 9 // 10
    part = text()[border:] if held_out else text()[:border]
    first = torch.randint(len(part) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(seed))
    return part[first + torch.arange(LENGTH)]


def loss(model: Any, ids: Tensor) -> Tensor:
    """The model's own loss: of each next byte; of a T5, of what follows a prompt, which its encoder reads."""
    prompt, rest = ids[:, :PROMPT], ids[:, PROMPT:].contiguous()
    given = {"input_ids": prompt, "labels": rest} if model.config.is_encoder_decoder else {"input_ids": ids, "labels": ids}
    found: Tensor = model(**given).loss
    return found


def train(model: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, windows(BATCH, seed=100 + step)).backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def held_out_loss(model: Any) -> float:
    return float(loss(model, windows(16, seed=2, held_out=True)))


@torch.no_grad()
def written(model: Any) -> str:
    """What the model writes, and whether its cache changes that."""
    prompt = windows(1, seed=3, held_out=True)[:, :PROMPT]
    how = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN, "do_sample": False, "pad_token_id": 0}
    cached, uncached = (model.generate(prompt, use_cache=cache, **how)[0, -WRITTEN:].tolist() for cache in (True, False))
    said = "the same tokens with and without its cache" if cached == uncached else "OTHER TOKENS without its cache"
    return f"{bytes(cached).decode(errors='replace')!r}, {said}"


if __name__ == "__main__":
    main()
