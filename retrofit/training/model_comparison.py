"""A dense model and models rewritten from it, side by side: predictions and costs on one text, a picture, scores on tasks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.anatomy.inspection import inspect
from retrofit.errors import TrainingError, first_line, kind_of
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_memory import own_bytes, peak_bytes
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.probes import can_generate
from retrofit.passbase.tokenization import Codec, reading, text_codec, windows_of
from retrofit.program.cost import flops_per_token, unit_of
from retrofit.surgery.transformers_bookkeeping import is_transformers
from retrofit.training.objectives import (
    IGNORED,
    Collator,
    Example,
    Objective,
    add_loss,
    find_logits,
    for_loss_of,
    objective_for,
    token_logits,
    without_labels,
)
from retrofit.training.runs import COLOURS, DPI, SIZE, add_grid, write_png
from retrofit.training.settings import check_values
from retrofit.training.windows import ordered_windows, require_windows

ROUNDS = 5  # timed calls of each model, in turns
DECODED = 16  # tokens that are decoded and timed
BATCH = 4  # windows
ONE_ORIGIN = "compare models of the same dense model; use --length if they read fewer tokens"


@dataclasses.dataclass(frozen=True)
class Figures:
    """Predictions and costs of one model, ratios relative to the first model; `decode` is None if it generates nothing."""

    name: str
    loss: float  # nats a token
    bits_per_byte: float | None  # None unless every token is predicted
    divergence: float  # KL from the first model's predictions, nats a token
    agreement: float  # share of the tokens for which both rank the same one first
    parameters: int
    flops: int  # a token, forward
    memory: int  # bytes of the weights and of a window's forward at its peak
    prefill: float  # seconds of a window
    decode: float | None  # seconds a token
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by task and metric
    unit: str = "token"  # the unit of `flops`
    text: str = ""  # tokenization and size of the text


def compare_models(
    models: Mapping[str, nn.Module],
    texts: Sequence[str],
    *,
    tokenizer: Any = None,
    length: int = 256,
    most: int = 32,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Figures]:
    """Return the figures of each model on at most so many windows of the texts, evenly spread; the first model is the dense one.

    All models see the same windows and the same hidden tokens. Times are medians of rounds in which the models take turns. Raises
    `TrainingError` if the first model computes no loss or the text is too short.
    """
    check_values(length=length, windows=most)
    dense = next(iter(models.values()))
    codec = text_codec(dense, tokenizer)
    windows = windows_of(texts, codec, length)
    require_windows(windows)
    windows = windows[torch.linspace(0, len(windows) - 1, min(most, len(windows))).round().long()]
    objective = objective_for(add_loss(dense), codec, windows[0].long())
    batches = batches_of(windows, objective)
    progress("timing")
    require_comparable(models, batches[0])
    times = timed(models, batches[0])
    own = dict.fromkeys(models, batches)
    for name, model in models.items():
        if model is not dense:
            own[name] = batches_of(windows, for_loss_of(add_loss(model), objective, windows[0].long()))
    progress(f"comparing predictions on {len(windows)} windows")
    predicted = predictions(models, own)
    found: list[Figures] = []
    for name, model in models.items():
        progress(f"measuring {name}")
        program = inspect(model).program
        loss, divergence, agreement = predicted[name]
        found.append(
            Figures(
                name,
                loss,
                loss * counted_tokens(batches) / bytes_of(windows, codec) / math.log(2) if counts_all(batches, windows) else None,
                divergence,
                agreement,
                sum(parameter.numel() for parameter in model.parameters()),
                flops_per_token(program),
                memory_of(model, batches[0]),
                *times[name],
                unit=unit_of(program),
                text=reading(codec, windows),
            )
        )
    return found


def batches_of(windows: Tensor, objective: Objective) -> list[Example]:
    """Return the windows in small batches; the same tokens are hidden at every call."""
    collator, data = Collator(objective), ordered_windows(windows, seed=0)
    return [collator([data[row] for row in range(start, min(start + BATCH, len(data)))]) for start in range(0, len(data), BATCH)]


@torch.no_grad()
def predictions(models: Mapping[str, nn.Module], batches: Mapping[str, Sequence[Example]]) -> dict[str, tuple[float, float, float]]:
    """Return each model's own loss, its divergence from the first model's predictions and its agreement with them.

    All three are means over the tokens of the models' own batches, which have the same windows.
    """
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
    rows = tokens = 0
    for batch in zip(*(batches[name] for name in models), strict=True):
        first = None
        for (name, model), own in zip(models.items(), batch, strict=True):
            loss, logits = loss_and_logits(model, own)
            first = logits if first is None else first
            for q, p in zip(logits, first, strict=True):  # by window: vocabularies are large
                log_q, log_p = q.float().log_softmax(-1), p.float().log_softmax(-1)
                divergence = (log_p.exp() * (log_p - log_q)).sum()
                agreement = (q.argmax(-1) == p.argmax(-1)).sum()
                sums[name] += torch.tensor([loss, float(divergence), float(agreement)], dtype=torch.float64)
        rows, tokens = rows + len(logits), tokens + logits[..., 0].numel()
    return {  # rounding may make a divergence negative
        name: (float(loss) / rows, max(0.0, float(divergence)) / tokens, float(agreement) / tokens)
        for name, (loss, divergence, agreement) in sums.items()
    }


def loss_and_logits(model: nn.Module, batch: Example) -> tuple[float, Tensor]:
    """Return the model's loss and its logits of each label, on the CPU: in one forward unless that returns other logits."""
    learner = add_loss(model)
    given = {name: value.to(device_of(model)) for name, value in batch.items()}
    with evaluation_mode(learner):
        outputs = learner(**given)
        logits = find_logits(outputs)
        if logits is None or logits.shape[:2] != batch["labels"].shape:
            logits = token_logits(learner(**without_labels(learner, given)))
    return float(outputs[0]), logits.cpu()


