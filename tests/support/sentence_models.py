"""A tiny sentence-transformers model: a BERT, mean pooling, a dense layer with weights of its own, normalization."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

WORDS = "the a fox dog sleeps runs over under lazy quick house".split()
TEXTS = ["the quick fox runs", "a lazy dog sleeps under the house"]


def sentence_model(folder: Path) -> Any:
    """The model; what it is built from is in `folder`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    transformers.BertTokenizerFast({word: index for index, word in enumerate(words)}).save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(32), Dense(32, 16), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu").eval()


def saved_directory(folder: Path, *, nested: bool = False) -> Path:
    """The model as a directory; `nested`: the transformer in a folder of its own, as early versions had it."""
    path = folder / "sentences"
    sentence_model(folder / "bert").save(str(path))
    (path / "onnx").mkdir()
    (path / "onnx" / "model.onnx").write_bytes(b"the dense model in another format")
    if nested:
        (path / "0_Transformer").mkdir()
        names = ("config.json", "model.safetensors", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json")
        for name in names:
            shutil.move(path / name, path / "0_Transformer" / name)
        listed = path / "modules.json"
        listed.write_text(listed.read_text().replace('"path": ""', '"path": "0_Transformer"'))
    return path
