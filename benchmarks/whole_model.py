"""A whole trained model, dense and rewritten by recipes, in the ways in which it can be run on this machine.

SmolLM2-135M, or a small Llama: tokens a second of a prompt and of decoding, the loss on text that nothing was fitted on, and the
memory, in torch (float32, compiled, bfloat16, int8) and in ONNX Runtime (float32, its own int8, what `retrofit export --weights`
packs). Is a rewrite worth it beside what anybody can have without one, and together with it? The models take turns in one process,
way by way, always beside the dense model in plain torch. Memory is that of a process of its own. Results are kept in a file: what
was measured is not measured again.

    python benchmarks/planning.py --model smollm2 --targets "decode 1.3x"
    python benchmarks/whole_model.py --model smollm2 --recipe build/planning/smollm2.decode-1.3x.json
        -o benchmarks/results/whole_models.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "learning"))
sys.path.insert(0, str(Path(__file__).parent / "coverage"))
from experiment import TEXTS, DenseModel, SmolLM2
from on_cuda.parts import FAILED, Kept, attempt
from side_by_side import interleaved
from sweeping import write_page
from whole.page import Rows, page, table
from whole.ways import ROOM, WEIGHTS, Running, files_of, packed_file, ways, write_int8

import retrofit
from retrofit.passbase.protocol import parse_recipe
from retrofit.planning.planning_data import PlanningData, planning_data

DENSE, PLAIN = "dense", "torch"
TOKENS = 16  # decoded in a round
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}


class TinyModel(DenseModel):
    """A random one, to rehearse with."""

    def trained(self, folder: Path) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**TINY, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)).eval()


def main(given: list[str] | None = None) -> None:
    options = parse(given)
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    known = ways(options.threads, DENSE, {"backend": "eager"} if options.model == "tiny" else {})
    if options.memory_of:
        print(json.dumps(memory_of(known[options.memory_of[1]], options)))
        return
    recipes = {DENSE: [], **dict(recipe_of(text) for text in options.recipe)}
    kept = Kept(options.folder / f"{options.model}.{options.threads}.json")
    prepare(recipes, kept, options)
    names = [name for name in recipes if FAILED not in kept.values[f"files: {name}"]]
    windows = torch.load(options.folder / "held_out.pt")
    for way in options.ways or known:
        for name in names:
            measure_one(name, way, known[way], windows, kept, options)
    for way in options.ways or known:
        if not options.untimed:
            measure_times(names, way, known, windows, kept, options)
    rows = Rows(kept.values, {name: recipes[name] for name in names}, list(known), windows.shape[1])
    print(table(rows))
    if options.output is not None:
        write_page(options.output, page(rows))


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A whole model, dense and rewritten, in all ways to run it here.")
    parser.add_argument("--model", choices=("tiny", "small", "smollm2"), default="small")
    parser.add_argument("--recipe", nargs="*", default=[], help="files of recipes, or passes as text, separated by semicolons")
    parser.add_argument("--ways", nargs="*", help="to measure (default: all)")
    parser.add_argument("--untimed", action="store_true", help="measure only what does not depend on what else the machine does")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--folder", type=Path, default=Path("build/whole_model"), help="of the models and the results")
    parser.add_argument("-o", "--output", type=Path, help="the page to write, as JSON or Markdown")
    parser.add_argument("--memory-of", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.device = "cpu"
    if (options.rounds + 1) * TOKENS > ROOM:
        parser.error(f"--rounds {options.rounds}: at most {ROOM // TOKENS - 1}")
    return options


def recipe_of(text: str) -> tuple[str, list[str]]:
    """The name of a recipe, for files and tables, and its passes."""
    path = Path(text)
    if path.suffix != ".json":
        return "".join(one if one.isalnum() else "-" for one in text).strip("-"), [one.strip() for one in text.split(";")]
    return path.stem, list(json.loads(path.read_text(encoding="utf-8"))["recipe"])


# ── Models, in files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare(recipes: dict[str, list[str]], kept: Kept, options: argparse.Namespace) -> None:
    """Every model is in its files, for torch and, where that is a way, for ONNX Runtime, and so is the text that is measured on."""
    made = {name: kept.values.get(f"files: {name}", {}) for name in recipes}
    other = [name for name, recipe in recipes.items() if made[name].get("recipe") != recipe]
    missing = [name for name in recipes if name in other or (in_onnx(options) and "onnx" not in made[name])]
    if not missing:
        return
    which = {"tiny": TinyModel, "small": DenseModel, "smollm2": SmolLM2}[options.model]()
    dense = which.trained(options.folder).eval()
    data = planning_data(dense, TEXTS, which.tokenizer)
    torch.save(torch.cat([batch["input_ids"] for batch in data.held_out]).long(), options.folder / "held_out.pt")
    for name in missing:
        print(f"{name}: making its files", flush=True)
        for key in [key for key in kept.values if name in other and key.startswith(f"{name}, ")]:
            del kept.values[key]  # of another recipe
        kept.keep(
            f"files: {name}",
            {"recipe": recipes[name], **attempt(lambda name=name: make(name, recipes[name], dense, data, options))},
        )
        gc.collect()


def make(name: str, recipe: list[str], dense: nn.Module, data: PlanningData, options: argparse.Namespace) -> dict[str, Any]:
    """The files of one model."""
    files = files_of(options.folder, name)
    model = copy.deepcopy(dense)
    if recipe:
        passes = parse_recipe(recipe)
        torch.manual_seed(0)
        calibration = data.fitted if any(one.calibrates for one in passes) else None
        model = retrofit.apply(model, *passes, calibration=calibration, verify=False)
    retrofit.save(model, files.torch, force=True)
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    if in_onnx(options):
        found |= make_onnx(name, model, options)
    retrofit.save(model.bfloat16(), files.bfloat16, force=True)
    return found


def in_onnx(options: argparse.Namespace) -> bool:
    """Whether a way is by ONNX Runtime, whose files take minutes to make."""
    return options.ways is None or any(way.startswith("ONNX") for way in options.ways)


def make_onnx(name: str, model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """The files of one model for ONNX Runtime."""
    files = files_of(options.folder, name)
    found: dict[str, Any] = {}
    found["onnx"] = attempt(lambda: str(retrofit.export_onnx(model, files.onnx, force=True)))
    found["int8"] = attempt(lambda: write_int8(files.onnx, files.int8))
    for weights in WEIGHTS:
        path = packed_file(options.folder, name, weights)
        found[f"--weights {weights}"] = attempt(
            lambda weights=weights, path=path: str(retrofit.export_onnx(model, path, weights=weights, force=True))
        )
    return found


# ── One model in one way ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_one(
    name: str, way: str, ready: Callable[[Path, str], Running], windows: Tensor, kept: Kept, options: argparse.Namespace
) -> None:
    """The loss and the memory of a model in a way are known."""

    def once(what: str, action: Callable[[], Any]) -> None:
        key = f"{name}, {way}: {what}"
        if key not in kept.values:
            began = time.monotonic()
            kept.keep(key, attempt(action))
            print(f"{key} {kept.values[key]} ({time.monotonic() - began:.0f} s)", flush=True)
            gc.collect()

    once("loss", lambda: loss_of(ready(options.folder, name), windows))
    once("memory", lambda: memory_in_process(name, way, options))


@torch.no_grad()
def loss_of(running: Running, windows: Tensor) -> float:
    """The mean cross-entropy of the next token, in nats."""
    losses = [float(F.cross_entropy(running.logits(row[None])[0, :-1].float(), row[1:])) for row in windows]
    return statistics.fmean(losses)


def memory_in_process(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `memory_of` finds in a process of its own."""
    same = ["--model", options.model, "--threads", str(options.threads), "--folder", str(options.folder)]
    done = subprocess.run(
        [sys.executable, __file__, *same, "--memory-of", name, way], capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return dict(json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def memory_of(ready: Callable[[Path, str], Running], options: argparse.Namespace) -> dict[str, int]:
    """Bytes that this process takes more once the model is ready, and at most while it reads a prompt and decodes."""
    windows = torch.load(options.folder / "held_out.pt")
    before = resident("VmRSS")
    running = ready(options.folder, options.memory_of[0])
    gc.collect()
    loading = resident("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    decoded(running, windows[:1])
    return {"loading": loading, "running": resident("VmHWM") - before}


def resident(which: str) -> int:
    """Bytes that this process has in memory, now or at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024


def decoded(running: Running, ids: Tensor, tokens: int = TOKENS) -> Tensor:
    """Greedy tokens after a prompt, (1, tokens)."""
    state, token, found = running.begin(ids), ids[:, -1:], []
    for _ in range(tokens):
        logits, state = running.step(token, state)
        token = logits[:, -1].argmax(-1, keepdim=True)
        found.append(token)
    return torch.cat(found, 1)


# ── All models in one way ────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def measure_times(
    names: list[str],
    way: str,
    known: dict[str, Callable[[Path, str], Running]],
    windows: Tensor,
    kept: Kept,
    options: argparse.Namespace,
) -> None:
    """The seconds of a prompt and of a token of all models in one way, beside those of the dense model in plain torch."""
    missing = [name for name in names if f"{name}, {way}: seconds" not in kept.values]
    if not missing:
        return
    tasks: dict[str, Callable[[], None]] = {}
    ids = windows[:1]
    for name in dict.fromkeys([None, *names]):  # None: the dense model in plain torch
        of, how = (DENSE, PLAIN) if name is None else (name, way)
        running = attempt(lambda of=of, how=how: warm(known[how](options.folder, of), ids))
        if isinstance(running, dict):
            kept.keep(f"{of}, {how}: seconds", running)
            continue
        key = "beside" if name is None else name
        tasks[f"{key}: prompt"], tasks[f"{key}: token"] = tasks_of(running, ids)
    seconds = interleaved(tasks, options)
    for name in missing:
        if f"{name}: prompt" in seconds:
            kept.keep(f"{name}, {way}: seconds", {what: figures(seconds, name, what) for what in ("prompt", "token")})
            print(f"{name}, {way}: {kept.values[f'{name}, {way}: seconds']}", flush=True)
    gc.collect()


def warm(running: Running, ids: Tensor) -> Running:
    """Ready to be timed: compiled, where that is the way."""
    running.logits(ids)
    decoded(running, ids, 2)
    return running


def tasks_of(running: Running, ids: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """Reading a prompt; decoding after one, which was read before."""
    state = running.begin(ids)

    def prompt() -> None:
        running.logits(ids)

    def token() -> None:
        nonlocal state  # grows from round to round, in all ways
        one = ids[:, -1:]
        for _ in range(TOKENS):
            logits, state = running.step(one, state)
            one = logits[:, -1].argmax(-1, keepdim=True)

    return torch.no_grad()(prompt), torch.no_grad()(token)


def figures(seconds: dict[str, list[float]], name: str, what: str) -> dict[str, float]:
    """The median time, and the median over the rounds of its ratio to the dense model's in plain torch, with their range."""
    mine, other = seconds[f"{name}: {what}"], seconds[f"beside: {what}"]
    per = TOKENS if what == "token" else 1
    ratios = [other_one / one for one, other_one in zip(mine, other, strict=True)]
    return {
        "seconds": statistics.median(mine) / per,
        "beside": statistics.median(other) / per,
        "faster": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


if __name__ == "__main__":
    main()
