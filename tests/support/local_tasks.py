"""Tasks of lm-eval whose questions are in a file beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: {choices}
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def write_task(folder: Path, name: str, questions: Sequence[tuple[str, int]], choices: Sequence[str]) -> None:
    """The task `name` is in the folder: after each question, which of the choices is the more probable."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps({"question": text, "answer": answer}) for text, answer in questions))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, choices=json.dumps(list(choices))))
