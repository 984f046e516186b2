"""Scores of language models on the tasks of lm-evaluation-harness, where that package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from retrofit.errors import TrainingError, first_line, kind_of
from retrofit.runtime.example_inputs import device_of
from retrofit.runtime.modes import evaluation_mode
from retrofit.surgery.transformers_bookkeeping import is_transformers

PACKAGE = "lm_eval"


def task_scores(
    models: Mapping[str, nn.Module],
    tasks: Sequence[str],
    *,
    tokenizer: Any,
    folder: Path | None = None,
    most: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, dict[str, float]]:
    """For each model the scores of the tasks, by task and metric ("arc_easy acc").

    `folder` holds descriptions of tasks (YAML) next to those of the package; `most` is how many examples of a task count. Data that
    a task names and that is not on this machine is not fetched. Raises `TrainingError` where the package, a tokenizer or a task is
    missing, and for a model that is none of transformers.
    """
    require_package()
    for name, model in models.items():
        if not is_transformers(model):
            why = f"{name} is {kind_of(model)}, and the harness runs models of transformers"
            raise TrainingError("no task can be tried", why=why, remedy="leave --lm-eval out")
    if tokenizer is None:
        raise TrainingError(
            "no task can be tried", why="its texts have to become tokens", remedy="name a tokenizer: --tokenizer DIR"
        )
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        where = f"in {folder} or " if folder is not None else ""
        remedy = "`lm_eval ls tasks` lists those of the package; --lm-eval-tasks DIR names a folder with others"
        raise TrainingError(
            f"there is no task {unknown[0]!r}", why=f"none of that name is {where}in the package lm-eval", remedy=remedy
        )
    scores = {}
    for name, model in models.items():
        progress(f"tasks of {name}")
        with evaluation_mode(model):
            runner = HFLM(pretrained=model, tokenizer=tokenizer, device=str(device_of(model)), batch_size=1)
            try:
                found = simple_evaluate(
                    model=runner, tasks=list(tasks), limit=most, task_manager=manager, bootstrap_iters=0, log_samples=False
                )
            except Exception as error:  # whatever a task's own code or its data raises
                remedy = "tasks run on data of this machine: name local files in the task, or keep its data set in the cache"
                raise TrainingError(
                    f"the tasks {', '.join(tasks)} cannot be tried", why=first_line(error), remedy=remedy
                ) from error
        scores[name] = dict(numbers(found["results"]))
    return scores


def require_package() -> None:
    """Raises `TrainingError` where lm-eval is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise TrainingError(
            "lm-eval is not installed", why="it holds the tasks", remedy="pip install 'retrofit-transformers[eval]'"
        )


def numbers(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The metrics of each task, without their errors: ("task metric", value)."""
    found = []
    for task, metrics in results.items():
        for metric, value in metrics.items():
            name, _, kind = metric.partition(",")
            if isinstance(value, (int, float)) and kind and not name.endswith("_stderr"):
                found.append((f"{task} {name}" + (f" ({kind})" if kind != "none" else ""), float(value)))
    return found
