"""Every pass on trained models with real inputs: whether the result is verified, what it is worth at step 0, what it costs, ONNX.

    PYTHONPATH=tests python benchmarks/real_models.py --results real.json -o benchmarks/results/real_models.json   # make real
    PYTHONPATH=tests python benchmarks/real_models.py --results real.json --model SmolLM2 --only sparse   # some rows
    PYTHONPATH=tests python benchmarks/real_models.py --results real.json --again   # those that were not verified
    PYTHONPATH=tests python benchmarks/real_models.py --results real.json --timings   # times and memory of verified rows, anew
    PYTHONPATH=tests python benchmarks/real_models.py --results real.json --pages -o real.md   # the page alone

Each row is a process of its own, bounded in time and memory, and is kept in the results as soon as it is done: a run that was
stopped goes on where it was. The models are those of `tests/support/real_models.py`. A pass that uses calibration data is also
tried without; the figures are those of held-out inputs. Times are processor time, dense and rewritten in turn in one process, with
OMP_NUM_THREADS=1. Other work on the machine still brings ratios nearer to 1: `--timings` takes them again on an idle one, of models
rewritten without calibration, which makes no difference to them.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import interleaved

sys.path.insert(0, str(Path(__file__).parent / "coverage"))
from sweeping import write_page

LIMIT = 3600  # seconds for one row
MEMORY = 14 << 30  # bytes that one row may allocate
ROUNDS = 5  # of forwards that are timed in turn
Action = Callable[[str, str], dict[str, Any]]  # on a model, with a spec
PROCESSES = multiprocessing.get_context("fork")  # what is imported once serves every row
TOKENS = (4, 20)  # decoded from a prompt: the difference is what a token costs
SPECS = (
    "altup(k=2)",
    "altup(k=2, embedding=recycled)",
    "sum",
    "memory",
    "memory(lookup=softmax, buckets=16, rank=4)",
    "recurrence",
    "lsh-attention",
    "reversible",
    "merge-cross-attention",
    "merge-cross-attention(weight=0.01)",
    "shared-moe(groups=0, experts=4)",
    "shared-moe(groups={half}, experts=4)",
    "sparse-ffn(sparsity=8, active=1)",
    "sparse-ffn(sparsity=8, active=2)",
    "sparse-ffn(sparsity=8, active=4)",
    "sparse-ffn(sparsity=8, active=4, controller=gate)",
    "sparse-qkv",
    "sparse-loss",
    "sequence-altup(k=2)",
)


def main() -> None:
    options = read_options()
    rows = [] if options.pages else planned_rows(options, read_results(options.results))
    if rows:
        import_everything()
    for name, spec in rows:
        began = time.monotonic()
        action = time_row if options.timings else try_row
        found = {**run_row(name, spec, action), "seconds": round(time.monotonic() - began)}
        results = read_results(options.results)  # another run may have added some
        known = results.get(f"{name}: {spec}", {})
        if options.timings and "speed" not in found:
            print(f"{name}: {spec}: not timed, {found.get('why')}", flush=True)
            continue
        if options.timings:
            found = {**known, **found, "seconds": known["seconds"]}
        results[f"{name}: {spec}"] = found
        options.results.parent.mkdir(parents=True, exist_ok=True)
        replaced = options.results.with_suffix(".new")
        replaced.write_text(json.dumps(results, indent=1))
        replaced.replace(options.results)
        print(f"{name}: {spec}: {found['verdict']}, {found['seconds']} s", flush=True)
    if options.output:
        write_page(options.output, page(read_results(options.results)))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The rows that have been run, by model and spec."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("real_models.json"))
    parser.add_argument("-o", "--output", type=Path, help="the page to write")
    parser.add_argument("--pages", action="store_true", help="try nothing, write the page")
    parser.add_argument("--model", action="append", help="one of the models; may be given several times")
    parser.add_argument("--only", default="", help="rows whose spec holds this text")
    parser.add_argument("--skip", help="leave out rows whose spec holds this text")
    parser.add_argument("--again", action="store_true", help="rows that were not verified are tried again")
    parser.add_argument("--timings", action="store_true", help="times and memory of verified rows are measured again, nothing else")
    parser.add_argument("--anew", action="store_true", help="all rows are tried again")
    return parser.parse_args()


def import_everything() -> None:
    """All that a row imports is there, and nothing has been computed."""
    import onnxruntime  # noqa: F401
    import onnxscript.rewriter.ort_fusions._core  # noqa: F401
    import torch._dynamo
    import torch._inductor.config
    import torch.onnx._internal.exporter._core  # noqa: F401
    import transformers.exporters.exporter_onnx  # noqa: F401

    import retrofit.onnx.exporter
    import retrofit.rewriting  # noqa: F401
    from retrofit.passbase.protocol import load_pass, pass_names

    for name in pass_names():
        load_pass(name)


def planned_rows(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """What there is left to do: models and specs."""
    from support.real_models import REAL_MODELS

    rows = []
    for name, model in REAL_MODELS.items():
        if not model.installed or (options.model and name not in options.model):
            continue
        for spec in SPECS:
            known = results.get(f"{name}: {spec}")
            wanted = options.only in spec and not (options.skip and options.skip in spec)
            if options.timings:
                wanted = wanted and known is not None and known["verdict"] == "verified"
            elif known is not None and not options.anew:
                wanted = wanted and options.again and not is_complete(known)
            if wanted:
                rows.append((name, spec))
    return rows


def is_complete(row: dict[str, Any]) -> bool:
    return row["verdict"] == "verified" and row["onnx"][0] == "passed"


def run_row(name: str, spec: str, action: Action) -> dict[str, Any]:
    """What the action returns in a process of its own, which takes neither more memory nor more time than it may."""
    receiving, sending = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=send_row, args=(name, spec, action, sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(LIMIT):
            return {"verdict": "failed", "why": f"over {LIMIT} s"}
        return dict(receiving.recv())
    except EOFError:
        return {"verdict": "failed", "why": "its process ended without a word"}
    finally:
        process.kill()
        process.join()


def send_row(name: str, spec: str, action: Action, sending: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        sending.send(action(name, spec))
    except Exception as error:
        lines = traceback.format_exc()
        sending.send({"verdict": "failed", "why": f"{type(error).__name__}: {error}".splitlines()[0], "trace": lines[-4000:]})


# ── One row ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def try_row(name: str, template: str) -> dict[str, Any]:
    """One pass on one model: applied with every check, measured on held-out inputs, exported to ONNX."""
    import torch
    from support.real_models import REAL_MODELS

    import retrofit
    from retrofit.errors import RetrofitError, VerificationError
    from retrofit.passbase.protocol import as_pass
    from retrofit.rewriting import apply_reported

    torch.manual_seed(0)
    real = REAL_MODELS[name]
    dense = real.load()
    try:
        spec = filled(template, dense, example_of(real))
        chosen = as_pass(spec)
    except RetrofitError as error:
        return {"verdict": "refused", "why": sentence(error)}
    outputs = real.outputs(dense)
    row: dict[str, Any] = {"spec": spec, "dense": real.measure(dense, outputs)}
    calibration = real.calibration() if chosen.calibrates else None
    stages = Stages()
    try:
        applied = apply_reported(real.load(), chosen, example_inputs=example_of(real), calibration=calibration)
    except VerificationError as error:
        broken = [check for check in error.report.checks if check.status == "failed"]
        return {**row, "verdict": "failed", "why": "; ".join(f"{one.name}: {one.why or one.measured}" for one in broken)}
    except RetrofitError as error:
        return {**row, "verdict": "refused", "why": sentence(error)}
    stages.ends("apply")
    assert applied.report is not None
    row |= {"verdict": "verified", "exact": all(one.exact for one in applied.rewrites)}
    row["checks"] = {check.name: [check.status, check.measured, check.why, check.seconds] for check in applied.report.checks}
    row["sites"] = sum(len(one.sites) for one in applied.rewrites)
    row["parameters"] = [applied.parameters_before, applied.parameters_after]
    row["flops"] = [applied.flops_before, applied.flops_after]
    row["start"] = real.measure(applied.model, outputs)
    stages.ends("figure")
    row |= costs(real, dense, applied.model)
    stages.ends("costs")
    row["onnx"] = exported(real, applied.model)
    stages.ends("onnx")
    if calibration is not None and not row["exact"]:
        plain = retrofit.apply(real.load(), chosen, example_inputs=example_of(real), verify=False)
        row["uncalibrated"] = real.measure(plain, outputs)
        stages.ends("uncalibrated")
    return {**row, "stages": stages.seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def time_row(name: str, template: str) -> dict[str, Any]:
    """The times and the memory of one pass on one model."""
    import torch
    from support.real_models import REAL_MODELS

    import retrofit

    torch.manual_seed(0)
    real = REAL_MODELS[name]
    dense, example = real.load(), example_of(real)
    model = retrofit.apply(real.load(), filled(template, dense, example), example_inputs=example, verify=False)
    return costs(real, dense, model)


def exported(real: Any, model: Any) -> list[str]:
    """How the check `onnx` came out: status, what was measured, why; skipped where the dense model cannot be exported either."""
    import retrofit

    def check(one: Any) -> Any:
        return retrofit.verify(one, example_inputs=example_of(real), checks=["onnx"])["onnx"]

    found = check(model)
    if found.status == "failed" and check(real.load()).status != "passed":
        return ["skipped", "", f"the dense model cannot be exported either: {found.why}"]
    return [found.status, found.measured, found.why]


class Stages:
    """The processor time of one stage after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.process_time()

    def ends(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name], self.began = now - self.began, now


