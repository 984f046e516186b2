"""Quality of a hybrid on windows of text: the distance of its outputs from the dense ones, and the loss.

For logits, the distance is the KL divergence from the dense predictions, in nats per token. To second order it is

    KL ≈ ½ Σ_v p_v (δ_v − E_p δ)² = ½ ‖u‖²        δ = log q − log p, u_v = √p_v (δ_v − E_p δ)

so the inner product of the u of two hybrids is the excess of their joint distance over the sum. u is stored as `SKETCH` random
projections per token. For other outputs the distance is their squared relative error, and u the difference itself.

`Verdict` describes the quality of a rewritten model in the user's terms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import PlanningError, RetrofitError, TrainingError
from retrofit.files.memory import in_temporary_file, page_out
from retrofit.inputs.example_inputs import vocabulary_of
from retrofit.inputs.model_state import evaluation_mode, same_bits
from retrofit.inputs.module_calls import map_tensors, real_tokens, watched
from retrofit.inputs.probes import logits_of, run
from retrofit.numerics.distances import token_weights
from retrofit.passbase.tokenization import vocabulary_size
from retrofit.planning.planning_data import examples_of, moved
from retrofit.process import replace_attributes
from retrofit.training.objectives import IGNORED, without_labels

SKETCH = 32  # projections of a token's u
PART = 2**20  # logits that are compared at a time
TINY = torch.finfo(torch.float32).tiny


def vocabularies(model: nn.Module) -> set[int]:
    """Return the possible numbers of logits per token: the model's config's, and that of the table that its graph indexes."""
    found = {vocabulary_of(model)} - {0}
    with contextlib.suppress(TrainingError):
        found.add(vocabulary_size(model))
    return found


Part = tuple[Tensor, Tensor, Tensor | None]  # dense outputs, or log-probabilities, those found, and labels


@dataclasses.dataclass(frozen=True)
class MeasuredBatch:
    """Inputs of some windows, the targets of the outputs, and the dense model's outputs."""

    inputs: Mapping[str, Any]
    labels: Tensor | None  # (tokens), in the order of the outputs; IGNORED where nothing is predicted
    dense: Tensor  # log-probabilities, (tokens, V), or outputs, (tokens, d)

    def parts(self, logits: Tensor) -> Iterator[Part]:
        """Yield log-probabilities, dense and of these logits, and labels: some tokens at a time, which stay in a cache."""
        rows = max(1, PART // logits.shape[-1])
        labels = itertools.repeat(None) if self.labels is None else self.labels.split(rows)
        for dense, found, part in zip(self.dense.split(rows), logits.split(rows), labels, strict=False):
            yield dense, found.float().log_softmax(-1), part


@dataclasses.dataclass(frozen=True)
class Quality:
    """The distance of outputs from the dense ones."""

    distance: float  # KL in nats per token, or the squared relative error
    loss: float | None  # nats a token
    sketch: Tensor | None = None  # of u: (tokens · SKETCH)

    @property
    def figures(self) -> dict[str, float | None]:
        """Return distance and loss as plain data."""
        return {"distance": self.distance, "loss": self.loss}


@dataclasses.dataclass(frozen=True)
class MeasuredWindows:
    """Windows on which hybrids are compared with the dense model."""

    batches: tuple[MeasuredBatch, ...]
    are_logits: bool
    dense_loss: float | None
    layers: PrefixCache | None = None

    @classmethod
    def of(
        cls, model: nn.Module, batches: Sequence[Mapping[str, Any]], layers: Sequence[str], shift: int | None
    ) -> MeasuredWindows:
        """Return the windows of `batches`, whose labels are `shift` after the outputs; the outputs of any `layers` are cached."""
        found = []
        are_logits, sizes = False, vocabularies(model)
        with evaluation_mode(model), torch.no_grad():
            for batch in batches:
                inputs = without_labels(model, batch)
                outputs, mask = outputs_of(model, inputs)
                are_logits = outputs.shape[-1] in sizes
                labels = None
                if shift is not None and are_logits and "labels" in batch:
                    shifted = F.pad(batch["labels"][:, shift:], (0, shift), value=IGNORED).to(outputs.device)
                    labels = shifted.flatten() if mask is None else shifted[mask]
                found.append(MeasuredBatch(inputs, labels, outputs.float().log_softmax(-1) if are_logits else outputs.float()))
        recalled = PrefixCache(model, layers, [batch.inputs for batch in found]) if layers else None
        windows = cls(tuple(found), are_logits, None, recalled)
        return dataclasses.replace(windows, dense_loss=windows.mean_loss([batch.dense for batch in found]))

    def mean_loss(self, log_q: Sequence[Tensor]) -> float | None:
        """Return the cross entropy of these predictions, a mean over all tokens with a label."""
        labels = [part.labels for part in self.batches if part.labels is not None]
        if not self.are_logits or len(labels) < len(self.batches):
            return None
        sums = [float(F.nll_loss(q, part, ignore_index=IGNORED, reduction="sum")) for q, part in zip(log_q, labels, strict=True)]
        count = sum([int((part != IGNORED).sum()) for part in labels])
        return sum(sums) / max(1, count)

    @torch.no_grad()
    def measure(self, model: nn.Module, replaced: Sequence[str] = ("",), *, sketch: bool = False) -> Quality:
        """Return the quality of a hybrid whose modules at the paths `replaced` differ from the dense ones."""
        distances, sketches, losses, tokens, labelled = 0.0, [], 0.0, 0, 0
        with evaluation_mode(model):
            for number, batch in enumerate(self.batches):
                with self.layers.recalled(number, replaced) if self.layers is not None else contextlib.nullcontext():
                    outputs, _ = outputs_of(model, batch.inputs)
                if outputs.shape != batch.dense.shape:
                    raise PlanningError(
                        f"the rewritten model returns {tuple(outputs.shape)}, the dense one {tuple(batch.dense.shape)}",
                        remedy="drop the pass that changes the output shape",
                        code="other-output",
                    )
                compare = divergence if self.are_logits else squared_error
                whole: Part = (batch.dense, outputs, None)
                for dense, found, labels in batch.parts(outputs) if self.are_logits else [whole]:
                    far, u = compare(dense, found.float())
                    if labels is not None:
                        losses += float(F.nll_loss(found, labels, ignore_index=IGNORED, reduction="sum"))
                        labelled += int((labels != IGNORED).sum())
                    distances, tokens = distances + float(far.sum()), tokens + len(far)
                    if sketch:
                        sketches.append((u @ projections(u.shape[-1], u.device)).flatten().cpu())
        joined = torch.cat(sketches) / tokens**0.5 if sketch else None
        return Quality(distances / max(1, tokens), losses / labelled if labelled else None, joined)


def divergence(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p ‖ q) of each token, (tokens), and u as above, (tokens, V)."""
    p, delta = log_p.exp(), log_q - log_p
    mean = (p * delta).sum(-1, keepdim=True)
    return -mean.squeeze(-1), p.sqrt() * (delta - mean)


def squared_error(dense: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms of the squared relative error, (tokens), in which no long token dominates, and their roots, (tokens, d).

    Their mean over the tokens is the error, and they relate to u as KL's terms do: half its square.
    """
    weights = token_weights(dense)
    scale = ((dense.square().sum(-1) @ weights) / len(dense)).clamp_min(TINY)
    u = (2 * weights / scale).sqrt().unsqueeze(-1) * (found - dense)
    return u.square().sum(-1) / 2, u


@functools.lru_cache(1)
def projections(width: int, device: torch.device) -> Tensor:
    """Return random signs, the same for all hybrids: (width, SKETCH)."""
    signs = torch.randint(0, 2, (width, SKETCH), generator=torch.Generator().manual_seed(0))
    return (2.0 * signs - 1.0).to(device) / SKETCH**0.5


def outputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the outputs for the tokens without padding, (tokens, d), and a mask of these tokens, None if all."""
    outputs = logits_of(run(model, inputs))
    mask = next((mask for mask in real_tokens(inputs) if mask.shape == outputs.shape[:-1]), None)
    return (outputs.reshape(-1, outputs.shape[-1]) if mask is None else outputs[mask]), mask


Batch = Mapping[str, Any]


class PrefixCache:
    """The outputs of each call of each layer for each batch, in the order in which the layers run.

    Nothing is cached if the model's outputs change when the outputs of all layers are replayed, or of all but one: some layers pass
    more to a later one than their output, such as keys and values.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], batches: Sequence[Batch]) -> None:
        self.model = model
        self.calls: list[list[tuple[str, Any]]] = []  # of each batch
        self.returned: dict[str, int] = {}  # by the path of a module: the number of layers that had returned before its first call
        recorded = [path for path in paths if path]
        if batches:
            first = first_row(batches[0])  # for a test, once per layer
            self.calls = [self.record(first, recorded)]
            self.calls = [self.record(batch, recorded) for batch in batches] if self.is_faithful(first) else [[] for _ in batches]

    @torch.no_grad()
    def record(self, batch: Batch, paths: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the layers' outputs with their names, call by call."""
        calls: list[tuple[str, Any]] = []

        def keep(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append((path, copied(output)))

        def note(path: str, *call: Any) -> None:
            self.returned.setdefault(path, len(calls))

        layers = {path: self.model.get_submodule(path) for path in paths}
        others = {} if self.calls else dict(self.model.named_modules())
        with evaluation_mode(self.model), watched(layers, after=keep), watched(others, before=note):
            run(self.model, batch)
        return calls

    def is_faithful(self, batch: Batch) -> bool:
        """Return whether the model returns the same bits with its layers' outputs replayed: all, and all but each one."""
        layers = dict.fromkeys(path for path, _ in self.calls[0])
        try:
            with evaluation_mode(self.model):
                expected = logits_of(run(self.model, batch))
                for live in ((), *((path,) for path in layers)):
                    with self.replayed(0, live):
                        if not same_bits(logits_of(run(self.model, batch)), expected):
                            return False
        except Exception:  # of any type: the model's own code may need layers that did not run
            return False
        return True

    def recalled(self, number: int, replaced: Sequence[str]) -> AbstractContextManager[None]:
        """Replay, in this context, the outputs for the batch of the layers that run before any module at the paths `replaced`."""
        count = min((self.returned.get(path, 0) for path in replaced), default=len(self.calls[number]))
        return self.replayed(number, {path for path, _ in self.calls[number][count:]})  # a shared layer runs later too

    @contextlib.contextmanager
    def replayed(self, number: int, live: Collection[str]) -> Iterator[None]:
        """Replay, in this context, the outputs for the batch of all layers but those at the paths `live`."""
        outputs: dict[str, list[Any]] = {}
        for path, output in self.calls[number]:
            if path not in live:
                outputs.setdefault(path, []).append(output)
        with contextlib.ExitStack() as stack:
            for path, values in outputs.items():
                stack.enter_context(replace_attributes(self.model.get_submodule(path), forward=replaying(values)))
            yield


def first_row(batch: Batch) -> dict[str, Any]:
    """Return the first window of a batch."""
    sizes = {value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    if len(sizes) != 1:
        return dict(batch)
    return {name: value[:1] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()}


def replaying(outputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a forward of which each call returns the next of the outputs."""
    remaining = iter(outputs)
    return lambda *args, **kwargs: copied(next(remaining))


def copied(value: Any) -> Any:
    """Return the value with copies of its tensors: a model may change one in place."""
    return map_tensors(value, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)


HELD_BACK = 8  # at most this number of windows, and at most one in HELD_BACK
FEWEST = 4  # with fewer windows, all are used for both parts
MOST_NUMBERS = 2**26  # dense predictions that are stored: 256 MiB in float32
TRAIN_FROM = 0.1  # nats per token of loss or KL, or relative squared error; from here on the model should be trained before use
SURE = 2.0  # standard errors that a significant change exceeds


def hold_back(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return windows of token ids in two parts: to fit on, and held back, spread over the text.

    With fewer than `FEWEST` windows both parts are all windows.
    """
    if len(windows) < FEWEST:
        return windows, windows[:HELD_BACK]
    count = max(1, min(HELD_BACK, len(windows) // HELD_BACK))
    held = torch.zeros(len(windows), dtype=torch.bool)
    held[[(index + 1) * len(windows) // count - 1 for index in range(count)]] = True
    return windows[~held], windows[held]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The effect of a rewrite on some windows; losses in nats per token, None if the model computes none."""

    text: str  # in words: "held-out" or another description of the windows
    before: float | None
    after: float | None
    distance: float  # KL divergence from the dense predictions in nats per token, or the relative squared error of the outputs
    noise: float | None  # the standard error of the increase; None for a single window

    @property
    def added(self) -> float:
        """Return the added loss; without a loss, the distance of the outputs."""
        return self.distance if self.before is None or self.after is None else self.after - self.before

    @property
    def within_noise(self) -> bool:
        """Return whether the increase is within the sampling error of the text."""
        return self.noise is not None and abs(self.added) <= SURE * self.noise and not self.needs_training

    @property
    def needs_training(self) -> bool:
        """Return whether increase or distance are so large that the model should be trained before use."""
        return max(self.added, self.distance) >= TRAIN_FROM

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"outputs on {self.text} text: relative squared error {self.distance:.3f}: {self.advice}"
        change = f"{self.before:.2f} → {self.after:.2f}, {self.added:+.2f} nats (KL {self.distance:.2f})"
        return f"{self.text} loss {change}: {self.advice}"

    @property
    def advice(self) -> str:
        """Return advice for the user."""
        if self.needs_training:
            return "train it before use"
        return "within noise" if self.within_noise else "usable as it is; training recovers part of the loss"


@dataclasses.dataclass(frozen=True)
class DenseOutputs:
    """Windows of text and the dense model's outputs for them, for comparison with a rewritten model."""

    text: str
    windows: MeasuredWindows

    @classmethod
    def of(cls, model: nn.Module, ids: Tensor, tokenizer: Any = None, *, text: str = "held-out") -> DenseOutputs:
        """Return the dense outputs for as many windows as fit in memory. Raises `RetrofitError` if there are none."""
        example, shift, _ = examples_of(model, ids.long(), tokenizer, None)
        device = next(model.parameters()).device
        windows: MeasuredWindows | None = None
        batches: list[MeasuredBatch] = []
        room = MOST_NUMBERS
        for row in range(len(ids)):
            measured = MeasuredWindows.of(model, [moved(example(row), device)], (), shift)
            (batch,) = measured.batches
            room -= batch.dense.numel()
            if batches and room < 0:
                break
            windows = windows or measured
            batches.append(dataclasses.replace(batch, dense=in_temporary_file(batch.dense)))  # passes run before they are read
        if windows is None:
            raise RetrofitError("the text is too short to hold out a window", remedy="use more text", code="too-short")
        return cls(text, dataclasses.replace(windows, batches=tuple(batches)))

    def verdict(self, model: nn.Module) -> Verdict:
        """Return the effect of the rewrite on the same windows, for the rewritten `model`."""
        distances, losses = [], []
        for batch in self.windows.batches:
            window = dataclasses.replace(self.windows, batches=(batch,))
            before, quality = window.mean_loss([batch.dense]), window.measure(model)
            distances.append(quality.distance)
            if before is not None and quality.loss is not None:
                losses.append((before, quality.loss))
            page_out([batch.dense])
        distance = statistics.fmean(distances)
        if len(losses) < len(distances):
            return Verdict(self.text, None, None, distance, standard_error(distances))
        before_all, after_all = (statistics.fmean(column) for column in zip(*losses, strict=True))
        return Verdict(self.text, before_all, after_all, distance, standard_error([after - before for before, after in losses]))


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
