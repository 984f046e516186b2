"""A dense model and models rewritten from it, side by side on one text: what they predict, what they cost."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.anatomy.inspection import inspect
from retrofit.errors import TrainingError, first_line
from retrofit.pipeline.tokenization import Codec, reading, text_codec, windows_of
from retrofit.program.cost import flops_per_token, unit_of
from retrofit.runtime.example_inputs import device_of
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.peak_memory import own_bytes, peak_bytes
from retrofit.runtime.probes import can_generate
from retrofit.training.label_loss import add_loss
from retrofit.training.objectives import IGNORED, Collator, Example, Objective, for_loss_of, objective_for
from retrofit.training.outputs import token_logits, without_labels
from retrofit.training.settings import check_values
from retrofit.training.windows import ordered_windows, require_windows

ROUNDS = 5  # of timed calls; the models take turns in each
DECODED = 16  # tokens that are decoded for a time
BATCH = 4  # windows
ONE_ORIGIN = "compare models that were made from the same dense model, and give --length where they read fewer tokens"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one model predicts and costs; ratios are to the first model, and `decode` is None where it generates nothing."""

    name: str
    loss: float  # nats a token
    bits_per_byte: float | None  # None where not every token is predicted
    divergence: float  # KL from the first model's predictions, nats a token
    agreement: float  # part of the tokens for which both rank the same first
    parameters: int
    flops: int  # a token, forward
    memory: int  # bytes of the weights, and of what a forward of a window makes at its peak
    prefill: float  # seconds of a window
    decode: float | None  # seconds a token
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by task and metric
    unit: str = "token"  # whose FLOPs `flops` are
    text: str = ""  # how the text was read, and how much of it


def compare_models(
    models: Mapping[str, nn.Module],
    texts: Sequence[str],
    *,
    tokenizer: Any = None,
    length: int = 256,
    most: int = 32,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Figures]:
    """The figures of each model on at most so many windows of the texts, evenly spread; the first one is the dense model.

    All models see the same windows, hidden tokens included. Times are the medians of rounds in which the models take turns.
    Raises `TrainingError` where the first model computes no loss or the text is too short.
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
    found: list[Figures] = []
    for name, model in models.items():
        progress(f"measuring {name}")
        program = inspect(model).program
        own = batches if model is dense else batches_of(windows, for_loss_of(add_loss(model), objective, windows[0].long()))
        loss, divergence, agreement = predictions(model, dense, own)
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
    """The windows, a few at a time; what is hidden in them is the same at every call."""
    collator, data = Collator(objective), ordered_windows(windows, seed=0)
    return [collator([data[row] for row in range(start, min(start + BATCH, len(data)))]) for start in range(0, len(data), BATCH)]


@torch.no_grad()
def predictions(model: nn.Module, dense: nn.Module, batches: Sequence[Example]) -> tuple[float, float, float]:
    """The model's own loss, its divergence from the dense predictions and its agreement with them: means over the tokens."""
    sums, rows, tokens = torch.zeros(3, dtype=torch.float64), 0, 0
    learner, teacher = add_loss(model), add_loss(dense)
    with evaluation_mode(learner), evaluation_mode(teacher):
        for batch in batches:
            here, there = ({name: value.to(device_of(one)) for name, value in batch.items()} for one in (model, dense))
            loss = learner(**here)[0]
            ours = token_logits(learner(**without_labels(learner, here))).float().cpu()
            theirs = ours if model is dense else token_logits(teacher(**without_labels(teacher, there))).float().cpu()
            log_q, log_p = ours.log_softmax(-1), theirs.log_softmax(-1)
            apart = (log_p.exp() * (log_p - log_q)).sum(-1)
            same = ours.argmax(-1) == theirs.argmax(-1)
            sums += torch.tensor([float(loss) * len(ours), float(apart.sum()), float(same.sum())], dtype=torch.float64)
            rows, tokens = rows + len(ours), tokens + apart.numel()
    return float(sums[0]) / rows, max(0.0, float(sums[1])) / tokens, float(sums[2]) / tokens  # rounding may make it less than zero


@torch.no_grad()
def require_comparable(models: Mapping[str, nn.Module], batch: Example) -> None:
    """Every model predicts as many classes of as many tokens as the first does, else `TrainingError`."""
    shapes: dict[str, torch.Size] = {}
    for name, model in models.items():
        learner = add_loss(model)
        inputs = without_labels(learner, {key: value.to(device_of(model)) for key, value in batch.items()})
        try:
            with evaluation_mode(learner):
                shapes[name] = token_logits(learner(**inputs)).shape
        except Exception as error:  # whatever the model's own code raises
            raise TrainingError(
                f"{name} cannot read what the first model reads", why=first_line(error), remedy=ONE_ORIGIN
            ) from error
    first, expected = next(iter(shapes.items()))
    for name, shape in shapes.items():
        if shape != expected:
            raise TrainingError(
                f"{name} cannot be compared with {first}",
                why=f"of one batch its predictions are {' × '.join(map(str, shape))}, and not {' × '.join(map(str, expected))}",
                remedy=ONE_ORIGIN,
            )


def counts_all(batches: Sequence[Example], windows: Tensor) -> bool:
    """Whether every token of each window but the first is predicted."""
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) >= windows.numel() - len(windows)


def counted_tokens(batches: Sequence[Example]) -> int:
    return sum(batch["labels"].numel() - len(batch["labels"]) for batch in batches)


def bytes_of(windows: Tensor, codec: Codec) -> int:
    """The bytes of text that the windows' tokens, but for the first of each, spell."""
    return max(1, sum(len(codec.decode(window[1:].tolist()).encode()) for window in windows))


@torch.no_grad()
def memory_of(model: nn.Module, batch: Example) -> int:
    """The bytes of the weights, and of what a forward of one window makes at its peak."""
    window = {name: value[:1].to(device_of(model)) for name, value in batch.items() if name != "labels"}
    with evaluation_mode(model):
        learner = add_loss(model)  # it has the inputs that follow from the ids
        return own_bytes(model) + peak_bytes(lambda: learner(**window))


# ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def timed(models: Mapping[str, nn.Module], batch: Example) -> dict[str, tuple[float, float | None]]:
    """The seconds of a forward of one window, and of a token decoded after it where all models generate."""
    window = {name: value[:1] for name, value in batch.items() if name != "labels"}
    decodes = all(can_generate(model, window) for model in models.values())
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            inputs = {key: value.to(device_of(model)) for key, value in window.items()}
            with evaluation_mode(model):
                learner = add_loss(model)
                taken = seconds(lambda one=learner, given=inputs: one(**given))  # type: ignore[misc]
                if turn:  # the first time is for warmth
                    prefill[name].append(taken)
                if decodes:
                    taken = seconds(lambda one=model, given=inputs: generated(one, given, DECODED + 1))  # type: ignore[misc]
                    taken -= seconds(lambda one=model, given=inputs: generated(one, given, 1))  # type: ignore[misc]
                    if turn:
                        decode[name].append(taken / DECODED)
    return {name: (statistics.median(prefill[name]), statistics.median(decode[name]) if decodes else None) for name in models}


def generated(model: Any, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
    """A decoder starts from the token that it starts from in the window, whether or not the model's config names one."""
    given: dict[str, Any] = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    if "decoder_input_ids" in given:
        given["decoder_start_token_id"] = int(given.pop("decoder_input_ids")[0, 0])
    return model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)  # type: ignore[no-any-return]


def seconds(action: Callable[[], Any]) -> float:
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