def example_of(real: Any) -> dict[str, Any] | None:
    """The example inputs of a model whose own cannot be derived: one that sees or hears."""
    first = {key: value for key, value in real.held_out()[0].items() if key != "labels"}
    return None if "input_ids" in first else first


def filled(template: str, model: Any, example: dict[str, Any] | None) -> str:
    """The spec, with half the number of the model's layers where it says so; `example` are inputs that it is captured on."""
    if "{half}" not in template:
        return template
    import retrofit

    return template.format(half=max(1, sum(len(stack.layers) for stack in retrofit.inspect(model, example).stacks) // 2))


def sentence(error: Any) -> str:
    """An error in one line: what, why, the fix."""
    parts = [error.what, error.why, f"fix: {error.remedy}" if error.remedy else ""]
    return " – ".join(part for part in parts if part)


def costs(real: Any, dense: Any, model: Any) -> dict[str, Any]:
    """Rewritten to dense: the time of a forward on held-out inputs, that of a token decoded by `generate`, and the memory.

    Memory: parameters and buffers, and what a forward allocates on top of them at its peak.
    """
    import torch

    from retrofit.inputs.model_memory import own_bytes

    batch = {key: value for key, value in real.held_out()[0].items() if key != "labels"}
    sides = {"dense": dense.eval(), "rewritten": model.eval()}
    with torch.no_grad():
        found: dict[str, Any] = {"speed": ratios(times({name: lambda one=one: one(**batch) for name, one in sides.items()}))}
        if real.prompt is not None:
            few, many = (
                times({name: functools.partial(decode, one, real.prompt(), count) for name, one in sides.items()})
                for count in TOKENS
            )
            found["decoding"] = ratios(
                {name: [late - early for late, early in zip(many[name], few[name], strict=True)] for name in sides}
            )
        bytes_of = {name: own_bytes(one) + peak_bytes(lambda one=one: one(**batch)) for name, one in sides.items()}
    return {**found, "memory": bytes_of["rewritten"] / bytes_of["dense"]}


def decode(model: Any, prompt: dict[str, Any], count: int) -> None:
    model.generate(**prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)


def times(tasks: dict[str, Any]) -> dict[str, list[float]]:
    """Processor seconds of every task in every round."""
    return interleaved(tasks, argparse.Namespace(rounds=ROUNDS, clock="cpu", device="cpu"))


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    """The median of the rounds' ratios, and the least and greatest of them."""
    found = [mine / theirs for mine, theirs in zip(seconds["rewritten"], seconds["dense"], strict=True)]
    return [statistics.median(found), min(found), max(found)]


def peak_bytes(action: Any) -> int:
    """The most memory that the action took at one time, what operations need while they run included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def page(results: dict[str, dict[str, Any]]) -> str:
    """The results as a page of tables, a table for each model."""
    from support.real_models import REAL_MODELS

    parts = [INTRODUCTION]
    for name, model in REAL_MODELS.items():
        rows = {spec: row for spec in SPECS if (row := results.get(f"{name}: {spec}"))}
        parts.append(f"## {name}: {model.what}\n\nFrom the package `{model.package}`.{dense_figure(model, rows)}\n")
        if rows:
            parts.append(f"| pass | checks | {model.figure} at step 0 | parameters | FLOPs | memory | time | decoding | ONNX |")
            parts.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
            parts += [table_row(spec, row) for spec, row in rows.items()]
        parts += ["", *reasons(rows)]
        if missing := [f"`{spec.format(half='n/2')}`" for spec in SPECS if spec not in rows]:
            parts.append(f"- Not run yet: {', '.join(missing) if rows else 'any of its rows'}.")
        parts.append("")
    peaks = [row["peak"] for row in results.values() if "peak" in row]
    if peaks:
        parts.append(f"The row that took most memory took {max(peaks) / 1e9:.1f} GB, everything included.")
    return "\n".join(parts).rstrip() + "\n"


INTRODUCTION = """# Real models

Every pass on trained models that come inside Python packages, made by `make real` (`benchmarks/real_models.py`, the models in
`tests/support/real_models.py`).

- **checks**: ✓, every check passed, so many of them; a check is skipped where there is nothing to check (a cache, of a model
  without one). A pass that does not fit is refused, and the reason is below the table.
- **at step 0**: on held-out inputs, a loss in nats, or the similarity to what the dense model returns, 1 being the same. Where a
  pass is fitted on calibration data: without it → with it.
- **parameters**, **FLOPs** a token, **memory** (weights, and what a forward allocates at its peak), **time** of a forward on
  held-out inputs and **decoding**, the time of a token that `generate` decodes on its cache: ratios, rewritten to dense. Times are
  processor time on one thread, taken in turn, with the least and the greatest of five rounds. Most were taken while the machine did
  other work too, which brings them nearer to 1.
- **ONNX**: how far the exported file lies from torch, relative to the largest output, on inputs of other shapes than it was traced
  with.
"""


def dense_figure(model: Any, rows: dict[str, dict[str, Any]]) -> str:
    dense = next((row["dense"] for row in rows.values() if "dense" in row), None)
    return f" Its loss is {dense:.3f}." if dense is not None and model.figure == "loss" else ""


def table_row(spec: str, row: dict[str, Any]) -> str:
    if row["verdict"] != "verified":
        cells = [row["verdict"], "", "", "", "", "", "", ""]
    else:
        checks = [status for status, *_ in row["checks"].values()]
        verdict = f"✓ {checks.count('passed')}" + (f", {checks.count('skipped')} skipped" if "skipped" in checks else "")
        start = f"{row['start']:.3f}" if "uncalibrated" not in row else f"{row['uncalibrated']:.3f} → {row['start']:.3f}"
        parameters, flops = (after / before for before, after in (row["parameters"], row["flops"]))
        times = [interval(row[name]) if name in row else "–" for name in ("speed", "decoding")]
        cells = [verdict, start, f"{parameters:.2f}", f"{flops:.2f}", f"{row['memory']:.2f}", *times, onnx_cell(*row["onnx"])]
    return f"| `{row.get('spec', spec)}` | " + " | ".join(cells) + " |"


def interval(ratio: list[float]) -> str:
    middle, least, most = ratio
    return f"{middle:.2f} ({least:.2f}–{most:.2f})"


def onnx_cell(status: str, measured: str, why: str) -> str:
    if status != "passed":
        return status
    return f"✓ {measured.split()[0]}" + (", with its cache" if "with the cache" in measured else "")


def reasons(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Why a pass or a check was refused, failed or left out, one line for those of the same reason."""
    found: dict[str, list[str]] = {}
    for spec, row in rows.items():
        named = f"`{row.get('spec', spec)}`"
        if row["verdict"] != "verified":
            found.setdefault(" ".join(row["why"].split()), []).append(named)
            continue
        if row["onnx"][0] != "passed" or row["onnx"][2]:
            found.setdefault(f"ONNX: {' '.join(row['onnx'][2].split())}", []).append(named)
        for check, (status, _, why, _) in row["checks"].items():
            if status == "skipped":
                found.setdefault(f"{check} skipped: {' '.join(why.split())}", []).append(named)
    verified = sum(row["verdict"] == "verified" for row in rows.values())
    return [f"- {'all' if 3 < verified == len(specs) else ', '.join(specs)}: {why}" for why, specs in found.items()]


if __name__ == "__main__":
    main()
