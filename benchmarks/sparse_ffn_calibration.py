"""What calibration is worth to the sparse feed-forward: the energy it keeps, the KL at its start, the loss after training on.

A dense byte-level model is trained once; then it is made sparse with calibration, from its weights alone, and naively: with a
controller of noise, as a model that is trained from zero has it. All are trained on, for the same steps on the same windows in the
same order. Prints held-out figures.

    python benchmarks/sparse_ffn_calibration.py --sparsity 8 --steps 200
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.passes import SparseFFN
from retrofit.passes.sparse_ffn import controller_fit
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.rewriting import apply_reported
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings
from retrofit.training.windows import is_held_out


def main() -> None:
    parser = argparse.ArgumentParser(description="A sparse feed-forward's start with calibration and without.")
    parser.add_argument("--sparsity", type=int, nargs="+", default=[8])
    parser.add_argument("--dense-steps", type=int, default=500, help="steps of the dense model before")
    parser.add_argument("--steps", type=int, default=200, help="steps from each start")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4])
    parser.add_argument("--spread", type=float, default=controller_fit.SPREAD, help="of the logits in a block at the start")
    parser.add_argument("--shrinkage", type=float, default=controller_fit.SHRINKAGE, help="of the covariance of x in the fit")
    options = parser.parse_args()
    controller_fit.SPREAD, controller_fit.SHRINKAGE = options.spread, options.shrinkage
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    dense = LlamaForCausalLM(byte_llama(options.width, options.layers)).eval()
    run = continue_pretraining(dense, texts, settings(options, options.dense_steps, 2e-3, 0))
    print(f"dense: {run.parameters:,} parameters, held-out loss {run.eval_losses[-1][1]:.4f} after {options.dense_steps} steps")
    windows = windows_of(texts, codec_for(dense), options.length)
    held_out = is_held_out(windows, Settings(1).eval_fraction)
    seen, held = windows[~held_out], windows[held_out][:64].long()
    for n, start in itertools.product(options.sparsity, ("naive", "from the weights", "calibrated")):
        model = copy.deepcopy(dense)
        data = seen[:: max(1, len(seen) // 64)][:64] if start == "calibrated" else None
        applied = apply_reported(model, SparseFFN(sparsity=n), calibration=data, verify=False, count_flops=False)
        if start == "naive":
            for module in model.modules():
                if isinstance(module, SparseFeedForward):
                    randomize(module)
        print(f"\nN = {n}, {start}: KL {divergence(model, dense, held):.4f} nats a token")
        print("".join(f"{note}\n" for note in applied.rewrites[0].notes if "energy" in note and start == "calibrated"), end="")
        for lr, seed in itertools.product(options.lr, range(1, options.seeds + 1)):
            torch.manual_seed(seed)
            given = dataclasses.replace(settings(options, options.steps, lr, seed), lr_new=lr)
            run = continue_pretraining(copy.deepcopy(model), texts, given)
            losses = ", ".join(f"{loss:.4f} after {step}" for step, loss in run.eval_losses)
            print(f"lr {lr:g}, seed {seed}: held-out loss {losses} steps", flush=True)


@torch.no_grad()
def randomize(block: SparseFeedForward) -> None:
    """The controller is noise under which its logits have the variance of the input."""
    block.c1.normal_(std=len(block.c1) ** -0.5)
    block.c2.normal_(std=len(block.c2) ** -0.5)
    block.bias.zero_()


def byte_llama(width: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def settings(options: argparse.Namespace, steps: int, lr: float, seed: int) -> Settings:
    every = -(-steps // 2)
    return Settings(steps, batch_size=8, length=options.length, lr=lr, seed=seed, schedule="cosine", eval_every=every, device="cpu")


@torch.no_grad()
def divergence(model: nn.Module, dense: nn.Module, windows: Tensor) -> float:
    """The mean KL divergence from the dense model's predictions, in nats a token."""
    ours, theirs = (one.eval()(windows).logits.log_softmax(-1) for one in (model, dense))
    return float(nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean())


if __name__ == "__main__":
    main()
