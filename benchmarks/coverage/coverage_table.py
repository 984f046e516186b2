"""Writes benchmarks/results/coverage.json: what retrofit achieves on every architecture of the zoo.

    PYTHONPATH=tests python benchmarks/coverage/coverage_table.py [--only PATTERN] [--passes PATTERN] [--jobs N]
        -o benchmarks/results/coverage.json

Each architecture is assessed in a worker process under a time limit. Results are kept in a JSON file as they come, so that
a run that was interrupted goes on where it stopped, or from what the page says where that file is gone; `--again` assesses anew
what `--only` selects.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time

from sweeping import Row, Task, all_ids, assessed, cell, in_mixed_order, line, parser_of, write_page, write_whole
from written_page import results_of

HEADINGS = ("architecture", "captured", "anatomy", "AltUp exact", "generates", "trains", "saved and loaded")
CELLS = ("captured", "anatomy", "exact", "generates", "trains", "saved")
RECYCLED = "`embedding=recycled`"
OTHERS = {  # passes other than AltUp, with sizes that fit the tiny models and their short inputs
    "activation-sparsity": "activation-sparsity",
    "sparse-ffn": "sparse-ffn(sparsity=8)",
    "shared-moe": "shared-moe(experts=2, k=1)",
    "memory": "memory(lookup=token-id)",
    "memory(lookup=ngram)": "memory(lookup=ngram, buckets=97)",
    "memory(beside=values)": "memory(beside=values)",
    "memory(form=gated)": "memory(form=gated, rank=4)",
    "recurrence": "recurrence(rank=4)",
    "lsh-attention": "lsh-attention(rounds=2, buckets=4, chunk=4)",
    "reversible": "reversible",
    "merge-cross-attention": "merge-cross-attention",
    "sparse-qkv": "sparse-qkv(kernel=2)",
    "sequence-altup": "sequence-altup(k=2, layers=all)",
    "sparse-loss": "sparse-loss(modules=2)",
}
SPEC = "altup(k=2)"


def main() -> int:
    options = parse()
    results: dict[str, Row] = {}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    elif options.output.exists():
        results = results_of(options.output, CELLS)
    everything = all_ids()
    selected = [name for name in everything if re.search(options.only, name)]
    passes = [name for name in ("altup", *OTHERS) if re.search(options.passes, name)]
    tasks = [(name, one) for name in in_mixed_order(selected) for one in passes]
    waiting = [task for task in tasks if options.again or task[1] not in results.get(task[0], {})]
    started = time.monotonic()
    for count, ((name, one), found) in enumerate(assessed(waiting, options.jobs, options.limit, find, failed), start=1):
        results.setdefault(name, {})[one] = found
        write_whole(options.results, json.dumps(results, indent=1, ensure_ascii=False))
        summary = "  ".join(f"{cell}: {found[cell][:40]}" for cell in CELLS) if one == "altup" else found["cell"][:160]
        print(f"[{count}/{len(waiting)} {time.monotonic() - started:.0f} s] {name} {one}  {summary}", flush=True)
        if time.monotonic() - started > 60 * options.minutes:
            break
    rows = [results[name]["altup"] for name in everything if "altup" in results.get(name, {})]
    cells = {
        name: {one: results[name][one]["cell"] for one in OTHERS if one in results[name]} for name in everything if name in results
    }
    write_page(options.output, table(rows, cells))
    print(f"{len(rows)} architectures in {options.output}")
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "coverage")
    parser.set_defaults(jobs=os.cpu_count() or 1)
    parser.add_argument("--passes", default="", metavar="PATTERN", help="passes whose name the pattern matches")
    return parser.parse_args()


def find(task: Task) -> Row:
    """What was found out about one architecture and one pass."""
    from assessment import Row as Assessed
    from assessment import assess, assess_pass, one_line

    name, one = task
    try:
        return dataclasses.asdict(assess(name, SPEC)) if one == "altup" else {"cell": assess_pass(name, OTHERS[one])}
    except Exception as error:
        problem = f"no: {one_line(error)}"
        return dataclasses.asdict(Assessed(name, captured=problem)) if one == "altup" else {"cell": problem}


def failed(task: Task, why: str) -> Row:
    """The row of a task whose worker died or took too long."""
    name, one = task
    if one != "altup":
        return {"cell": f"no: {why}"}
    return {"id": name, "transformer": False, "dense": "", **dict.fromkeys(CELLS, "—"), "captured": f"no: {why}"}


def table(rows: list[Row], cells: dict[str, dict[str, str]]) -> str:
    """The Markdown page: what was measured, the summary, one line an architecture, the dense models' own faults, other passes."""
    import torch
    import transformers

    return "\n".join(
        [
            "# Coverage",
            "",
            f"What `{SPEC}` does on a tiny random model of each architecture in transformers' auto classes for causal, masked and",
            f"sequence-to-sequence language modelling and image classification (transformers {transformers.__version__}, "
            f"torch {torch.__version__.partition('+')[0]}, float32).",
            "Written by `PYTHONPATH=tests python benchmarks/coverage/coverage_table.py`; do not edit.",
            "",
            *summary(rows),
            "",
            *legend(),
            "",
            line(HEADINGS),
            line(["---"] * len(HEADINGS)),
            *(line([f"`{row['id']}`", *(cell(row[name]) for name in CELLS)]) for row in rows),
            "",
            "## Where the dense model itself misbehaves",
            "",
            *(f"- `{row['id']}`: {cell(row['dense'])}" for row in rows if row["dense"]),
            "",
            *others(cells),
        ]
    )


