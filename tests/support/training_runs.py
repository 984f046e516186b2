"""Small models, texts and settings to train with, and runs that are cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from retrofit.training.settings import Settings

torch.set_num_threads(1)  # models this small are slower on several

TEXTS = ["".join(f"Line {number}: {number} squared is {number * number}.\n" for number in range(120))]
SMALL = Settings(steps=8, batch_size=2, length=32, lr=3e-3, eval_every=4, device="cpu")
LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, pad_token_id=0, **{**LAYERS, **more})).eval()


def bert(seed: int = 0, **more: Any) -> BertForMaskedLM:
    torch.manual_seed(seed)
    return BertForMaskedLM(BertConfig(vocab_size=300, **LAYERS, **more)).eval()


def t5(seed: int = 0) -> T5ForConditionalGeneration:
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {"next token": llama, "masked tokens": bert, "span corruption": t5}


def changed(settings: Settings = SMALL, **fields: Any) -> Settings:
    return Settings(**{**{name: getattr(settings, name) for name in Settings.__dataclass_fields__}, **fields})


class Unplugged(RuntimeError):
    """Raised in the middle of a run."""


def unplug_at(step: int) -> Callable[[str], None]:
    def progress(text: str) -> None:
        if text.startswith(f"step {step}/"):
            raise Unplugged

    return progress


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
