"""The pictures of the passes' pages: a small model after each pass, drawn by the project itself.

python docs/pictures/draw.py               # all of them, some minutes
python docs/pictures/draw.py sum altup     # some of them
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import retrofit
from retrofit.drawing.picture import svg
from retrofit.passbase.protocol import as_pass

SPECS = {
    "activation_sparsity": "activation-sparsity",
    "altup": "altup(k=2)",
    "sum": "sum",
    "memory": "memory",
    "recurrence": "recurrence",
    "reversible": "reversible",
    "lsh_attention": "lsh-attention",
    "merge_cross_attention": "merge-cross-attention",
    "sequence_altup": "sequence-altup(k=2, layers=1-2)",
    "shared_moe": "shared-moe(experts=4)",
    "sparse_ffn": "sparse-ffn(sparsity=8)",
    "sparse_qkv": "sparse-qkv",
    "sparse_loss": "sparse-loss",
}


def small_model(name: str) -> PreTrainedModel:
    """Four layers of a Llama; for the attention between two stacks two layers of a T5 each."""
    torch.manual_seed(0)
    if name == "merge_cross_attention":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=1000, **sizes)).eval()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)).eval()


def draw(name: str) -> str:
    """The picture of page `name`."""
    data = torch.randint(0, 1000, (8, 64)) if as_pass(SPECS[name]).needs_calibration else None
    return svg(retrofit.inspect(retrofit.apply(small_model(name), SPECS[name], calibration=data, verify=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="pages (default: all)")
    for name in parser.parse_args().names or SPECS:
        file = Path(__file__).with_name(f"{name}.svg")
        file.write_text(draw(name), encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
