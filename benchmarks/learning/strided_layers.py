"""Which layers of a decoder bear a stride: the held-out loss before any training, by layer, by stride and by which end is strided.

The demo's byte-level Llama (2.8 million parameters, six layers), trained once, with and without calibration: one layer at a time,
the last n layers, the first n but the very first. With `--steps` a few choices are trained on, plainly and with a teacher. Every
figure is kept in the JSON file; the next call goes on from there.

    python benchmarks/learning/strided_layers.py -o strided_layers.json
    python benchmarks/learning/strided_layers.py -o strided_layers.json --steps 250 --seeds 3
    PYTHONPATH=tests python benchmarks/learning/strided_layers.py -o strided_layers.json --smollm2   # layers 1 and 2 of SmolLM2
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from experiment import HELD_OUT, LENGTH, TEXTS, DenseModel, Kept, mean_and_deviation, rewritten, run_settings, trained_on
from torch import Tensor, nn

import retrofit
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.training.windows import is_held_out

STRIDES = (2, 4)
SMOLLM2_SPEC = "sequence-altup(k=2, layers=1-2)"
TRAINED = ("0-5", "1-4", "1-2", "4-5")  # choices of layers that --steps trains, k = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Which layers of a decoder bear a stride.")
    parser.add_argument("-o", "--output", type=Path, default=Path("strided_layers.json"))
    parser.add_argument("--steps", type=int, default=0, help="train so long, too")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--smollm2", action="store_true", help="only layers 1 and 2 of SmolLM2, k = 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.output)
    if options.smollm2:
        measure_smollm2(kept)
        return
    dense = DenseModel().trained(options.output.parent)
    windows = windows_of(TEXTS, codec_for(dense), LENGTH)
    held_out = windows[is_held_out(windows, HELD_OUT)].long()
    layers = len(list(retrofit.inspect(dense).layers))
    kept.measure("dense", lambda: loss(dense, held_out))
    for k in STRIDES:
        for chosen in choices(layers):
            for calibrated in (False, True):
                spec = f"sequence-altup(k={k}, layers={chosen})"
                key = f"{spec}{', calibrated' if calibrated else ''}"
                kept.measure(key, functools.partial(start, dense, spec, calibrated, held_out))
    for seed in range(1, options.seeds + 1 if options.steps else 1):
        for chosen in TRAINED:
            for teacher in (False, True):
                kept.measure(
                    key_of(chosen, teacher, seed, options), functools.partial(trained, dense, chosen, options, seed, teacher)
                )
    print(table(kept.values, layers, options))


def measure_smollm2(kept: Kept) -> None:
    """The losses of SmolLM2 with layers 1 and 2 strided are kept, each in nats a token of its held-out text."""
    from support.real_models import REAL_MODELS

    real = REAL_MODELS["SmolLM2"]

    def strided(calibrated: bool) -> float:
        data = real.calibration() if calibrated else None
        return real.measure(retrofit.apply(real.load(), SMOLLM2_SPEC, calibration=data, verify=False))

    kept.measure("SmolLM2", lambda: real.measure(real.load()))
    kept.measure(f"SmolLM2, {SMOLLM2_SPEC}", lambda: strided(False))
    kept.measure(f"SmolLM2, {SMOLLM2_SPEC}, calibrated", lambda: strided(True))


def key_of(layers: str, teacher: bool, seed: int, options: argparse.Namespace) -> str:
    return f"k=2, layers={layers}{', teacher' if teacher else ''}, {options.steps} steps, seed {seed}"


def choices(layers: int) -> Iterator[str]:
    """Each layer alone, the last n, the first n without the very first."""
    yield from map(str, range(layers))
    yield from (f"{first}-{layers - 1}" for first in range(layers - 1))
    yield from (f"1-{last}" for last in range(2, layers - 1))


def start(dense: nn.Module, spec: str, calibrated: bool, held_out: Tensor) -> float:
    """The held-out loss of the rewritten model before any training."""
    return loss(rewritten(dense, spec, calibrated=calibrated), held_out)


@torch.no_grad()
def loss(model: Any, windows: Tensor) -> float:
    return statistics.mean(float(model(input_ids=part, labels=part).loss) for part in windows.split(1))


def trained(dense: nn.Module, layers: str, options: argparse.Namespace, seed: int, teacher: bool) -> float:
    """The held-out loss after training, plainly or by distillation."""
    model = rewritten(dense, f"sequence-altup(k=2, layers={layers})")
    return trained_on(model, run_settings(options.steps, options.lr, seed), dense if teacher else None).eval_losses[-1][1]


def table(values: dict[str, float], layers: int, options: argparse.Namespace) -> str:
    """The losses before training by layer and stride, and after."""
    lines = [f"dense: {values['dense']:.4f}", "", "| strided | " + " | ".join(f"k = {k}, calibrated" for k in STRIDES) + " |"]
    lines.append("| --- " * (1 + len(STRIDES)) + "|")
    for chosen in choices(layers):
        specs = [f"sequence-altup(k={k}, layers={chosen})" for k in STRIDES]
        lines.append(
            f"| {chosen} | " + " | ".join(f"{values[one]:.3f}, {values[f'{one}, calibrated']:.3f}" for one in specs) + " |"
        )
    for chosen in TRAINED if options.steps else ():
        for teacher in (False, True):
            found = [values[key_of(chosen, teacher, seed, options)] for seed in range(1, options.seeds + 1)]
            lines.append(f"layers={chosen}{', teacher' if teacher else ''}: {mean_and_deviation(found)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
