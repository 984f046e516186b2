"""Whether a retrofit with AltUp ends ahead of the dense model, trained on for the same time or the same FLOPs.

Byte-level Llamas of two sizes are trained once, rewritten by each setting of AltUp, and trained on for the same steps; the dense
model is trained on for as many steps and for more, each time with a schedule of its own. What a step costs over a dense one is
counted (FLOPs) and measured (time; `--costs`, on an idle machine); between the dense runs its loss at that cost is interpolated.
Every run is kept in the JSON file; the next call goes on from there.

    python benchmarks/learning/altup_pays.py -o altup_pays.json --costs
    python benchmarks/learning/altup_pays.py -o altup_pays.json --seeds 3
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from pathlib import Path

import torch
from experiment import (
    BATCH,
    LENGTH,
    SIZES,
    Kept,
    held_out_losses,
    mean_and_deviation,
    rewritten,
    run_settings,
    trained_on,
    with_error,
)
from step_cost import training_step

import retrofit
from retrofit.program.cost import flops_per_token

sys.path.insert(0, str(Path(__file__).parents[1]))
import side_by_side

SPECS = (
    "altup(k=2)",
    "altup(k=4)",
    "altup(k=2, init=lockstep)",
    "altup(k=2, coefficients=dynamic)",
    "altup(k=2, embedding=recycled)",
    "altup(k=4, embedding=recycled)",
)
LONGER = (1.0, 1.25, 1.5)  # times the steps for which the dense model is trained on
RATES = (1, 10)  # of what is new, times the rate of the rest


def main() -> None:
    parser = argparse.ArgumentParser(description="AltUp against the dense model at equal cost.")
    parser.add_argument("-o", "--output", type=Path, default=Path("altup_pays.json"))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--specs", nargs="+", default=SPECS, choices=SPECS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--costs", action="store_true", help="only measure what a step costs")
    side_by_side.add_options(parser, rounds=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.output, options.minutes)
    for size in options.sizes:
        kept.measure(f"{size} | FLOPs", functools.partial(flops, size))
        if options.costs:
            kept.measure(f"{size} | time", functools.partial(times, size, options))
    for seed, size in itertools.product(range(1, 1 if options.costs else options.seeds + 1), options.sizes):
        for longer in LONGER:
            steps = round(longer * options.steps)
            kept.measure(key_of(size, "", 1, steps, seed, options), functools.partial(losses, size, "", 1, steps, seed, options))
        for spec, rate in itertools.product(options.specs, RATES):
            key = key_of(size, spec, rate, options.steps, seed, options)
            kept.measure(key, functools.partial(losses, size, spec, rate, options.steps, seed, options))
    for size in options.sizes:
        print(f"\n{size}: {SIZES[size]}\n{table(size, kept, options)}")


def key_of(size: str, spec: str, rate: int, steps: int, seed: int, options: argparse.Namespace) -> str:
    return f"{size} | {spec or 'dense'} | new ×{rate} | {steps} steps at {options.lr:g} | seed {seed}"


def losses(size: str, spec: str, rate: int, steps: int, seed: int, options: argparse.Namespace) -> list[float]:
    """The held-out losses before any step and on the way."""
    model = rewritten(SIZES[size].trained(options.output.parent), spec, seed)
    own = {"lr_new": rate * options.lr} if spec else {}
    return held_out_losses(trained_on(model, run_settings(steps, options.lr, seed, **own)))


def flops(size: str) -> dict[str, float]:
    """Of a token after each spec, over the dense model's."""
    dense = SIZES[size].untrained()
    counts = {spec: flops_per_token(retrofit.inspect(rewritten(dense, spec) if spec else dense).program) for spec in ("", *SPECS)}
    return {spec: counts[spec] / counts[""] for spec in SPECS}


def times(size: str, options: argparse.Namespace) -> dict[str, float]:
    """Of a training step after each spec, over the dense model's: medians over rounds in which they take turns."""
    dense = SIZES[size].untrained()
    ids = torch.randint(256, (BATCH, LENGTH))
    models = {"dense": dense, **{spec: rewritten(dense, spec) for spec in SPECS}}
    seconds = side_by_side.interleaved({name: training_step(one, ids) for name, one in models.items()}, options)
    return {
        spec: statistics.median(mine / theirs for mine, theirs in zip(seconds[spec], seconds["dense"], strict=True))
        for spec in SPECS
    }


def table(size: str, kept: Kept, options: argparse.Namespace) -> str:
    """A row for each spec and rate: its loss, and how far it is ahead of the dense model at equal steps, FLOPs and time."""
    lines = [
        "| | rate of what is new | after all steps | ahead at equal steps | at equal FLOPs | at equal time |",
        "| --- " * 6 + "|",
    ]
    curves = dense_curves(size, kept, options)
    for longer in LONGER:
        ends = [curve[longer] for curve in curves.values() if longer in curve]
        lines.append(f"| dense, {longer:g} × the steps | | {mean_and_deviation(ends)} | | | |")
    for spec in options.specs:
        for rate in RATES:
            ends = {}
            for seed in range(1, options.seeds + 1):
                run = kept.values.get(key_of(size, spec, rate, options.steps, seed, options))
                if run is not None and len(curves.get(seed, {})) == len(LONGER):
                    ends[seed] = run[-1]
            cells = [ahead(ends, curves, 1.0)]
            for what in ("FLOPs", "time"):
                ratios = kept.values.get(f"{size} | {what}")
                cells.append("not measured" if ratios is None else f"{ahead(ends, curves, ratios[spec])} (×{ratios[spec]:.3f})")
            lines.append(f"| `{spec}` | ×{rate} | {mean_and_deviation(list(ends.values()))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def dense_curves(size: str, kept: Kept, options: argparse.Namespace) -> dict[int, dict[float, float]]:
    """By seed: the loss of the dense model after so many times the steps."""
    curves: dict[int, dict[float, float]] = {}
    for seed, longer in itertools.product(range(1, options.seeds + 1), LONGER):
        run = kept.values.get(key_of(size, "", 1, round(longer * options.steps), seed, options))
        if run is not None:
            curves.setdefault(seed, {})[longer] = run[-1]
    return curves


def ahead(ends: dict[int, float], curves: dict[int, dict[float, float]], cost: float) -> str:
    """How much lower the losses are than the dense model's for that many times the steps: mean and standard error over seeds."""
    return with_error([interpolated(curves[seed], cost) - end for seed, end in ends.items()]) or "not run"


def interpolated(curve: dict[float, float], cost: float) -> float:
    """The dense loss at that many times the steps, linear between the runs, and beyond the last as between the last two."""
    places = sorted(curve)
    right = next((at for at in range(1, len(places)) if cost <= places[at]), len(places) - 1)
    low, high = places[right - 1], places[right]
    return curve[low] + (curve[high] - curve[low]) * (cost - low) / (high - low)


if __name__ == "__main__":
    main()
