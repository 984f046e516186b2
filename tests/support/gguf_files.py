"""Tiny models as GGUF files, written tensor by tensor as llama.cpp's own converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch

BYTES = 256
MERGED = "th"
SPECIAL = ("<|endoftext|>", "<s>", "</s>")


def tokens() -> list[str]:
    """GPT-2's spelling of the bytes, printable ones as themselves, the others as letters from 256 on; one merged pair; specials."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)] + [MERGED, *SPECIAL]


def rotary_order(weight: Any, heads: int) -> Any:
    """The rows of a query or key projection as ggml's rotation pairs them: the halves of every head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def writer_of(path: Path, architecture: str, config: Any) -> Any:
    """A writer of the file `path` that says the sizes of a model with this config."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    return writer


def written(writer: Any, path: Path) -> Path:
    """The file is there, whole; its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    vocabulary: bool = True,
    more: dict[str, int | float | str] | None = None,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """A `LlamaForCausalLM` is the GGUF file `path`, its matrices of ggml's type `kind`, its norms in float32."""
    import gguf

    config = model.config
    writer = writer_of(path, "llama", config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    for key, value in (more or {}).items():
        add: Any = {int: writer.add_uint16, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for place, values in (tensors or {}).items():
        writer.add_tensor(place, numpy.asarray(values, dtype="float32"))
    if vocabulary:
        words = tokens()
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(words)
        writer.add_token_types([gguf.TokenType.CONTROL if word in SPECIAL else gguf.TokenType.NORMAL for word in words])
        writer.add_token_merges([" ".join(MERGED)])
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        projection = name.split(".")[-2]
        values = rotary_order(values, heads[projection]) if projection in heads else values
        type_ = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        place = names.get_name(name, try_suffixes=(".weight",))
        if type_.name in ("F32", "F16"):
            writer.add_tensor(place, numpy.ascontiguousarray(values, dtype=type_.name.replace("F", "float")))
        else:
            writer.add_tensor(place, gguf.quantize(values, type_), raw_dtype=type_)
    return written(writer, path)


def write_settings(
    path: Path, architecture: str, model: Any, settings: dict[str, int | float], *, norms_from_one: bool = False
) -> Path:
    """A model whose matrices the converter takes as they are is the GGUF file `path`, its metadata `settings`."""
    import gguf

    config = model.config
    writer = writer_of(path, architecture, config)
    writer.add_token_list([f"{number}" for number in range(config.vocab_size)])
    writer.add_pad_token_id(0)
    for key, value in settings.items():
        add: Any = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names: Any = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(place, tensor.numpy() + (1 if norms_from_one and place.endswith("norm.weight") else 0))
    return written(writer, path)


def tiny_llama(*, tied: bool = False) -> Any:
    """Two layers whose rows are whole blocks of every ggml type that packs 32 numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    words = tokens()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2,
        bos_token_id=words.index("<s>"), eos_token_id=words.index("</s>"),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