@torch.no_grad()
def require_comparable(models: Mapping[str, nn.Module], batch: Example) -> None:
    """Raise `TrainingError` unless every model predicts as many classes of as many tokens as the first does."""
    shapes: dict[str, torch.Size] = {}
    for name, model in models.items():
        learner = add_loss(model)
        inputs = without_labels(learner, {key: value.to(device_of(model)) for key, value in batch.items()})
        try:
            with evaluation_mode(learner):
                shapes[name] = token_logits(learner(**inputs)).shape
        except Exception as error:  # the model's own code may raise anything
            raise TrainingError(
                f"{name} cannot read the inputs of the first model", why=first_line(error), remedy=ONE_ORIGIN, code="does-not-run"
            ) from error
    first, expected = next(iter(shapes.items()))
    for name, shape in shapes.items():
        if shape != expected:
            raise TrainingError(
                f"{name} cannot be compared with {first}",
                why=f"of one batch its predictions are {' × '.join(map(str, shape))}, and not {' × '.join(map(str, expected))}",
                remedy=ONE_ORIGIN,
                code="other-model",
            )


def counts_all(batches: Sequence[Example], windows: Tensor) -> bool:
    """Return whether every token of each window but the first is predicted."""
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) >= windows.numel() - len(windows)


def counted_tokens(batches: Sequence[Example]) -> int:
    return sum(batch["labels"].numel() - len(batch["labels"]) for batch in batches)


def bytes_of(windows: Tensor, codec: Codec) -> int:
    """Return the bytes of text that the windows' tokens spell, the first of each excepted."""
    return max(1, sum(len(codec.decode(window[1:].tolist()).encode()) for window in windows))


@torch.no_grad()
def memory_of(model: nn.Module, batch: Example) -> int:
    """Return the bytes of the weights and of a window's forward at its peak."""
    window = {name: value[:1].to(device_of(model)) for name, value in batch.items() if name != "labels"}
    with evaluation_mode(model):
        learner = add_loss(model)  # it takes the inputs that follow from the ids
        return own_bytes(model) + peak_bytes(lambda: learner(**window))


# ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def timed(models: Mapping[str, nn.Module], batch: Example) -> dict[str, tuple[float, float | None]]:
    """Return the seconds of a forward of one window, and of a token decoded after it where all models generate."""
    window = {name: value[:1] for name, value in batch.items() if name != "labels"}
    decodes = all(can_generate(model, window) for model in models.values())
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            inputs = {key: value.to(device_of(model)) for key, value in window.items()}
            with evaluation_mode(model):
                forward = duration_of(functools.partial(add_loss(model), **inputs))
                if turn:  # the first call warms up
                    prefill[name].append(forward)
                if decodes:
                    decoding = duration_of(functools.partial(generated, model, inputs, DECODED + 1))
                    decoding -= duration_of(functools.partial(generated, model, inputs, 1))
                    if turn:
                        decode[name].append(decoding / DECODED)
    return {name: (statistics.median(prefill[name]), statistics.median(decode[name]) if decodes else None) for name in models}


