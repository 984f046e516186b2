"""Writes benchmarks/results/mutants.json: faults put into the sources of the passes, one at a time, and which check reports each.

    PYTHONPATH=tests:benchmarks/coverage python benchmarks/mutants/mutants_table.py [--only PATTERN] [--jobs N]
        -o benchmarks/results/mutants.json

Each mutant is put into a copy of the sources; the pass is applied from there to tiny models, with every check, up to the first
report. The sources as they are must come through the trials with a report without one. Of a mutant that no check reports the test
that it names is run on that copy. Results are kept in a JSON file as they come, each with a hash of the mutant and one of the
sources of its pass; where that file is gone, a run goes on from the page. A later run makes mutants that are new or changed; with
`--sources` also those whose pass has changed, and with `--again` all that `--only` selects, as after a change of a check;
`--passed` selects those that no check reported. Without `--only` the page is written, also where `--minutes` ended it: it says of
which passes some mutants have no result yet, or one of earlier sources.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import activation_sparsity_mutants
import altup_mutants
import lsh_attention_mutants
import memory_mutants
import merge_cross_attention_mutants
import recurrence_mutants
import reversible_mutants
import sequence_altup_mutants
import shared_moe_mutants
import sparse_ffn_mutants
import sparse_loss_mutants
import sparse_qkv_mutants
from mutant import Mutant
from observing import Row, key_of, observe
from sweeping import assessed, cell, cells_of, line, parser_of, read_page, write_page, write_whole

TABLES = (
    activation_sparsity_mutants,
    altup_mutants,
    lsh_attention_mutants,
    memory_mutants,
    merge_cross_attention_mutants,
    recurrence_mutants,
    reversible_mutants,
    sequence_altup_mutants,
    shared_moe_mutants,
    sparse_ffn_mutants,
    sparse_loss_mutants,
    sparse_qkv_mutants,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for table in TABLES for mutant in table.MUTANTS)
CONTROL = "control"
REFUSED, NOTHING = "refused", "—"  # what came of a control
ALARM, LIMIT = 240, 7200.0  # seconds: of the forked process on its processor, and by the clock of the one that forks it
ORDER = (
    *("activation-sparsity", "altup", "lsh-attention", "memory", "merge-cross-attention", "recurrence", "reversible", "sum"),
    *("sequence-altup", "shared-moe", "sparse-ffn", "sparse-loss", "sparse-qkv"),
)
Task = tuple[str, str]  # the pass, and a mutant's fault or a control's trial


def main() -> int:
    options = parse()
    require_sound(MUTANTS)
    results = Results(options)
    if results.make(mutant_keys()):
        results.make(control_keys(results.known(mutant_keys())), sources=True)
    known, latest = results.known(mutant_keys()), results.latest(mutant_keys())
    trials = control_keys(latest)
    controls = results.known(trials)
    alarms = {task: row for task, row in controls.items() if row["by"] and not is_right_refusal(task, row, known)}
    for task, row in alarms.items():
        print(f"without a fault, {name_of(task)} is reported by {row['by']}: {row['why']}")
    rows = [(mutant, latest[mutant.method, mutant.wrong]) for mutant in ordered() if (mutant.method, mutant.wrong) in latest]
    print(f"{len(known)} of {len(MUTANTS)} mutants have a result for the sources as they are, {len(rows)} have one; {score(rows)}")
    if not alarms and not options.only:
        write_page(options.output, page(rows, controls, len(trials), latest.keys() - known.keys()))
    return bool(alarms)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "mutants")
    parser.add_argument("--passed", action="store_true", help="only mutants that no check reported")
    parser.add_argument("--sources", action="store_true", help="also those whose pass has changed since")
    return parser.parse_args()


def require_sound(mutants: Iterable[Mutant]) -> None:
    """Raises `ValueError` for a mutant whose text is not found once, or two of one name."""
    seen: set[str] = set()
    for mutant in mutants:
        mutant.mutated()
        if mutant.name in seen or not mutant.trials:
            raise ValueError(f"{mutant.name} is there twice, or has no trial")
        seen.add(mutant.name)


# ── What there is to do ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Results:
    """What came of each task, and the hashes of what it depends on, kept in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: dict[str, Row] = {}
        if options.results.exists():
            self.rows = json.loads(options.results.read_text())
        elif options.output.exists():
            self.rows = results_of(options.output)

    def make(self, keys: Mapping[Task, str], sources: bool = False) -> bool:
        """The selected tasks that have no result yet, or with `sources` none of these, are done; False where there was no time."""
        options, started = self.options, time.monotonic()
        waiting = self.waiting(keys, sources)
        for count, (task, found) in enumerate(assessed(waiting, options.jobs, LIMIT, find, failed), start=1):
            self.rows[name_of(task)] = {**found, "key": keys[task]}
            write_whole(options.results, json.dumps(self.rows, indent=1, ensure_ascii=False))
            said = f"{found['by'] or 'PASSED'}  {found['why'][:100]}"
            print(f"[{count}/{len(waiting)} {time.monotonic() - started:.0f} s] {name_of(task)}  {said}", flush=True)
            if time.monotonic() - started > 60 * options.minutes:
                return False
        return True

    def waiting(self, keys: Mapping[Task, str], sources: bool = False) -> list[Task]:
        """The selected tasks without a result of theirs, or with `sources` without one of the sources as they are."""
        options, found = self.options, list[Task]()
        for task, key in keys.items():
            if re.search(options.only, name_of(task)) and not (options.passed and self.by(task)):
                own, known = key.partition("-")[0], str(self.rows.get(name_of(task), {}).get("key", ""))
                is_known = known == key if sources or options.sources else known.partition("-")[0] == own
                found += [task] * (options.again or not is_known)
        return found

    def by(self, task: Task) -> str:
        """The check that reported a task when it was last tried, "" where none did."""
        return str(self.rows.get(name_of(task), {}).get("by", ""))

    def known(self, keys: Mapping[Task, str]) -> dict[Task, Row]:
        """The results that are those of the sources as they are."""
        return {task: row for task, row in self.latest(keys).items() if row["key"] == keys[task]}

    def latest(self, tasks: Iterable[Task]) -> dict[Task, Row]:
        """The last result of each task, of earlier sources too."""
        return {task: self.rows[name_of(task)] for task in tasks if name_of(task) in self.rows}


