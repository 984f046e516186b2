"""Which noise a controller trains best with: that of the paper's text, or that of its published code.

`sparse-ffn(sparsity=8)` on the demo's byte-level Llama, trained plainly: noise=both is the text of Sparse is
Enough in Scaling Transformers (§3.1), noise=choice what its code does. Every run is kept in the JSON file; the next call goes on
from there. Prints the held-out losses over the steps, mean and standard deviation over the seeds, next to the dense model's.

    python benchmarks/learning/controller_noise.py -o controller_noise.json --seeds 3
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
from experiment import DenseModel, Kept, mean_and_deviation, rewritten, run_settings, trained_on

SPECS = ("", "sparse-ffn(sparsity=8, noise=both)", "sparse-ffn(sparsity=8, noise=choice)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which noise a controller trains best with.")
    parser.add_argument("-o", "--output", type=Path, default=Path("controller_noise.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.output)
    seeds = range(1, options.seeds + 1)
    for seed in seeds:
        for spec in SPECS:
            kept.measure(key_of(spec, seed, options), functools.partial(losses, spec, seed, options))
    for spec in SPECS:
        print(spec or "dense")
        for points in zip(*(kept.values[key_of(spec, seed, options)] for seed in seeds), strict=True):
            print(f"  {points[0][0]:5d} {mean_and_deviation([loss for _, loss in points])}")


def key_of(spec: str, seed: int, options: argparse.Namespace) -> str:
    return f"{spec or 'dense'}, seed {seed}, {options.steps} steps at {options.lr:g}"


def losses(spec: str, seed: int, options: argparse.Namespace) -> list[list[float]]:
    """The held-out losses by step."""
    model = rewritten(DenseModel().trained(options.output.parent), spec, seed)
    run = trained_on(model, run_settings(options.steps, options.lr, seed))
    return [[step, loss] for step, loss in run.eval_losses]


if __name__ == "__main__":
    main()