def generated(model: Any, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
    """Return the ids for generation: a decoder starts with the window's first token, whatever the model's config names."""
    given: dict[str, Any] = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    if "decoder_input_ids" in given:
        given["decoder_start_token_id"] = int(given.pop("decoder_input_ids")[0, 0])
    return model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)  # type: ignore[no-any-return]


def duration_of(action: Callable[[], Any]) -> float:
    """Return the seconds that the action takes, on the GPU too."""
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ── Picture and tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def draw_comparison(path: Path, figures: Sequence[Figures], *, force: bool = False) -> Path:
    """Write a PNG with a point for each model: its held-out loss over its speed, relative to the first model's.

    The speed is that of decoding if all models decode; a second panel has that of a window's forward.
    """
    from matplotlib.figure import Figure

    dense = figures[0]
    speeds = {"forward of a window": [dense.prefill / result.prefill for result in figures]}
    if dense.decode is not None:
        speeds["decoding"] = [dense.decode / result.decode if result.decode else 0.0 for result in figures]
    figure = Figure(figsize=(SIZE[0] * (1 + len(speeds)) / 2, SIZE[1]), dpi=DPI, layout="constrained")
    for panel, (what, speed) in enumerate(speeds.items(), 1):
        axes = figure.add_subplot(1, len(speeds), panel)
        axes.axhline(dense.loss, color="#555555", linewidth=1.0, linestyle="--")
        axes.axvline(1.0, color="#555555", linewidth=1.0, linestyle="--")
        for colour, result, times in zip(itertools.cycle(COLOURS), figures, speed, strict=False):
            axes.plot([times], [result.loss], "o", color=colour, markersize=8, label=f"{result.name}, {result.loss:.3f}")
        axes.margins(0.2)
        axes.set_xlabel(f"speed of {what} (times {dense.name}'s)")
        axes.set_ylabel("held-out loss (nats a token)")
        add_grid(axes)
        if panel == len(speeds):
            axes.legend(frameon=False)
    return write_png(path, figure, force=force)


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
    """Return the scores of the tasks for each model, by task and metric ("arc_easy acc").

    `folder` contains descriptions of tasks (YAML) next to those of the package; `most` limits the examples of a task. Nothing is
    downloaded. Raises `TrainingError` if the package, a tokenizer or a task is missing, and for a model that is not one of
    transformers.
    """
    require_package()
    for name, model in models.items():
        if not is_transformers(model):
            raise TrainingError(
                "no task can be run",
                why=f"{name} is {kind_of(model)}, and the harness runs transformers models",
                remedy="drop --lm-eval",
                option="lm_eval",
                code="no-logits",
            )
    if tokenizer is None:
        raise TrainingError(
            "no task can be run",
            why="it has no tokenizer",
            remedy="add --tokenizer DIR",
            option="tokenizer",
            code="no-tokenizer",
        )
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        where = f"in {folder} or " if folder is not None else ""
        raise TrainingError(
            f"unknown task {unknown[0]!r}",
            why=f"none of that name is {where}in the package lm-eval",
            remedy="`lm_eval ls tasks` lists those of the package; --lm-eval-tasks DIR names a directory with others",
            code="missing",
            option="lm_eval",
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
            except Exception as error:  # a task's own code and data may raise anything
                raise TrainingError(
                    f"the tasks {', '.join(tasks)} cannot be run",
                    why=first_line(error),
                    remedy="tasks run on data of this machine: name local files in the task, or keep its data set in the cache",
                    code="does-not-run",
                    option="lm_eval",
                ) from error
        scores[name] = metrics_of(found["results"])
    return scores


def require_package() -> None:
    """Raises `TrainingError` where lm-eval is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise TrainingError(
            "lm-eval is not installed",
            why="it holds the tasks",
            remedy="pip install 'retrofit-transformers[eval]'",
            code="not-installed",
        )


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of each task by "task metric", without their errors."""
    found = {}
    for task, metrics in results.items():
        for metric, value in metrics.items():
            name, _, kind = metric.partition(",")
            if isinstance(value, (int, float)) and kind and not name.endswith("_stderr"):
                found[f"{task} {name}" + (f" ({kind})" if kind != "none" else "")] = float(value)
    return found
