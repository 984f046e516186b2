"""The table of what benchmarks/whole_model.py measured, and its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from on_cuda.parts import FAILED

INTRODUCTION = """# Whole models

Written by `benchmarks/whole_model.py`: a trained model, dense and after each recipe, in all ways to run it on one machine.

- prompt: a forward of one window, all logits; decoding: one token at a time after such a window, greedily.
- faster: than the dense model in plain torch, float32; the median of the ratios in the same rounds, and their range.
- loss: on text that nothing was fitted on. memory: the peak of a process of its own, less what it had before loading.
- torch, int8: `quantize_dynamic` of the linear layers that a rewrite left. ONNX Runtime, int8: its own dynamic quantization.
- no spinning: ONNX Runtime's threads sleep while they wait (`session.intra_op.allow_spinning` is 0).
"""
HEAD = (
    "model",
    "way",
    "prompt, tokens/s",
    "faster",
    "decoding, tokens/s",
    "faster",
    "loss",
    "memory, MiB",
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """What was measured, of which models, in which ways, on how long a prompt."""

    values: Mapping[str, Any]
    recipes: Mapping[str, Sequence[str]]
    ways: Sequence[str]
    prompt: int


def table(rows: Rows) -> str:
    """A line for each model in each way, then what failed first in each."""
    lines = [HEAD, ("---", "---", *["---:"] * (len(HEAD) - 2))]
    failures = []
    for model in rows.recipes:
        for way in rows.ways:
            found = {what: rows.values.get(f"{model}, {way}: {what}") for what in ("seconds", "loss", "memory")}
            if any(value is not None for value in found.values()):
                lines.append((model, way, *cells(found, rows.prompt)))
            texts = [value[FAILED] for value in found.values() if isinstance(value, dict) and FAILED in value]
            failures += [f"- {model}, {way}: {text}" for text in texts[:1]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(part for part in (text, "\n".join(failures)) if part)


def cells(found: Mapping[str, Any], prompt: int) -> list[str]:
    """Speeds, how much faster than the dense model in plain torch, loss and memory; a dash for what is not known."""
    times = known(found["seconds"])
    speeds = []
    for what, tokens in (("prompt", prompt), ("token", 1)):
        one = times.get(what)
        speeds += ["–", "–"] if one is None else [f"{tokens / one['seconds']:.1f}", spread(one)]
    loss, memory = found["loss"], known(found["memory"]).get("running")
    return [*speeds, f"{loss:.3f}" if isinstance(loss, float) else "–", "–" if memory is None else f"{memory / 2**20:.0f}"]


def spread(one: Mapping[str, float]) -> str:
    return f"×{one['faster']:.2f} ({one['least']:.2f}–{one['most']:.2f})"


def known(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) and FAILED not in value else {}


def page(rows: Rows) -> str:
    """Return the page of what was measured."""
    return f"{INTRODUCTION}\n{table(rows)}\n"
