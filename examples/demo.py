"""From nothing: a small language model is trained, rewritten twice, checked, trained on, and asked to write.

    python examples/demo.py    # some six minutes on two cores; everything it makes is in demo/

The text is the documentation of the language that comes with every Python. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.cli import main as retrofit_command
from retrofit.cli.terminal import working
from retrofit.passbase.tokenization import codec_for, read_texts
from retrofit.program.cost import flops_per_token
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.runs import TrainingRun, draw_curves
from retrofit.training.settings import Settings

LENGTH, BATCH, HELD_OUT, EVALUATIONS = 256, 4, 0.03, 6
PROMPT = 'The "with" statement'
REWRITES = {  # title: the words of `retrofit apply`; what either computes at the start is what the dense model computes
    "AltUp, K = 2": ("altup", "--k", "2", "--init", "lockstep"),  # draws nothing: the same in every run
    "n-gram memory": ("memory", "--lookup", "ngram"),
}


def main() -> None:
    options = read_options()
    began = time.monotonic()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    text, dense = folder / "text.txt", folder / "model.pt"

    stage("1/6  Text: the documentation of the Python language")
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    print(f"{text}: {text.stat().st_size:,} bytes on {len(topics)} topics")

    stage(f"2/6  A small dense model, trained from scratch for {options.steps} steps")
    torch.manual_seed(0)
    model = LlamaForCausalLM(byte_llama(options.width, options.layers))
    every = math.ceil(options.steps / EVALUATIONS)
    settings = Settings(options.steps, BATCH, LENGTH, lr=2e-3, schedule="cosine", eval_fraction=HELD_OUT, eval_every=every)
    with working(debug=False) as progress:
        run = continue_pretraining(model, read_texts([text]), settings, output=dense, force=True, progress=progress)
    print(run)

    stage("3/6  The same model rewritten: a residual stream twice as wide; tables of what follows two to four bytes")
    models = {"dense": dense}
    for title, (name, *options_of) in REWRITES.items():
        models[title] = folder / f"model.{name}.pt"
        command("apply", "--pass", name, *options_of, dense, "--force")
        command("verify", models[title], "--against", dense)
        command("inspect", models[title], "--svg", models[title].with_suffix(".svg"), "--force")

    stage(f"4/6  All three trained on: the same {options.more} steps on the same windows in the same order")
    setting = {"steps": options.more, "batch-size": BATCH, "length": LENGTH, "lr": 1e-3, "eval-fraction": HELD_OUT, "seed": 1}
    setting["eval-every"] = math.ceil(options.more / EVALUATIONS)
    words = [word for name, value in setting.items() for word in (f"--{name}", value)]
    runs = {}
    for title, start in models.items():  # what a pass added learns faster, at the rate it proposes
        command("train", start, "--data", text, *words, "-o", trained(start), "--force")
        runs[title] = TrainingRun.read(trained(start))
    curves = draw_curves(folder / "curves.png", runs, "From the same start, on the same windows")
    print(f"{curves}: the losses")

    stage("5/6  A sample from the retrofitted model that ended lowest")
    best = min(REWRITES, key=lambda title: runs[title].eval_losses[-1][1])
    print(f"{best}:\n{sample(trained(models[best]), options.characters)}")

    stage("6/6  In numbers")
    print(comparison(models, runs))
    print(f"\nEverything is in {folder}/: the models (.pt), their anatomy (.svg), the curves (.png), the numbers (.run/).")
    print(f"Done in {time.monotonic() - began:.0f} s.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="From nothing to a retrofitted, verified, trained model.")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="where everything goes (default: demo)")
    parser.add_argument("--steps", type=int, default=500, help="steps of the dense model's first training (default: 500)")
    parser.add_argument("--more", type=int, default=250, help="steps of the continued training of each (default: 250)")
    parser.add_argument("--width", type=int, default=192, help="the dense model's width, a multiple of 16 (default: 192)")
    parser.add_argument("--layers", type=int, default=6, help="its depth (default: 6)")
    parser.add_argument("--characters", type=int, default=230, help="length of the sample (default: 230)")
    return parser.parse_args()


def byte_llama(width: int, layers: int) -> LlamaConfig:
    """A Llama whose tokens are bytes."""
    heads = max(1, width // 48)
    return LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads // 2 * 2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )


def stage(title: str) -> None:
    print(f"\n\033[1m{title}\033[0m\n" if sys.stdout.isatty() else f"\n{title}\n", flush=True)


def command(*words: object) -> None:
    """The command line has run; the demo ends here where it failed."""
    print("$ retrofit", *words, flush=True)
    code = retrofit_command([str(word) for word in words])
    if code != 0:
        sys.exit(code)
    print(flush=True)


def sample(path: Path, characters: int) -> str:
    """What the model at `path` writes after `PROMPT`."""
    model = retrofit.load(path)
    codec = codec_for(model)
    torch.manual_seed(0)
    ids = codec.encode(PROMPT).long()[None]
    written = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=characters, do_sample=True, temperature=0.5, pad_token_id=0
    )
    return codec.decode(written[0].tolist())


def trained(start: Path) -> Path:
    """The file of the model that begins at `start` and is trained on."""
    return start.with_suffix(".trained.pt")


def comparison(paths: Mapping[str, Path], runs: Mapping[str, TrainingRun]) -> str:
    """The models side by side; in brackets, multiples of the dense one."""
    models = [retrofit.load(path) for path in paths.values()]
    flops = [flops_per_token(retrofit.inspect(model).program) for model in models]
    seconds = seconds_a_step(models)
    losses = [run.eval_losses for run in runs.values()]
    steps = runs["dense"].settings.steps
    rows = [
        ["", *paths],
        ["parameters", *beside_dense([run.parameters for run in runs.values()], ",")],
        ["FLOPs a token, forward", *beside_dense(flops, ",")],
        ["seconds a training step", *beside_dense(seconds, ".3f")],
        ["held-out loss at the start", *(f"{curve[0][1]:.4f}" for curve in losses)],
        [f"held-out loss after {steps} steps", *(f"{curve[-1][1]:.4f}" for curve in losses)],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
    return "\n".join(lines)


def beside_dense(values: Sequence[float], form: str) -> list[str]:
    """The values as text, all but the first with their multiple of it."""
    first, *rest = values
    return [f"{first:{form}}", *(f"{value:{form}} (×{value / first:.2f})" for value in rest)]


def seconds_a_step(models: Sequence[torch.nn.Module], rounds: int = 7) -> list[float]:
    """The least time of a training step of each model, measured in turn, so that a busy machine slows each of them."""
    ids = torch.randint(256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    optimizers = [retrofit.optimizer(model.train(), lr=1e-5) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, optimizer, taken in zip(models, optimizers, seconds, strict=True):
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in seconds]


if __name__ == "__main__":
    main()
