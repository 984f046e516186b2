"""Every pass on trained models with real inputs: whether the result is verified, what it is worth at step 0, what it costs, ONNX.

    PYTHONPATH=tests python benchmarks/real_models.py --results real.json -o docs/real_models.md   # make real
    PYTHONPATH=tests python benchmarks/real_models.py --results real.json --model SmolLM2 --only sparse   # some rows
    PYTHONPATH=tests python benchmarks/real_models.py --results real.json --speed   # the times, on an idle machine

Each row is a process of its own, and is kept in the results as soon as it is done: a run that was stopped goes on where it was. The
models are those of `tests/support/real_models.py`. A pass that uses calibration data is also tried without; the figures are those
of held-out inputs. Times are taken only with `--speed`, dense and rewritten in turn in one process: nothing else may run beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 3600  # seconds for one row
ROUNDS = 5  # of forwards that are timed in turn
SPECS = (
    "altup(k=2)",
    "altup(k=2, embedding=recycled)",
    "sum",
    "memory",
    "memory(lookup=softmax, buckets=16, rank=4)",
    "shared-moe(groups=0, experts=4)",
    "shared-moe(groups={half}, experts=4)",
    "sparse-ffn(sparsity=8, active=4)",
    "sparse-ffn(sparsity=8, active=1)",
    "sparse-ffn(sparsity=8, active=4, controller=gate)",
    "sparse-qkv",
    "sparse-loss",
    "sequence-altup(k=2)",
)


def main() -> None:
    options = read_options()
    if options.row:
        print(json.dumps(try_row(*options.row)))
        return
    if options.time:
        print(json.dumps(time_row(*options.time)))
        return
    results: dict[str, dict[str, Any]] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for key, command in planned_rows(options, results):
        began = time.monotonic()
        found = run_process(command)
        results.setdefault(key, {}).update(found)
        results[key]["seconds"] = round(time.monotonic() - began)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        replaced = options.results.with_suffix(".new")
        replaced.write_text(json.dumps(results, indent=1))
        replaced.replace(options.results)
        print(f"{key}: {found.get('verdict', found)}", flush=True)
    if options.output:
        options.output.write_text(page(results))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("real_models.json"))
    parser.add_argument("-o", "--output", type=Path, help="the page to write")
    parser.add_argument("--model", action="append", help="one of the models; may be given several times")
    parser.add_argument("--only", default="", help="rows whose spec holds this text")
    parser.add_argument("--again", action="store_true", help="rows that were not verified are tried again")
    parser.add_argument("--speed", action="store_true", help="time the verified rows that have no times yet")
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "SPEC"), help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs=2, metavar=("MODEL", "SPEC"), help=argparse.SUPPRESS)
    return parser.parse_args()


def planned_rows(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """What there is left to do: the row's key and the arguments of its process."""
    from support.real_models import REAL_MODELS

    rows = []
    for name, model in REAL_MODELS.items():
        if not model.installed or (options.model and name not in options.model):
            continue
        for spec in SPECS:
            key, known = f"{name}: {spec}", results.get(f"{name}: {spec}", {})
            if options.only not in spec:
                continue
            if options.speed:
                if known.get("verdict") == "verified" and "speed" not in known:
                    rows.append((key, ["--time", name, spec]))
            elif not known or (options.again and known["verdict"] != "verified"):
                rows.append((key, ["--row", name, spec]))
    return rows


