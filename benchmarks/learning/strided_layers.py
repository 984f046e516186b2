"""Which layers of a decoder bear a stride: the held-out loss before any training, by layer, by stride and by which end is strided.

The demo's byte-level Llama (2.8 million parameters, six layers), trained as in recovery.py and kept beside its results, with and
without calibration: one layer at a time, the last n layers, the first n but the very first. With `--steps` a few choices are
trained on, plainly and with a teacher. Every figure is kept in the JSON file; the next call goes on from there.

    python benchmarks/learning/strided_layers.py -o strided_layers.json
    python benchmarks/learning/strided_layers.py -o strided_layers.json --steps 250 --seeds 3
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from recovery import BATCH, CALIBRATED, HELD_OUT, LENGTH, POINTS, trained_once
from torch import Tensor, nn

import retrofit
from retrofit.pipeline.tokenization import codec_for, windows_of
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings
from retrofit.training.windows import hold_out

STRIDES = (2, 4)
TRAINED = ("0-5", "1-4", "1-2", "4-5")  # choices of layers that --steps trains, k = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Which layers of a decoder bear a stride.")
    parser.add_argument("-o", "--output", type=Path, default=Path("strided_layers.json"))
    parser.add_argument("--model", type=Path, default=Path("recovery.pt"), help="the dense model, trained where there is none")
    parser.add_argument("--steps", type=int, default=0, help="train so long, too")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    dense = trained_once(options.model, texts)
    results = Results(options.output)
    seen, held_out = (one.long() for one in hold_out(windows_of(texts, codec_for(dense), LENGTH), HELD_OUT))
    calibration = seen[:: max(1, len(seen) // CALIBRATED)][:CALIBRATED]
    layers = len(list(retrofit.inspect(dense).layers))
    results.measure("dense", lambda: loss(dense, held_out))
    for k in STRIDES:
        for chosen in choices(layers):
            for calibrated in (False, True):
                spec = f"sequence-altup(k={k}, layers={chosen})"
                key = f"{spec}{', calibrated' if calibrated else ''}"
                results.measure(key, lambda: start(dense, spec, calibration if calibrated else None, held_out))  # noqa: B023
    for seed in range(1, options.seeds + 1 if options.steps else 1):
        for chosen in TRAINED:
            for teacher in (False, True):
                key = f"k=2, layers={chosen}{', teacher' if teacher else ''}, {options.steps} steps, seed {seed}"
                results.measure(key, lambda: trained(dense, chosen, calibration, texts, options, seed, teacher))  # noqa: B023
    print(table(results.values, layers, options))


class Results:
    """Figures by name, each measured once and kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, key: str, action: Callable[[], float]) -> None:
        if key not in self.values:
            began = time.monotonic()
            self.values[key] = action()
            self.path.write_text(json.dumps(self.values, indent=1))
            print(f"{key}: {self.values[key]:.4f} ({time.monotonic() - began:.0f} s)", flush=True)


def choices(layers: int) -> Iterator[str]:
    """Each layer alone, the last n, the first n without the very first."""
    yield from map(str, range(layers))
    yield from (f"{first}-{layers - 1}" for first in range(layers - 1))
    yield from (f"1-{last}" for last in range(2, layers - 1))


def rewritten(dense: nn.Module, spec: str, calibration: Tensor | None) -> nn.Module:
    torch.manual_seed(0)
    return retrofit.apply(copy.deepcopy(dense), spec, calibration=calibration, verify=False)


def start(dense: nn.Module, spec: str, calibration: Tensor | None, held_out: Tensor) -> float:
    """The held-out loss of the rewritten model before any training."""
    return loss(rewritten(dense, spec, calibration), held_out)


@torch.no_grad()
def loss(model: Any, windows: Tensor) -> float:
    return statistics.mean(float(model(input_ids=part, labels=part).loss) for part in windows.split(1))


def trained(
    dense: nn.Module, layers: str, calibration: Tensor, texts: list[str], options: argparse.Namespace, seed: int, teacher: bool
) -> float:
    """The held-out loss after training, plainly or by distillation."""
    model = rewritten(dense, f"sequence-altup(k=2, layers={layers})", calibration)
    every = max(1, options.steps // POINTS)
    settings = Settings(options.steps, BATCH, LENGTH, lr=options.lr, eval_fraction=HELD_OUT, eval_every=every, seed=seed)
    return continue_pretraining(model, texts, settings, teacher=dense if teacher else None).eval_losses[-1][1]


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
        for way in ("", ", teacher"):
            keys = [f"k=2, layers={chosen}{way}, {options.steps} steps, seed {seed}" for seed in range(1, options.seeds + 1)]
            found = [values[key] for key in keys]
            deviation = f" ± {statistics.stdev(found):.4f}" if len(found) > 1 else ""
            lines.append(f"layers={chosen}{way}: {statistics.mean(found):.4f}{deviation}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
