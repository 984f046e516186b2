"""Hashes of what a run depends on: the text, the model, the weights, the tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from retrofit.inputs.model_memory import value_of
from retrofit.passbase.tokenization import Codec

SAMPLES = 64  # values of a parameter that are hashed
UNRELATED = ("transformers_version", "dtype", "architectures")  # fields of a config that change nothing that is computed


def hash_windows(windows: torch.Tensor) -> str:
    return short_hash(windows.contiguous().numpy().tobytes())


def hash_example(example: Mapping[str, torch.Tensor]) -> str:
    """Of what a model reads and has to predict of a window."""
    digest = b"".join(name.encode() + example[name].long().contiguous().numpy().tobytes() for name in sorted(example))
    return short_hash(digest)


def hash_tokenizer(codec: Codec, tokenizer: Any = None) -> str:
    """Of every word of the tokenizer and its id, or how bytes become ids where there is no tokenizer."""
    words = [codec.name] if tokenizer is None else sorted(f"{word} {one}" for word, one in tokenizer.get_vocab().items())
    return short_hash(chr(10).join(words).encode(errors="surrogatepass"))


def hash_weights(model: nn.Module | None) -> str:
    """Return the architecture of a model and a hash of samples of its weights; "" for none."""
    if model is None:
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = value_of(model, name) if parameter.is_meta else parameter.detach()
        digest.update(value.flatten()[:: max(1, value.numel() // SAMPLES)].float().cpu().numpy().tobytes())
    return f"{hash_architecture(model)} {digest.hexdigest()[:16]}"


def hash_architecture(model: nn.Module) -> str:
    """Return the class of a model and a hash of its parameters' names and shapes."""
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    return f"{type(model).__name__} {short_hash(chr(10).join(shapes).encode())}"


def hash_trained(model: nn.Module) -> str:
    """Return how many parameters require a gradient, and a hash of their names."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return f"{len(names)} {short_hash(chr(10).join(names).encode())}"


def hash_settings(model: nn.Module) -> str:
    """Of what a model computes with besides its weights: their dtypes, its config, the kernel of its attention."""
    config = getattr(model, "config", None)
    given = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    kept = {name: value for name, value in given.items() if name[0] != "_" and name not in UNRELATED}
    kernel = getattr(config, "_attn_implementation", None)
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    return short_hash(f"{dtypes} {kernel} {sorted(kept.items(), key=lambda item: item[0])}".encode(errors="surrogatepass"))


def short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