def ordered() -> list[Mutant]:
    return sorted(MUTANTS, key=lambda mutant: ORDER.index(mutant.method))


def is_right_refusal(control: Task, row: Row, known: Mapping[Task, Row]) -> bool:
    """Whether the pass refuses the trial's model without a fault, and what was reported is that a mutant does not."""
    trial = control[1].removeprefix(f"{CONTROL} ")
    of_trial = [one for task, one in known.items() if task[0] == control[0] and one["trial"] == trial]
    return bool(row.get("refused")) and all(one["by"] != row["by"] for one in of_trial)


def mutant_keys() -> dict[Task, str]:
    """Every mutant and the hash of what its result depends on; last those that name a test, which takes longer than the checks."""
    return {
        (mutant.method, mutant.wrong): key_of(mutant.method, mutant.path, mutant.old, mutant.new, mutant.trials)
        for mutant in sorted(ordered(), key=lambda one: bool(one.test))
    }


def control_keys(results: Mapping[Task, Row]) -> dict[Task, str]:
    """The trials in which something was reported, without a fault: only where these pass does a report say something.

    Where a page does not say in which trial, it is one of the mutant's.
    """
    reported = {task: row["trial"] for task, row in results.items() if row["by"]}
    trials = {
        (mutant.method, str(trial))
        for mutant in MUTANTS
        for trial in mutant.trials
        if reported.get((mutant.method, mutant.wrong)) in ("", str(trial))
    }
    return {(method, f"{CONTROL} {trial}"): key_of(method, trial) for method, trial in sorted(trials)}


def name_of(task: Task) -> str:
    return f"{task[0]}: {task[1]}"


def find(task: Task) -> Row:
    """What came of a task."""
    for mutant in MUTANTS:
        if (mutant.method, mutant.wrong) == task:
            return observe(mutant, mutant.trials, ALARM)
        for trial in mutant.trials:
            if (mutant.method, f"{CONTROL} {trial}") == task:
                return observe(None, (trial,), ALARM)
    raise ValueError(f"there is no {name_of(task)}")