def run_process(arguments: list[str]) -> dict[str, Any]:
    """What the script prints last with these arguments, in a process of its own."""
    try:
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"verdict": "failed", "why": f"over {LIMIT} s"}
    if done.returncode:
        return {"verdict": "failed", "why": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


# ── One row ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def try_row(name: str, template: str) -> dict[str, Any]:
    """One pass on one model: applied with every check, measured on held-out inputs, exported to ONNX."""
    import torch
    from support.real_models import REAL_MODELS

    import retrofit
    from retrofit.errors import RetrofitError, VerificationError
    from retrofit.pipeline.registry import as_pass
    from retrofit.rewriting import apply_reported

    torch.manual_seed(0)
    real = REAL_MODELS[name]
    dense = real.load()
    try:
        spec = filled(template, dense)
        chosen = as_pass(spec)
    except RetrofitError as error:
        return {"verdict": "refused", "why": sentence(error)}
    outputs = real.outputs(dense)
    row: dict[str, Any] = {"spec": spec, "dense": real.measure(dense, outputs)}
    calibration = real.calibration() if chosen.calibrates else None
    began = time.monotonic()
    try:
        applied = apply_reported(dense, chosen, example_inputs=example_of(real), calibration=calibration)
    except VerificationError as error:
        return {**row, "verdict": "failed", "why": error.why}
    except RetrofitError as error:
        return {**row, "verdict": "refused", "why": sentence(error)}
    assert applied.report is not None
    row |= {"verdict": "verified", "apply_seconds": time.monotonic() - began, "exact": all(one.exact for one in applied.rewrites)}
    row["checks"] = {check.name: [check.status, check.measured, check.why] for check in applied.report.checks}
    row["sites"] = sum(len(one.sites) for one in applied.rewrites)
    row["parameters"] = [applied.parameters_before, applied.parameters_after]
    row["flops"] = [applied.flops_before, applied.flops_after]
    row["start"] = real.measure(applied.model, outputs)
    onnx = retrofit.verify(applied.model, example_inputs=example_of(real), checks=["onnx"])["onnx"]
    row["onnx"] = [onnx.status, onnx.measured, onnx.why]
    if calibration is not None:
        plain = retrofit.apply(real.load(), chosen, example_inputs=example_of(real), verify=False)
        row["uncalibrated"] = real.measure(plain, outputs)
    return row


def example_of(real: Any) -> dict[str, Any] | None:
    """The example inputs of a model whose own cannot be derived: a picture."""
    first = real.held_out()[0]
    return first if "x" in first else None


def filled(template: str, model: Any) -> str:
    """The spec, with half the number of the model's layers where it says so."""
    if "{half}" not in template:
        return template
    import retrofit

    return template.format(half=max(1, sum(len(stack.layers) for stack in retrofit.inspect(model).stacks) // 2))


def sentence(error: Any) -> str:
    """An error in one line: what, why, the way out."""
    parts = [error.what, error.why, f"way out: {error.remedy}" if error.remedy else ""]
    return " – ".join(part for part in parts if part)


def time_row(name: str, template: str) -> dict[str, Any]:
    """The time of a forward on held-out inputs, of `generate` where there is one, and of the parameters in memory: new to dense."""
    import torch
    from support.real_models import REAL_MODELS

    import retrofit

    real = REAL_MODELS[name]
    dense, model = real.load(), real.load()
    model = retrofit.apply(model, filled(template, dense), example_inputs=example_of(real), verify=False)
    batch = {key: value for key, value in real.held_out()[0].items() if key != "labels"}
    found: dict[str, Any] = {"speed": ratio_of_times(lambda one: one(**batch), dense, model)}
    if getattr(dense, "can_generate", lambda: False)() and "input_ids" in batch:
        prompt = {"input_ids": batch["input_ids"][:1, :32], "max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        found["decoding"] = ratio_of_times(lambda one: one.generate(**prompt), dense, model)
    sizes = [sum(one.numel() * one.element_size() for one in side.parameters()) for side in (dense, model)]
    return {**found, "memory": sizes[1] / sizes[0]}


def ratio_of_times(action: Any, dense: Any, model: Any) -> list[float]:
    """The median of the rounds' ratios, new to dense, and the least and greatest of them."""
    import torch

    def seconds(one: Any) -> float:
        began = time.perf_counter()
        action(one)
        return time.perf_counter() - began

    with torch.no_grad():
        seconds(dense), seconds(model)  # once for warmth
        ratios = [seconds(model) / seconds(dense) for _ in range(ROUNDS)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def page(results: dict[str, dict[str, Any]]) -> str:
    """The results as a page of tables, a table for each model."""
    from support.real_models import REAL_MODELS

    parts = [INTRODUCTION]
    for name, model in REAL_MODELS.items():
        rows = {key.partition(": ")[2]: row for key, row in results.items() if key.startswith(f"{name}: ")}
        if not rows:
            continue
        dense = next((row["dense"] for row in rows.values() if "dense" in row), None)
        says = f"Dense {model.figure} {dense:.3f}." if dense is not None and model.figure == "loss" else ""
        parts.append(f"## {name}: {model.what}\n\nFrom the package `{model.package}`. {says}\n")
        parts.append(f"| pass | verdict | {model.figure} at step 0 | parameters | FLOPs | time | decoding | ONNX |")
        parts.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
        parts += [table_row(spec, row) for spec, row in rows.items()]
        notes = [f"- `{row.get('spec', spec)}`: {row['why']}" for spec, row in rows.items() if row["verdict"] != "verified"]
        notes += [
            f"- `{row['spec']}`, ONNX: {row['onnx'][2]}" for row in rows.values() if row.get("onnx", ["passed"])[0] != "passed"
        ]
        parts += ["", *notes, ""]
    return "\n".join(parts).rstrip() + "\n"


INTRODUCTION = """# Real models

Every pass on trained models that come inside Python packages, made by `make real` (`benchmarks/real_models.py`, the models in
`tests/support/real_models.py`). ✓: the rewritten model passed every check; a pass that does not fit says why below the table.
The figure is that of held-out inputs: a loss in nats, or the similarity to what the dense model returns, 1 being the same. Where a
pass is fitted on calibration data, the figure without is given first. Parameters, FLOPs a token, the time of a forward, and that of
a token decoded on the cache are ratios, new to dense, the times with their least and greatest of five rounds.
"""


def table_row(spec: str, row: dict[str, Any]) -> str:
    if row["verdict"] != "verified":
        cells = [row["verdict"], "", "", "", "", "", ""]
    else:
        checks = [status for status, *_ in row["checks"].values()]
        verdict = f"✓ {checks.count('passed')} passed" + (f", {checks.count('skipped')} skipped" if "skipped" in checks else "")
        start = f"{row['start']:.3f}" if "uncalibrated" not in row else f"{row['uncalibrated']:.3f} → {row['start']:.3f}"
        parameters, flops = (after / before for before, after in (row["parameters"], row["flops"]))
        onnx = "✓" if row["onnx"][0] == "passed" else row["onnx"][0]
        times = [
            f"{row[name][0]:.2f} ({row[name][1]:.2f}–{row[name][2]:.2f})" if name in row else "" for name in ("speed", "decoding")
        ]
        cells = [verdict, start, f"{parameters:.2f}", f"{flops:.2f}", *times, f"{onnx} {row['onnx'][1]}"]
    return f"| `{row.get('spec', spec)}` | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
