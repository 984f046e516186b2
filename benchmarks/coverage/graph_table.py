"""Writes benchmarks/results/graph_coverage.json: models as FX graph modules, against their module trees and under every pass.

    PYTHONPATH=tests python benchmarks/coverage/graph_table.py
        [--only PATTERN] [--minutes N] [--jobs N] [--again] -o benchmarks/results/graph_coverage.json

First the models of other libraries under every pass, then the architectures of the zoo, in an order that is the same in every run
and mixes the tasks, each in a worker process under a time limit. Results are kept in a JSON file as they come: a run that was
interrupted goes on where it stopped, and `--again` assesses anew what `--only` selects.
"""

from __future__ import annotations

import dataclasses
import sys

from graph_assessment import BOTH, PASSES
from support.other_zoos import MODELS
from sweeping import Row, Task, all_ids, cell, in_mixed_order, key, line, parser_of, sweep

COLUMNS = ("graph", ".pt2", *PASSES)
ZOO_COLUMNS = ("inlined", *BOTH)
KINDS = ("yes", "refused", "no", "dense cannot")  # what a cell begins with


def main() -> int:
    return sweep(tasks(), find, page, parser_of(__doc__, "graph_coverage").parse_args())


def tasks() -> list[Task]:
    """What there is to assess: (model, column), the column empty for an architecture of the zoo."""
    return [(kind, column) for kind in MODELS for column in COLUMNS] + [(name, "") for name in in_mixed_order(all_ids())]


def find(task: Task) -> Row:
    """What was found out about one architecture of the zoo, or about one model of another library under one pass."""
    from assessment import one_line
    from graph_assessment import Row as Assessed
    from graph_assessment import assess, assess_file, assess_graph, assess_pass, attempt

    name, column = task
    if column:
        whole = {"graph": assess_graph, ".pt2": assess_file}.get(column)
        return {"cell": attempt(lambda: whole(name) if whole else assess_pass(name, PASSES[column]))}
    try:
        return dataclasses.asdict(assess(name))
    except Exception as error:
        return dataclasses.asdict(Assessed(name, graph=f"no: {one_line(error)}"))


def page(results: dict[str, Row]) -> str:
    """The Markdown page: the models of other libraries, then the zoo."""
    found = {name: {one: results.get(key((name, one)), {}).get("cell", "—") for one in COLUMNS} for name in MODELS}
    return "\n".join(
        [
            "# Models as FX graph modules",
            "",
            "Written by `PYTHONPATH=tests python benchmarks/coverage/graph_table.py`; do not edit.",
            "",
            "## Models of other libraries",
            "",
            'Tiny random models of `tests/support/other_zoos.py`, made graph modules (`emit="graph"`).',
            "",
            "- graph: on another batch and length than captured the outputs are the model's, every bit or as far off as said,",
            "  relative to the largest.",
            "- .pt2: exported with dynamic shapes and read, the outputs are the model's; widened, saved and read again, they stay.",
            f"- the passes ({', '.join(f'`{spec}`' for spec in PASSES.values())}): yes where the result comes through every",
            "  check of `retrofit.verify`.",
            "",
            line(["", *COLUMNS]),
            line(["---"] * (1 + len(COLUMNS))),
            *(line([name, *(short(text) for text in row.values())]) for name, row in found.items()),
            "",
            "Why a pass was refused or failed:",
            "",
            line(["model", "", "why"]),
            line(["---"] * 3),
            *(
                line([name, one, cell(text)])
                for name, row in found.items()
                for one, text in row.items()
                if text != "—" and not text.startswith("yes")
            ),
            "",
            *zoo_section({name: results[name] for name in sorted(all_ids()) if name in results}),
        ]
    )


def short(text: str) -> str:
    """What a cell begins with, and of a yes what was measured."""
    return cell(text.partition(",")[0]) if text.startswith("yes") else next((kind for kind in KINDS if text.startswith(kind)), text)


def zoo_section(rows: dict[str, Row]) -> list[str]:
    """The section on the zoo: counts, then a line an architecture."""
    cells = {
        name: {"graph": row.get("graph", row.get("cell", "—")), **{one: row.get("cells", {}).get(one, "—") for one in ZOO_COLUMNS}}
        for name, row in rows.items()
    }
    lines = [
        "## The zoo",
        "",
        "One tiny random model of each architecture in transformers' auto classes, as a graph module against its module tree.",
        "",
        "- graph: the dense graph module's logits on another batch and length than captured are the model's, every bit or as far",
        "  off as said, relative to the largest.",
        "- inlined: with every part inlined, one flat graph, the outputs are the same to the last bit.",
        f"- {', '.join(f'`{spec}`' for spec in BOTH.values())}: the pass was applied to both; the logits and the gradients of",
        "  every parameter agree, the worst difference relative to the largest value of each; in float64 where it was over 1e-4.",
        "",
        f"Tried: {len(rows)} of {len(all_ids())} architectures.",
        "",
        line(["", *KINDS]),
        line(["---", *["---:"] * len(KINDS)]),
        *(
            line([one, *(str(sum(row[one].startswith(kind) for row in cells.values())) for kind in KINDS)])
            for one in ("graph", *ZOO_COLUMNS)
        ),
        "",
        line(["architecture", "graph", *ZOO_COLUMNS]),
        line(["---"] * (2 + len(ZOO_COLUMNS))),
        *(line([f"`{name}`", *map(cell, row.values())]) for name, row in cells.items()),
    ]
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