def failed(task: Task, why: str) -> Row:
    return {"by": "no end", "why": why, "trial": "", "passed": []}


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def score(rows: Sequence[tuple[Mutant, Row]]) -> str:
    """How many of the mutants that are faults a check reported."""
    faults = [(mutant, row) for mutant, row in rows if not mutant.equivalent]
    reported = sum(bool(row["by"]) for _, row in faults)
    share = 100 * reported / max(len(faults), 1)
    return f"{reported} of {len(faults)} that are faults are reported by a check ({share:.1f} %)"


def page(rows: Sequence[tuple[Mutant, Row]], controls: Mapping[Task, Row], all_controls: int, earlier: Iterable[Task]) -> str:
    """The Markdown page: the score, a count a pass, a line a mutant; `earlier` are those whose result is of earlier sources."""
    refused = sum(bool(row["by"]) for row in controls.values())
    tried = f"the {all_controls}" if len(controls) == all_controls else f"{len(controls)} of the {all_controls}"
    but = f", but for {refused} that they refuse and a mutant does not" if refused else ""
    tasks = {(mutant.method, mutant.wrong) for mutant in MUTANTS}
    missing = tasks - {(mutant.method, mutant.wrong) for mutant, _ in rows}
    notes = [f"Not run yet: {by_pass(missing)}."] * bool(missing)
    notes += [f"Of earlier sources, and not made again since, are the results of {by_pass(earlier)}."] * bool(list(earlier))
    lines = [
        "# Mutants",
        "",
        f"{len(rows)} faults were put into the sources of the passes, one at a time; from each mutated copy the pass was applied",
        "to a tiny GPT-2, Llama, GPT-NeoX, T5, BART or BERT with every check, up to the first report. The sources as they are come",
        f"through {tried} trials in which something was reported without a report{but}. {score(rows)}.",
        "Written by `make mutants`; the mutants are in `benchmarks/mutants/`; do not edit.",
        *notes,
        "",
        line(["pass", "mutants", "reported by a check", "by a unit test", "equivalent"]),
        line(["---", *["---:"] * 4]),
    ]
    for method in ORDER:
        of_pass = [(mutant, row) for mutant, row in rows if mutant.method == method]
        lines.append(line([f"`{method}`", *map(str, counts(of_pass))]))
    lines.append(line(["all", *map(str, counts(rows))]))
    lines += ["", line(["pass", "what is wrong", "reported by", "it says", "trial", "key"]), line(["---"] * 6)]
    named = [((mutant.method, mutant.wrong), verdict(mutant, row), row) for mutant, row in rows]
    named += [(task, REFUSED if row["by"] else NOTHING, row) for task, row in controls.items()]
    for (method, wrong), found, row in named:
        lines.append(line([f"`{method}`", cell(wrong), found, cell(row["why"]), cell(row["trial"]), row["key"]]))
    return "\n".join([*lines, ""])


def results_of(path: Path) -> dict[str, Row]:
    """Results by name, as the page shows them."""
    found: dict[str, Row] = {}
    for text in read_page(path).splitlines():
        method, *values = cells_of(text) if text.startswith("| `") else [""]
        if len(values) == len(("what is wrong", "reported by", "it says", "trial", "key")):
            wrong, reported, why, trial, key = values
            by = "" if reported.startswith(("passed", "equivalent: ", NOTHING)) else "apply" if reported == REFUSED else reported
            row = {"by": by, "why": why, "trial": trial, "key": key, "refused": reported == REFUSED}
            found[f"{method.strip('`')}: {wrong}"] = row | {"test": reported.endswith("fails")}
    return found


def by_pass(tasks: Iterable[Task]) -> str:
    """How many of the tasks are of each pass."""
    return ", ".join(f"`{method}` ({count})" for method, count in sorted(Counter(method for method, _ in tasks).items()))


def counts(rows: Sequence[tuple[Mutant, Row]]) -> tuple[int, int, int, int]:
    faults = [(mutant, row) for mutant, row in rows if not mutant.equivalent]
    by_test = sum(bool(row.get("test")) and not row["by"] for _, row in faults)
    return len(rows), sum(bool(row["by"]) for _, row in faults), by_test, len(rows) - len(faults)


def verdict(mutant: Mutant, row: Row) -> str:
    """Which check reported the mutant, else which test does, or why it is no fault."""
    if row["by"]:
        return str(row["by"])
    if mutant.equivalent:
        return f"equivalent: {cell(mutant.equivalent)}"
    return f"passed; `{mutant.test}` fails" if row.get("test") else "passed"


if __name__ == "__main__":
    sys.exit(main())
