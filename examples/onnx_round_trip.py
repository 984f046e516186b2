"""From torch to ONNX, to AltUp, to training, to ONNX: a model of which there is only the file.

    python examples/onnx_round_trip.py

A small Llama of random weights represents the model somebody has as `model.onnx`. It is imported as a graph whose weights are
parameters, is widened by `altup(k=2)` with every check, learns a sequence by heart, and is exported again for ONNX Runtime.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.passes import AltUp

STEPS = 60


def somebodys_file(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, tie_word_embeddings=False
    )
    retrofit.export_onnx(LlamaForCausalLM(config).eval(), path)
    return path


def inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
    }


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        dense = somebodys_file(Path(folder) / "model.onnx")
        model = retrofit.from_onnx(dense)
        print(retrofit.inspect(model))
        model = retrofit.apply(model, AltUp(k=2))

        text = torch.randint(128, (1, 24))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(STEPS):
            logits = model(**inputs(text))["logits"]
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
            if step in (0, STEPS - 1):
                print(f"step {step}: loss {loss:.4f}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        made = retrofit.export_onnx(model.eval(), Path(folder) / "trained.onnx")
        print(made)
        guess = OnnxSession(made.files[0].path)(inputs(text))["logits"].argmax(-1)
        print(f"ONNX Runtime says {int((guess[:, :-1] == text[:, 1:]).sum())} of {text.shape[1] - 1} tokens right")


if __name__ == "__main__":
    main()
