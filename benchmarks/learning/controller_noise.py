"""Which noise a controller trains best with: that of the paper's text, or that of its published code.

`sparse-ffn(sparsity=8)` on the demo's byte-level Llama, as in recovery.py, trained plainly: noise=both is the text of Sparse is
Enough in Scaling Transformers (§3.1), noise=choice what its code does. Every run is kept in the JSON file; the next call goes on
from there. Prints the held-out losses over the steps, mean and standard deviation over the seeds, next to the dense model's.

    python benchmarks/learning/controller_noise.py -o controller_noise.json --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from recovery import DENSE, one_run, trained_once

SPECS = (DENSE, "sparse-ffn(sparsity=8, noise=both)", "sparse-ffn(sparsity=8, noise=choice)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which noise a controller trains best with.")
    parser.add_argument("-o", "--output", type=Path, default=Path("controller_noise.json"))
    parser.add_argument("--model", type=Path, default=Path("recovery.pt"), help="the dense model, trained where there is none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    dense = trained_once(options.model, texts)
    runs: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    for seed in range(1, options.seeds + 1):
        for spec in options.specs:
            key = f"{spec}, seed {seed}, {options.steps} steps at {options.lr:g}"
            if key not in runs:
                runs[key] = one_run(dense, spec, {}, seed, options, texts)["eval_losses"]
                options.output.write_text(json.dumps(runs, indent=1))
                print(f"{key}: {runs[key][-1][1]:.4f}", flush=True)
    for spec in options.specs:
        found = [runs[f"{spec}, seed {seed}, {options.steps} steps at {options.lr:g}"] for seed in range(1, options.seeds + 1)]
        print(spec)
        for points in zip(*found, strict=True):
            losses = [loss for _, loss in points]
            deviation = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
            print(f"  {points[0][0]:5d} {statistics.mean(losses):.4f}{deviation}")


if __name__ == "__main__":
    main()
