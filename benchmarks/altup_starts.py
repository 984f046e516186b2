"""Which exact start of AltUp trains better: blocks in lockstep or a hopping stream, a wide embedding or a recycled one.

A dense byte-level model is trained once; then it and its rewrites are trained on, each for the same steps on the same windows in
the same order, for every seed. Prints held-out losses.

    python benchmarks/altup_starts.py --steps 250 --seeds 2
"""

from __future__ import annotations

import argparse
import copy
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings

STARTS = (
    "dense",
    "altup(init=lockstep, embedding=wide)",
    "altup(init=hop, embedding=wide)",
    "altup(init=lockstep, embedding=recycled)",
    "altup(init=hop, embedding=recycled)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out losses of AltUp's exact starts.")
    parser.add_argument("--steps", type=int, default=250, help="steps from each start")
    parser.add_argument("--dense-steps", type=int, default=400, help="steps of the dense model before")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--untied", action="store_true", help="a head of its own (default: tied to the embedding)")
    parser.add_argument("--only", nargs="+", default=STARTS, help="the starts to try")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    dense = LlamaForCausalLM(byte_llama(options.width, options.layers, tied=not options.untied)).eval()
    run = continue_pretraining(dense, texts, settings(options.dense_steps, 2e-3, 0))
    print(f"dense: {run.parameters:,} parameters, held-out loss {run.eval_losses[-1][1]:.4f} after {options.dense_steps} steps\n")
    print(f"{'start':<44} {'lr':>7} {'seed':>4} {'parameters':>11}  {'before':>7} {'halfway':>7} {'after':>7}")
    for start in options.only:
        for lr in options.lr:
            for seed in range(1, options.seeds + 1):
                torch.manual_seed(seed)
                model = copy.deepcopy(dense)
                if start != "dense":
                    retrofit.apply(model, start, verify=False)
                new = None if start == "dense" else lr
                run = continue_pretraining(model, texts, settings(options.steps, lr, seed, new))
                losses = "".join(f" {loss:7.4f}" for _, loss in run.eval_losses)
                print(f"{start:<44} {lr:>7g} {seed:>4} {run.parameters:>11,} {losses}", flush=True)


def byte_llama(width: int, layers: int, *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def settings(steps: int, lr: float, seed: int, lr_new: float | None = None) -> Settings:
    every = -(-steps // 2)
    return Settings(steps, 8, 128, lr=lr, lr_new=lr_new, seed=seed, schedule="cosine", eval_every=every, device="cpu")


if __name__ == "__main__":
    main()
