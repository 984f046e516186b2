"""What a training step costs after a rewrite, over one of the dense model; and with a teacher in the same step.

A Llama with gated feed-forwards, random weights, and a vocabulary small enough that its logits do not decide: forward, backward and
AdamW. The models take turns in every round; a ratio is the median over the rounds of a model's time over the dense model's in the
same round.

    python benchmarks/learning/step_cost.py --threads 1
    python benchmarks/learning/step_cost.py --threads 1 --specs "sparse-ffn(sparsity=8)" --rounds 15
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit

sys.path.insert(0, str(Path(__file__).parents[1]))
import side_by_side

SPECS = (
    "sparse-ffn(sparsity=8)",
    "sparse-ffn(sparsity=8, active=4)",
    "sparse-ffn(sparsity=8, active=4, controller=gate)",
    "sparse-ffn(sparsity=64)",
    "shared-moe(groups=1, k=1)",
    "shared-moe(groups=1, k=2)",
    "shared-moe(groups=0, k=2)",
    "sparse-qkv",
    "altup(k=2)",
    "sequence-altup(k=2)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps of rewritten models, over the dense model's.")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--units", type=int, default=1536, help="d_ff")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    side_by_side.add_options(parser, rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dense = dense_model(options).to(options.device)
    ids = torch.randint(options.vocabulary, (options.batch, options.length), device=options.device)
    steps = {"dense": training_step(dense, ids)}
    for spec in options.specs:
        steps[spec] = training_step(retrofit.apply(copy.deepcopy(dense), spec, verify=False), ids)
    print(f"d={options.width}, d_ff={options.units}, {options.layers} layers, {options.batch}×{options.length} tokens, ", end="")
    print(side_by_side.conditions(options))
    side_by_side.compare(steps, options)


def dense_model(options: argparse.Namespace) -> nn.Module:
    """A Llama of the given sizes."""
    sizes = {"hidden_size": options.width, "intermediate_size": options.units, "num_hidden_layers": options.layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=options.vocabulary, num_attention_heads=options.width // 64, **sizes))


def training_step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Forward, backward and an update of AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