def others(cells: dict[str, dict[str, str]]) -> list[str]:
    """The section on the other passes: yes where the rewritten model came through every check of `retrofit.verify`."""
    tried = [one for one in OTHERS if any(one in row for row in cells.values())]
    specs = ", ".join(f"`{OTHERS[one]}`" for one in tried)
    kinds = {"yes": "yes", "refused": "refused", "no:": "no", "not captured": "not captured", "dense cannot": "dense cannot"}
    lines = ["## The other passes", "", f"{specs}, each on the dense model, with every check of `retrofit.verify`."]
    lines += ["—: not tried yet.", ""]
    lines += [line(["", "tried", *kinds.values()]), line(["---", *["---:"] * (1 + len(kinds))])]
    for one in tried:
        found = [row[one] for row in cells.values() if one in row]
        lines.append(line([one, str(len(found)), *(str(sum(text.startswith(start) for text in found)) for start in kinds)]))
    lines += ["", line(["architecture", *tried]), line(["---"] * (1 + len(tried)))]
    lines += [line([f"`{name}`", *(cell(row.get(one, "—")) for one in tried)]) for name, row in cells.items() if row]
    return [*lines, ""]


def summary(rows: list[Row]) -> list[str]:
    """Counts a column: of the architectures that could show it, how many do."""
    runnable = [row for row in rows if not row["captured"].startswith("dense cannot")]
    mixed = [row for row in runnable if row["transformer"]]
    both = "a residual stack has attentions and feed-forwards"
    lines = [f"{len(rows)} architectures, of which {len(runnable)} can be built and run from transformers alone.", ""]
    lines += ["| | yes | of | |", "| --- | ---: | ---: | ---: |"]
    lines += [counted(heading, runnable, name) for heading, name in (("captured", "captured"), ("anatomy", "anatomy"))]
    lines += [counted("AltUp exact", runnable, "exact"), counted(f"AltUp exact, where {both}", mixed, "exact")]
    lines += [counted(f"AltUp exact or exact with {RECYCLED}, where {both}", mixed, "exact", recycled=True)]
    for name in ("generates", "trains", "saved"):
        judged = [row for row in runnable if row[name] != "—" and not row[name].startswith("dense cannot")]
        lines.append(counted(f"{HEADINGS[CELLS.index(name) + 1]}, where rewritten", judged, name))
    return lines


def counted(heading: str, rows: list[Row], name: str, recycled: bool = False) -> str:
    good = sum(row[name].startswith("yes") and (name != "exact" or recycled or "recycled only" not in row[name]) for row in rows)
    return f"| {heading} | {good} | {len(rows)} | {100 * good / max(len(rows), 1):.1f} % |"


def legend() -> list[str]:
    return [
        "- captured: `torch.export` yields the model's graph; anatomy: its residual stacks were found in it.",
        "- AltUp exact: on another batch, length and image size than captured, also padded, no logit is off by more than 1e-5 of",
        f"  the largest. Recycled only: the pass is refused, and its fix, {RECYCLED}, is what was assessed.",
        "- generates: greedily, with and without a cache, the dense model's tokens.",
        "- trains: every new parameter that is not frozen gets a finite gradient and three AdamW steps lower the loss.",
        "- saved and loaded: through `save_pretrained` and the stock auto class, the logits are the same bits.",
        "- —: does not apply, or was not reached; dense cannot: the unmodified model fails the same check.",
    ]


if __name__ == "__main__":
    sys.exit(main())
