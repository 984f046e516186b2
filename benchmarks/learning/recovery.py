"""How fast a rewritten model gets its quality back, plainly and with a teacher, stage by stage.

A dense model is rewritten by each approximate pass with calibration, and trained on in several ways for the same number of tokens,
the steps of `align` among them: the same windows in the same order for one seed. The dense model is trained on the same tokens too.
With several `--steps` each way is a run of its own, with a schedule of its own, for each of these lengths.
`--model demo` is the demo's byte-level Llama (2.8 million parameters, 500 steps), `converged` the same one trained four times as
long, `fresh` one trained as long on half of the standard library's sources, where recovery sees the other half, which its teacher
has not, `SmolLM2` a real one. Every run is kept in the JSON file; the next call goes on from there, and from the last checkpoint of
a run that was killed. Prints held-out losses, mean and standard deviation over the seeds, and draws them.

    python benchmarks/learning/recovery.py -o recovery.json --model converged --seeds 3
    python benchmarks/learning/recovery.py -o recovery.json --model converged --seeds 3 --steps 125 250 --ways plain distil
    python benchmarks/learning/recovery.py -o recovery.json --model converged --seeds 3 --pictures docs/pictures
    python benchmarks/learning/recovery.py -o smol.json --model SmolLM2 --steps 293 --lr 1e-4 --bf16 --ways "align, distil"

`--specs` may also name files of models that were rewritten before, as `benchmarks/whole_model.py` leaves them (`.pt`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from experiment import DenseModel, Kept, SmolLM2, mean_and_deviation, rewritten, run_settings, trained_on, with_error
from seed_curves import draw_seed_curves
from texts import LIBRARY

from retrofit.training.runs import folder_of

SPECS = ("sparse-ffn(sparsity=8)", "sparse-qkv", "shared-moe(groups=1)", "sequence-altup(k=2)")
WAYS: dict[str, dict[str, float]] = {  # parts of all steps
    "plain": {},
    "align": {"align": 0.2, "distil": 0.0},
    "distil": {"distil": 0.5},
    "align, distil": {"align": 0.2, "distil": 0.5},
    "anneal, distil": {"anneal": 0.4, "distil": 0.5},
    "align, anneal, distil": {"align": 0.2, "anneal": 0.3, "distil": 0.5},
    "own dial, distil": {"anneal": 0.4, "distil": 0.5, "own_dial": 1.0},
    "distil, hidden": {"distil": 0.5, "hidden": 1.0},
    "teacher alone": {"distil": 1.0},
}
ONLY_NAMED = ("align", "own dial, distil", "distil, hidden", "teacher alone")  # ways that are tried where --ways names them
DENSE = ""
ALIGN_LR = 1e-3
CHECKPOINTS = 30  # of a run, at least 10 (the evaluations)
MODELS = {
    "demo": DenseModel(),
    "converged": DenseModel(steps=2000),
    "fresh": DenseModel(steps=2000, text=LIBRARY),
    "SmolLM2": SmolLM2(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery with a teacher and without.")
    parser.add_argument("-o", "--output", type=Path, default=Path("recovery.json"))
    parser.add_argument("--model", choices=list(MODELS), default="demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[250], help="of a run, those of align among them")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--align-lr", type=float, default=ALIGN_LR, help="of the steps of align")
    parser.add_argument("--lr-new", type=float, help="of parameters that the pass made; otherwise --lr")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--specs", nargs="+", default=SPECS, help="passes, or files of rewritten models")
    parser.add_argument("--ways", nargs="+", default=[way for way in WAYS if way not in ONLY_NAMED], choices=list(WAYS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--pictures", metavar="FOLDER", type=Path, help="run nothing; also draw the curves of each pass there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.output, 0.0 if options.pictures else options.minutes)
    for seed, steps, spec in itertools.product(range(1, options.seeds + 1), options.steps, (*options.specs, DENSE)):
        for way in ("plain",) if spec == DENSE else options.ways:
            key = key_of(spec, way, steps, seed, options)
            kept.measure(key, functools.partial(one_run, spec, way, steps, seed, options))
    print(table(kept.values, options))
    for spec in options.specs if options.pictures else ():
        draw(spec, kept.values, options)


def key_of(spec: str, way: str, steps: int, seed: int, options: argparse.Namespace) -> str:
    aligned = f", aligned at {options.align_lr:g}" if "align" in WAYS[way] and options.align_lr != ALIGN_LR else ""
    new = f", new at {options.lr_new:g}" if spec and options.lr_new else ""
    low = ", bfloat16" if options.bf16 else ""
    return f"{options.model} | {name_of(spec)} | {way} | seed {seed} | {steps} steps at {options.lr:g}{aligned}{new}{low}"


def name_of(spec: str) -> str:
    """Of a pass, or of the file that holds a model."""
    return (Path(spec).stem if spec.endswith(".pt") else spec) or "dense"


def one_run(spec: str, way: str, steps: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one run."""
    start = MODELS[options.model]
    dense = start.trained(options.output.parent)
    model = rewritten(dense, spec, seed, tokenizer=start.tokenizer, text=start.text)
    parts = WAYS[way]
    align, anneal = (round(parts.get(stage, 0.0) * steps) for stage in ("align", "anneal"))
    given = {"lr_new": options.lr_new if spec else None, "bf16": options.bf16, "save_every": max(1, steps // CHECKPOINTS)}
    settings = run_settings(steps - align, options.lr, seed, **given)
    if parts:
        settings = dataclasses.replace(
            settings,
            align=align,
            align_lr=options.align_lr,
            anneal=anneal,
            distil=parts["distil"],
            distil_hidden=parts.get("hidden", 0.0),
            dial="own" if "own_dial" in parts else "mixture",
        )
    output = options.output.with_name(re.sub(r"[^\w.]+", "-", key_of(spec, way, steps, seed, options)) + ".pt")
    run = trained_on(model, settings, dense if parts else None, start.tokenizer, start.text, output)
    output.unlink()
    shutil.rmtree(folder_of(output))
    known = ("alignment", "dense_loss", "start_loss", "seconds_per_step", "eval_losses")
    numbers = run.to_dict()
    return {"align": align, **{name: numbers[name] for name in known if name in numbers}}


def table(results: Mapping[str, Any], options: argparse.Namespace) -> str:
    """A row for each pass, way and length: losses, beside the dense model's and the longest plain training's."""
    lines = [
        "| pass | way | steps | seeds | before any step | after all steps | above dense, trained as long "
        "| above the longest plain training | steps to the loss of that |",
        "| --- " * 9 + "|",
    ]
    for spec in (DENSE, *options.specs):
        plain = runs_of(results, spec, "plain", max(options.steps), options)
        for way, steps in itertools.product(("plain",) if spec == DENSE else options.ways, options.steps):
            runs = runs_of(results, spec, way, steps, options)
            if not runs:
                continue
            last = [run["eval_losses"][-1][1] for run in runs.values()]
            start = statistics.mean(run["eval_losses"][0][1] for run in (plain or runs).values())
            dense = runs_of(results, DENSE, "plain", steps, options) if spec else {}
            gap, apart = (
                [run["eval_losses"][-1][1] - others[seed]["eval_losses"][-1][1] for seed, run in runs.items() if seed in others]
                for others in (dense, plain)
            )
            reached = [steps_to(run, plain[seed]["eval_losses"][-1][1]) for seed, run in runs.items() if seed in plain]
            shown = ", ".join("not" if one is None else str(one) for one in reached)
            name = f"`{name_of(spec)}`" if spec else "dense"
            ends = f"{start:.4f} | {mean_and_deviation(last)} | {with_error(gap)} | {with_error(apart)}"
            lines.append(f"| {name} | {way} | {steps} | {len(runs)} | {ends} | {shown} |")
    return "\n".join(lines)


def draw(spec: str, results: Mapping[str, Any], options: argparse.Namespace) -> None:
    """The curves of one pass, a line for each way; the step counts those of align."""
    ways = {way: list(runs_of(results, spec, way, max(options.steps), options).values()) for way in options.ways}
    curves = {way: [curve_of(run) for run in runs] for way, runs in ways.items() if runs}
    trained = [run["eval_losses"] for run in runs_of(results, DENSE, "plain", max(options.steps), options).values()]
    if not curves or not trained:
        return
    levels = {
        "dense": statistics.mean(losses[0][1] for losses in trained),
        "dense, trained on as long": statistics.mean(losses[-1][1] for losses in trained),
    }
    options.pictures.mkdir(parents=True, exist_ok=True)
    path = options.pictures / f"recovery_{options.model}_{name_of(spec).partition('(')[0]}.svg"
    draw_seed_curves(path, curves, name_of(spec), levels)
    print(path)


def curve_of(run: Mapping[str, Any]) -> list[tuple[int, float]]:
    return [(step + run["align"], loss) for step, loss in run["eval_losses"]]


def runs_of(results: Mapping[str, Any], spec: str, way: str, steps: int, options: argparse.Namespace) -> dict[int, Any]:
    """The runs of one pass, way and length, by seed."""
    keys = {seed: key_of(spec, way, steps, seed, options) for seed in range(1, options.seeds + 1)}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def steps_to(run: Mapping[str, Any], loss: float) -> int | None:
    """The first step, those of align counted, after which the held-out loss stays at or below this; None where it does not."""
    reached = None
    for step, value in reversed(run["eval_losses"]):
        if value > loss:
            break
        reached = step + run["align"]
    return reached


if __name__ == "__main__":
    main()
