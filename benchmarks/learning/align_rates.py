"""How far `align` alone brings the sites of a rewritten model, by its learning rate.

A dense model is rewritten by each pass with calibration; then its sites learn from the dense ones, and nothing else is trained.
Prints the error of the sites on held-out windows and the model's loss, before and after.

    python benchmarks/learning/align_rates.py --model converged --rates 1e-3 4e-3 1.6e-2
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from experiment import BATCH, HELD_OUT, LENGTH, rewritten, trained_on
from recovery import MODELS, SPECS

from retrofit.training.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(description="The steps of align, by their learning rate.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the dense model is kept")
    parser.add_argument("--model", choices=list(MODELS), default="converged")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3, 1.6e-2])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = MODELS[options.model]
    dense = start.trained(options.folder)
    print("| pass | rate | error before | after | loss before | after |\n" + "| --- " * 6 + "|")
    for spec in options.specs:
        model = rewritten(dense, spec, 1, tokenizer=start.tokenizer)
        for rate in options.rates:
            settings = Settings(
                1, BATCH, LENGTH, lr=0.0, eval_fraction=HELD_OUT, seed=1, align=options.steps, align_lr=rate, anneal=0, distil=0.0
            )
            run = trained_on(copy.deepcopy(model), settings, dense, start.tokenizer)
            errors, losses = [error for _, error in run.alignment], [loss for _, loss in run.eval_losses]
            numbers = f"{errors[0]:.4f} | {errors[-1]:.4f} | {run.start_loss:.3f} | {losses[-1]:.3f}"
            print(f"| `{spec}` | {rate:g} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
