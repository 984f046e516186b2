"""Decoding one token: the dense output head against the multiplicative one, for several numbers of modules.

    python benchmarks/sparse_loss.py --threads 1

V = 32,768, d = 1024, float32. Dense heads take turns, so that each is read from memory; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from retrofit.passes.sparse_loss import MultiplicativeHead

VOCABULARY, WIDTH, COPIES = 32_768, 1024, 4  # four dense heads of 128 MiB are larger than the caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dense = [nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(COPIES)]
    like = dense[0].weight
    sparse = {
        modules: [MultiplicativeHead(WIDTH, VOCABULARY, modules, None, like) for _ in range(COPIES)]
        for modules in (4, 8, 16, 32, 64)
    }
    x = torch.randn(1, 1, WIDTH)
    ratios: dict[int, list[float]] = {modules: [] for modules in sparse}
    times: dict[int, list[float]] = {modules: [] for modules in (0, *sparse)}
    for index in range(options.rounds):
        whole = seconds(dense[index % COPIES], x)
        times[0].append(whole)
        for modules, heads in sparse.items():
            part = seconds(heads[index % COPIES], x)
            times[modules].append(part)
            ratios[modules].append(whole / part)
    print(f"one token, V={VOCABULARY:,}, d={WIDTH}, float32, {options.threads} thread(s), torch {torch.__version__}\n")
    print(f"  {'head':<14}{'ms':>8}{'parameters':>14}{'faster':>9}")
    print(f"  {'dense':<14}{1000 * statistics.median(times[0]):>8.2f}{like.numel():>14,}{1:>8.1f}×")
    for modules, heads in sparse.items():
        count = sum(parameter.numel() for parameter in heads[0].parameters())
        label = f"S={modules}"
        print(
            f"  {label:<14}{1000 * statistics.median(times[modules]):>8.2f}{count:>14,}{statistics.median(ratios[modules]):>8.1f}×"
        )


@torch.inference_mode()
def seconds(head: nn.Module, x: Tensor) -> float:
    start = time.perf_counter()
    head(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
