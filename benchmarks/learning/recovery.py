"""How fast a rewritten model gets its quality back, plainly and with a teacher, stage by stage, on the demo's model and text.

A byte-level Llama (2.8 million parameters) is trained once, rewritten by each approximate pass with calibration, and trained on
in several ways for the same number of tokens, the steps of `align` among them: the same windows in the same order for one seed. The
dense model is trained on the same tokens too. Every run is kept in the JSON file as soon as it is done; the next call goes on from
there. Prints held-out losses, mean and standard deviation over the seeds.

    python benchmarks/learning/recovery.py -o recovery.json --seeds 3
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.pipeline.tokenization import codec_for, windows_of
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings
from retrofit.training.windows import hold_out

SPECS = ("sparse-ffn(sparsity=8)", "sparse-qkv", "shared-moe(groups=1)", "sequence-altup(k=2)")
WAYS: dict[str, dict[str, float]] = {  # parts of all steps
    "plain": {},
    "distil": {"distil": 0.5},
    "align, distil": {"align": 0.2, "distil": 0.5},
    "anneal, distil": {"anneal": 0.4, "distil": 0.5},
    "align, anneal, distil": {"align": 0.2, "anneal": 0.3, "distil": 0.5},
    "own dial, distil": {"anneal": 0.4, "distil": 0.5, "own_dial": 1.0},
    "distil, hidden": {"distil": 0.5, "hidden": 1.0},
}
ONLY_NAMED = ("own dial, distil", "distil, hidden")  # ways that are tried where --ways names them
DENSE = "dense"
LENGTH, BATCH, HELD_OUT, CALIBRATED, POINTS = 256, 4, 0.03, 64, 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery with a teacher and without.")
    parser.add_argument("-o", "--output", type=Path, default=Path("recovery.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250, help="of a run, those of align among them")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--ways", nargs="+", default=[way for way in WAYS if way not in ONLY_NAMED], choices=list(WAYS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    dense = trained_once(options.output.with_suffix(".pt"), texts)
    end = time.monotonic() + 60 * options.minutes
    for seed in range(1, options.seeds + 1):
        for spec in (DENSE, *options.specs):
            for way in ("plain",) if spec == DENSE else options.ways:
                key = f"{spec} | {way} | seed {seed} | {options.steps} steps at {options.lr:g}"
                if key not in results and time.monotonic() < end:
                    results[key] = one_run(dense, spec, WAYS[way], seed, options, texts)
                    options.output.write_text(json.dumps(results, indent=1))
                    print(f"{key}: {results[key]['eval_losses'][-1][1]:.4f}", flush=True)
    print(table(results, options))


def trained_once(path: Path, texts: list[str]) -> nn.Module:
    """The dense model, from its file where it was trained before."""
    if not path.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 48}
        tokens = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 1024}
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, **sizes, **tokens))
        settings = Settings(500, BATCH, LENGTH, lr=2e-3, schedule="cosine", eval_fraction=HELD_OUT, eval_every=500)
        continue_pretraining(model, texts, settings)
        retrofit.save(model, path)
    return retrofit.load(path)


def one_run(
    dense: nn.Module, spec: str, way: Mapping[str, float], seed: int, options: argparse.Namespace, texts: list[str]
) -> dict[str, Any]:
    """The numbers of one run."""
    torch.manual_seed(seed)
    model = copy.deepcopy(dense)
    if spec != DENSE:
        seen, _ = hold_out(windows_of(texts, codec_for(dense), LENGTH), HELD_OUT)
        calibration = seen[:: max(1, len(seen) // CALIBRATED)][:CALIBRATED].long()
        model = retrofit.apply(model, spec, calibration=calibration, verify=False)
    align = round(way.get("align", 0.0) * options.steps)
    settings = Settings(
        options.steps - align,
        BATCH,
        LENGTH,
        lr=options.lr,
        eval_fraction=HELD_OUT,
        eval_every=max(1, options.steps // POINTS),
        seed=seed,
    )
    teacher = None
    if way:
        teacher = dense
        anneal = round(way.get("anneal", 0.0) * options.steps)
        settings = dataclasses.replace(
            settings, align=align, anneal=anneal, distil=way["distil"], distil_hidden=way.get("hidden", 0.0)
        )
        settings = dataclasses.replace(settings, dial="own" if way.get("own_dial") else "mixture")
    run = continue_pretraining(model, texts, settings, teacher=teacher)
    known = ("eval_losses", "alignment", "dense_loss", "start_loss", "seconds_per_step")
    return {**{name: value for name, value in run.to_dict().items() if name in known}, "align": align}


def table(results: Mapping[str, Any], options: argparse.Namespace) -> str:
    """A row for each pass and way: losses at the start and the end, and the steps to the last loss of plain training."""
    lines = ["| pass | way | seeds | before any step | after all steps | steps to the last loss of plain |", "| --- " * 6 + "|"]
    for spec in (DENSE, *options.specs):
        plain = runs_of(results, spec, "plain", options)
        for way in ("plain",) if spec == DENSE else options.ways:
            runs = runs_of(results, spec, way, options)
            if not runs:
                continue
            last = [run["eval_losses"][-1][1] for run in runs.values()]
            started = plain or runs
            start = statistics.mean(run["eval_losses"][0][1] for run in started.values())
            reached = [steps_to(run, plain[seed]["eval_losses"][-1][1]) for seed, run in runs.items() if seed in plain]
            shown = ", ".join("not" if one is None else str(one) for one in reached)
            deviation = f" ± {statistics.stdev(last):.4f}" if len(last) > 1 else ""
            lines.append(f"| `{spec}` | {way} | {len(runs)} | {start:.4f} | {statistics.mean(last):.4f}{deviation} | {shown} |")
    return "\n".join(lines)


def runs_of(results: Mapping[str, Any], spec: str, way: str, options: argparse.Namespace) -> dict[int, Any]:
    """The runs of one pass and way, by seed."""
    keys = {seed: f"{spec} | {way} | seed {seed} | {options.steps} steps at {options.lr:g}" for seed in range(1, options.seeds + 1)}
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
