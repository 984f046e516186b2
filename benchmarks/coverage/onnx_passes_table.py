"""Writes benchmarks/results/onnx_passes.json: every pass on ONNX files as the exporters of the ecosystem write them.

    PYTHONPATH=tests python benchmarks/coverage/onnx_passes_table.py
        [--only PATTERN] [--minutes N] [--jobs N] [--again] -o benchmarks/results/onnx_passes.json

Each file is read and rewritten by each pass in a worker process under a time limit, with every check of `retrofit.verify`. Results
are kept in a JSON file as they come: a run that was interrupted goes on where it stopped, and `--again` assesses anew what `--only`
selects.
"""

from __future__ import annotations

import sys

from graph_assessment import PASSES
from sweeping import Row, Task, cell, key, line, parser_of, sweep

FILES = {
    "traced, set 13": ("masked/bert", "causal/gpt2"),
    "traced": (
        *("masked/bert", "masked/deberta-v2", "masked/distilbert", "masked/electra", "masked/albert", "masked/roberta"),
        *("causal/gpt2", "causal/llama", "causal/bloom", "image/vit", "image/swin", "seq2seq/t5", "seq2seq/bart"),
    ),
    "exported, set 18": (
        *("causal/llama", "causal/gpt2", "causal/opt", "causal/gpt_neox", "causal/falcon", "causal/phi", "causal/gemma2"),
        *("causal/mixtral", "masked/roberta", "masked/modernbert", "image/dinov2", "image/beit", "seq2seq/t5", "seq2seq/marian"),
    ),
    "exported, set 23": ("causal/gpt2", "causal/llama", "causal/qwen3", "masked/bert", "image/vit", "seq2seq/bart"),
    "fused by ONNX Runtime": ("masked/bert", "masked/roberta", "masked/distilbert", "causal/gpt2", "image/vit"),
    "with its cache": ("causal/llama", "causal/gpt_neox", "causal/gemma2", "causal/mistral", "causal/bloom", "image/vit"),
    "with its cache, not fused": ("causal/llama", "masked/bert"),
    "its encoder": ("seq2seq/t5", "seq2seq/bart"),
    "its decoder": ("seq2seq/t5", "seq2seq/bart"),
}
KINDS = ("yes", "refused", "no", "not written")  # what a cell begins with
LATE = "refused: the rewritten model does not run"  # only after the edit was made


def main() -> int:
    return sweep(tasks(), find, page, parser_of(__doc__, "onnx_passes").parse_args())


def tasks() -> list[Task]:
    """What there is to assess: (file, pass), the passes of a file one after another."""
    return [(f"{source}: {name}", one) for source, names in FILES.items() for name in names for one in PASSES]


def find(task: Task) -> Row:
    """How one file fares under one pass."""
    import torch
    from assessment import one_line
    from graph_assessment import verdict
    from support.onnx_files import file_of

    from retrofit.onnx.importer import from_onnx

    file, one = task
    source, _, name = file.partition(": ")
    try:
        path = file_of(source, name)
    except Exception as error:
        return {"cell": f"not written: {one_line(error)}"}
    torch.manual_seed(0)
    try:
        found = verdict(from_onnx(path), PASSES[one])
    except Exception as error:
        found = f"no: {one_line(error)}"
    return {"cell": found.replace("refused", "no", 1) if found.startswith(LATE) else found}


def page(results: dict[str, Row]) -> str:
    """The Markdown page: a line a file, then why what is not `yes` is not."""
    files = dict.fromkeys(file for file, _ in tasks())
    rows = {file: {one: results.get(key((file, one)), {}).get("cell", "—") for one in PASSES} for file in files}
    return "\n".join(
        [
            "# Passes on ONNX files",
            "",
            "Written by `PYTHONPATH=tests python benchmarks/coverage/onnx_passes_table.py`; do not edit.",
            "",
            "Files of tiny random models, as torch's older exporter (traced, operator set 17 or as said), its newer one",
            "(exported), ONNX Runtime's optimizer and `retrofit export` (with its cache; an encoder-decoder's encoder and decoder)",
            f"write them, each read by `from_onnx` and rewritten ({', '.join(f'`{spec}`' for spec in PASSES.values())}):",
            "yes where the result comes through every check of `retrofit.verify`.",
            "",
            f"Tried: {sum(text != '—' for row in rows.values() for text in row.values())} of {len(tasks())}.",
            "",
            line(["", *KINDS]),
            line(["---", *["---:"] * len(KINDS)]),
            *(line([one, *(str(sum(kind_of(row[one]) == kind for row in rows.values())) for kind in KINDS)]) for one in PASSES),
            "",
            line(["", *PASSES]),
            line(["---"] * (1 + len(PASSES))),
            *(line([file, *map(kind_of, row.values())]) for file, row in rows.items()),
            "",
            "Why a pass was refused or failed:",
            "",
            line(["why", "file and pass"]),
            line(["---"] * 2),
            *(line([why, "; ".join(where)]) for why, where in reasons(rows).items()),
            "",
        ]
    )


def kind_of(text: str) -> str:
    """What a cell begins with."""
    return text.partition(":")[0]


def reasons(rows: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """What was said where a pass was refused or failed, and of which files and passes."""
    found: dict[str, list[str]] = {}
    for file, row in rows.items():
        for one, text in row.items():
            if text != "—" and not text.startswith("yes"):
                found.setdefault(cell(text), []).append(f"{file}, {one}")
    return found


if __name__ == "__main__":
    sys.exit(main())
