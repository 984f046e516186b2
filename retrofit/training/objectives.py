"""Pretraining objectives as data collators, and the detection of a model's own objective by running it.

Next token; masked tokens (BERT, arXiv:1810.04805: 15 % of the tokens are hidden, of which 80 % become the mask, 10 % a random token
and 10 % stay); span corruption (T5, arXiv:1910.10683: 15 % of the tokens, in spans of mean length 3, each replaced by a sentinel).
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import TrainingError, first_line
from retrofit.inputs.example_inputs import beside_ids, forward_parameters, is_required, kinds_beside_ids
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.probes import accepts, named_outputs
from retrofit.passbase.tokenization import Codec
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training.settings import Settings
from retrofit.training.windows import WINDOW

NEEDS_HEAD = "train a model with a language-modelling head"
REMEDY = "train a Hugging Face model with a language-modelling head, or one that takes input_ids and returns logits"


def without_labels(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward that computes no loss and keeps no cache."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", WINDOW)}
    return {**inputs, "use_cache": False} if accepts(model, "use_cache") else inputs


def find_logits(outputs: Any) -> Tensor | None:
    """Return the output named `logits`, else the first one with three dimensions."""
    named = [outputs["logits"]] if isinstance(outputs, Mapping) and "logits" in outputs else []
    return next((value for value in (*named, *list_of(outputs)) if isinstance(value, Tensor) and value.dim() == 3), None)


def token_logits(outputs: Any) -> Tensor:
    """Return the logits among a model's outputs, found by `find_logits`; raises `TrainingError` if there are none."""
    found = find_logits(outputs)
    if found is None:
        raise no_logits("the model returns no logits for each token")
    return found


def no_logits(what: str, why: str = "none of its outputs is (batch, seq, vocabulary)", remedy: str = NEEDS_HEAD) -> TrainingError:
    return TrainingError(what, why=why, remedy=remedy, code="no-logits")


def list_of(outputs: Any) -> list[Any]:
    """Return a model's outputs as a list, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, Mapping) else list(outputs)


def accepts_labels(model: nn.Module) -> bool:
    """Return whether the model's forward takes `labels`, or any keyword."""
    parameters = forward_parameters(model).values()
    return any(parameter.name == "labels" or parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def add_loss(model: nn.Module) -> nn.Module:
    """Return `model` if it takes labels, else a wrapper that does; raises `TrainingError` if its inputs cannot be derived."""
    if accepts_labels(model):
        return model
    parameters = forward_parameters(model)
    required = [name for name, parameter in parameters.items() if is_required(parameter)]
    ids = "input_ids" if "input_ids" in parameters else required[0] if len(required) == 1 else None
    kinds = kinds_beside_ids(model)
    underivable = [name for name in required if name not in kinds and name != ids]
    if ids is None or underivable:
        raise TrainingError(
            f"{type(model).__name__} cannot compute a language-modelling loss",
            why=f"its forward takes {', '.join(parameters) or 'nothing'}, and no labels",
            remedy=REMEDY,
            code="no-loss",
        )
    return WithLabelLoss(model, ids, kinds)


def class_of(model: nn.Module) -> str:
    """Return the model's class as its user knows it, without an added loss."""
    return type(model.model if isinstance(model, WithLabelLoss) else model).__name__


class WithLabelLoss(nn.Module):
    """Wrapper of a model from ids to logits that adds a loss: the mean cross-entropy of the logits at p and the label at p.

    Losses that its modules record, such as those that balance experts, are added.
    """

    def __init__(self, model: nn.Module, ids: str, beside: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.model, self.ids, self.beside = model, ids, beside  # `beside`: other inputs that follow from the ids, by name

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the loss, if there are labels, and the logits for (batch, seq) ids; labels of -100 are ignored."""
        recording: AbstractContextManager[list[Tensor]] = nullcontext([]) if labels is None else auxiliary_losses()
        with recording as others:
            logits = find_logits(named_outputs(self.model(**self.inputs(input_ids))))
        if logits is None:
            raise no_logits(f"{type(self.model).__name__} gives no logits", remedy=REMEDY)
        if labels is None:
            return (logits,)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return (loss + sum(other.to(loss) for other in others), logits)

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """Return the ids of windows without padding and the model's other inputs for them."""
        return {self.ids: ids} | beside_ids(ids, self.beside)


TEMPERATURE = 0.05
EMBEDDING = "sentence_embedding"  # its name among the outputs of a sentence-transformers model


def embeds_sentences(model: nn.Module) -> bool:
    """Return whether the model is one of sentence-transformers, which returns one vector a text."""
    package = sys.modules.get("sentence_transformers")
    return package is not None and isinstance(model, package.SentenceTransformer)


@dataclasses.dataclass(frozen=True)
class SameText:
    """Contrastive objective: a text is told from the others of its batch by its embedding; the tokenizer adds its special ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    shift: int = 0
    name: str = "contrastive loss (SimCSE)"

    def example(self, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        text = torch.cat([ids.new_tensor(self.before), ids, ids.new_tensor(self.after)])
        return {"input_ids": text, "labels": text}  # the label of a text is the text itself


class WithContrastiveLoss(nn.Module):
    """Wrapper of a sentence-transformers model that returns embeddings and, given labels, its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the loss, if there are labels, and the embeddings, (batch, width), for (batch, seq) ids."""
        embedding = self.embed(input_ids)
        if labels is None:
            return (embedding,)
        other = self.embed(input_ids)
        similarity = F.normalize(embedding.float(), dim=-1) @ F.normalize(other.float(), dim=-1).T / TEMPERATURE  # (batch, batch)
        return F.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device)), embedding

    def embed(self, ids: Tensor) -> Tensor:
        embedding: Tensor = self.model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[EMBEDDING]
        return embedding


def embedding_distance(found: Tensor, expected: Tensor) -> Tensor:
    """Return Σ ‖found − expected‖² / Σ ‖expected‖² of embeddings, (batch, width): the mean of 2 (1 − cosine) for unit vectors."""
    if found.shape != expected.shape:
        raise TrainingError(
            f"the teacher's embeddings have {expected.shape[-1]} numbers, the model's {found.shape[-1]}",
            why="the modules after the transformer differ",
            remedy="use the dense sentence-transformers model that was rewritten",
            code="other-model",
            option="teacher",
        )
    return (found.float() - expected.float()).square().sum() / expected.float().square().sum()


def same_text(tokenizer: Any, settings: Settings) -> SameText:
    """Return the contrastive objective for a model with this tokenizer.

    Raises `TrainingError` where a batch holds nothing to tell a text from.
    """
    if settings.batch_size < 2:
        raise TrainingError(
            f"--batch-size {settings.batch_size} is too small for sentence embeddings",
            why="texts are contrasted within a batch",
            remedy="use at least 2",
            option="batch_size",
            code="range",
        )
    plain, full = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    start = next((start for start in range(len(full)) if full[start : start + len(plain)] == plain), 0)
    return SameText(tuple(full[:start]), tuple(full[start + len(plain) :]))


# ── Objectives ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


IGNORED = -100  # label of a position without a loss
DENSITY = 0.15  # share of hidden tokens
MEAN_SPAN = 3.0
MASKED, REPLACED = 0.8, 0.1
PROBE = 32  # tokens that suffice to detect a model's objective
MOVED = 0.2  # share of the logits that moves if the model looks ahead

Example = dict[str, torch.Tensor]


class Objective(Protocol):
    """Pretraining objective: the targets of a window of ids."""

    @property
    def name(self) -> str: ...

    @property
    def shift(self) -> int:
        """Return the distance from an output to the label that it is compared with."""
        ...

    def example(self, ids: torch.Tensor, generator: torch.Generator) -> Example:
        """Return the model's arguments for the window `ids`: (seq,)."""
        ...


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Next-token prediction: every token from those before it."""

    shift: int
    name: str = "next token"

    def example(self, ids: torch.Tensor, generator: torch.Generator) -> Example:
        targets = torch.cat([ids[1:], ids.new_full((1,), IGNORED)])
        return {"input_ids": ids, "labels": shift_targets(targets, self.shift)}


@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """Masked language modelling: hidden tokens from all others."""

    codec: Codec
    shift: int
    name: str = "masked tokens"

    def example(self, ids: torch.Tensor, generator: torch.Generator) -> Example:
        corrupted, targets = mask_tokens(ids, generator, mask=self.codec.mask, plain=self.codec.plain)
        return {"input_ids": corrupted, "labels": shift_targets(targets, self.shift)}


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """Span corruption: the decoder writes the hidden spans."""

    codec: Codec
    start: int  # the decoder's first input
    shift: int
    name: str = "span corruption"

    def example(self, ids: torch.Tensor, generator: torch.Generator) -> Example:
        inputs, targets = corrupt_spans(ids, generator, self.codec.sentinels, self.codec.end)
        shown = torch.cat([targets.new_full((1,), self.start), targets[:-1]])
        return {"input_ids": inputs, "decoder_input_ids": shown, "labels": shift_targets(targets, self.shift)}


@dataclasses.dataclass(frozen=True)
class Collator:
    """Collator of batches of one objective, with the windows' numbers if they have some.

    The hidden tokens of a window depend only on the window's own seed.
    """

    objective: Objective

    def __call__(self, windows: Sequence[Mapping[str, Any]]) -> Example:
        examples = [self.objective.example(window["ids"], torch.Generator().manual_seed(window["seed"])) for window in windows]
        batch = {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
        if WINDOW in windows[0]:
            batch[WINDOW] = torch.tensor([window[WINDOW] for window in windows])
        return batch


def shift_targets(targets: torch.Tensor, shift: int) -> torch.Tensor:
    """Return labels with `labels[p + shift] = targets[p]`, for a loss that compares the output at p with the label at p + shift."""
    if shift == 0:
        return targets
    return torch.cat([targets.new_full((shift,), IGNORED), targets[:-shift]])


def mask_tokens(ids: torch.Tensor, generator: torch.Generator, *, mask: int, plain: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ids` with 15 % of its tokens hidden, and the hidden tokens, `IGNORED` elsewhere; both (seq,)."""
    count = max(1, round(DENSITY * len(ids)))
    hidden = torch.randperm(len(ids), generator=generator)[:count]
    lot = torch.rand(count, generator=generator)
    random = torch.randint(plain.start, plain.stop, (count,), generator=generator)
    corrupted, targets = ids.clone(), torch.full_like(ids, IGNORED)
    targets[hidden] = ids[hidden]
    corrupted[hidden[lot < MASKED]] = mask
    replaced = (lot >= MASKED) & (lot < MASKED + REPLACED)
    corrupted[hidden[replaced]] = random[replaced]
    return corrupted, targets


def corrupt_spans(
    ids: torch.Tensor, generator: torch.Generator, sentinels: Sequence[int], end: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoder's input (each hidden span a sentinel) and the decoder's targets (each sentinel and its span)."""
    hidden, shown = span_lengths(len(ids), generator)
    if len(hidden) > len(sentinels):
        raise TrainingError(
            f"a window of {len(ids)} tokens hides {len(hidden)} spans, the vocabulary has {len(sentinels)} sentinels for them",
            remedy="use a shorter --length",
            option="length",
            code="other-vocabulary",
        )
    inputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    spans = ids.split([length for pair in zip(shown, hidden, strict=True) for length in pair])
    for sentinel, shown_span, hidden_span in zip(sentinels, spans[::2], spans[1::2], strict=False):
        mark = ids.new_tensor([sentinel])
        inputs += [shown_span, mark]
        targets += [mark, hidden_span]
    close = [] if end is None else [ids.new_tensor([end])]
    return torch.cat(inputs + close), torch.cat(targets + close)


def span_lengths(length: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Return the lengths of the hidden spans and of the shown ones; they alternate, a shown one first."""
    tokens = min(max(1, round(DENSITY * length)), length - 1)
    spans = min(max(1, round(tokens / MEAN_SPAN)), length - tokens)
    return partition(tokens, spans, generator), partition(length - tokens, spans, generator)


def partition(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """Return `parts` positive integers that sum to `total`, every such list equally likely."""
    cuts = (torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).sort().values.tolist()
    return [after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True)]


def objective_for(model: nn.Module, codec: Codec, window: torch.Tensor) -> Objective:
    """Return the objective of `model`, detected on one `window` of ids (seq,).

    A model whose config has an encoder and a decoder gets span corruption. Of the others, models whose outputs never depend on
    later tokens learn the next token, the rest masked tokens. Raises `TrainingError` if the model computes no loss.
    """
    seq2seq = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    candidate: Objective = SpanCorruption(codec, first_decoder_id(model), 0) if seq2seq else NextToken(0)
    full, short = (candidate.example(ids, torch.Generator().manual_seed(0)) for ids in (window, window[:PROBE]))
    with evaluation_mode(model), torch.no_grad():
        compute_logits(model, full)
        compute_loss(model, full)
        try:
            run(model, short)
        except TrainingError:  # models may accept windows of certain lengths only
            short = full
        shift = detect_label_shift(model, short)
        if seq2seq:
            return SpanCorruption(codec, first_decoder_id(model), shift)
        return NextToken(shift) if reads_no_later_token(model, short["input_ids"], codec.plain) else MaskedTokens(codec, shift)


def first_decoder_id(model: nn.Module) -> int:
    """Return the decoder's first id: the one in the configs, else padding, else 0."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for owner in ("config", "generation_config"):
            if isinstance(value := getattr(getattr(model, owner, None), name, None), int):
                return value
    return 0


def reads_no_later_token(model: nn.Module, window: torch.Tensor, plain: range) -> bool:
    """Return whether outputs stay the same when all later tokens change.

    A causal model leaves it bit for bit, save for rounding where the order of a sum depends on other tokens, which moves few
    logits; one that looks ahead moves most of them, in half precision too.
    """
    places = torch.tensor(sorted({1, len(window) // 2, len(window) - 1}))
    other = plain.start + (window - plain.start + len(plain) // 2) % len(plain)
    changed = torch.where(torch.arange(len(window)) >= places[:, None], other, window)  # (places, seq)
    ids = torch.cat([window[None], changed])
    logits = compute_logits(model, {"input_ids": ids, "labels": ids})
    difference = logits[0, places - 1] - logits[torch.arange(1, len(logits)), places - 1]  # (places, vocab)
    noise = 8 * torch.finfo(torch.float32).eps * logits.abs().max()
    return bool(((difference.abs() > noise).float().mean(1) < MOVED).all())


def detect_label_shift(model: nn.Module, example: Example) -> int:
    """Return 1 if the model's loss compares the output at p with the label at p + 1, 0 if with the label at p.

    With a single label at t, another label there changes the loss by a difference of two logits, at p = t or p = t − 1.
    """
    labels = example["labels"]
    place = len(labels) // 2
    logits = compute_logits(model, example)[0]
    contrast = logits[place] - logits[place - 1]
    high, low = int(contrast.argmax()), int(contrast.argmin())

    def loss(label: int) -> float:
        single = torch.full_like(labels, IGNORED)
        single[place] = label
        return compute_loss(model, {**example, "labels": single})

    difference = loss(high) - loss(low)
    unshifted, shifted = (float(logits[p, low] - logits[p, high]) for p in (place, place - 1))
    return int(abs(difference - shifted) < abs(difference - unshifted))


def for_loss_of(model: nn.Module, objective: Objective, window: torch.Tensor) -> Objective:
    """Return the objective with its labels shifted as the loss of `model` reads them, detected on one `window` of ids (seq,)."""
    with evaluation_mode(model), torch.no_grad():
        shift = detect_label_shift(model, objective.example(window, torch.Generator().manual_seed(0)))
    return dataclasses.replace(objective, shift=shift)  # type: ignore[type-var]


def compute_logits(model: nn.Module, example: Example) -> torch.Tensor:
    """Return the logits for each label of `example`: (batch, seq, vocab)."""
    length = example["labels"].shape[-1]
    logits = find_logits(run(model, {key: value for key, value in example.items() if key != "labels"}))
    if logits is None or logits.shape[1] != length:
        raise no_logits(f"{class_of(model)} gives no logits for each of its {length} tokens", "its outputs are of another shape")
    return logits.float().cpu()


def compute_loss(model: nn.Module, example: Example) -> float:
    """Return the loss, the first output of a model that receives labels."""
    outputs = list_of(run(model, example))
    if not outputs or not isinstance(outputs[0], torch.Tensor) or outputs[0].numel() != 1:
        raise TrainingError(
            f"{class_of(model)} returned no loss although it received labels",
            why="its first output is not a single number",
            remedy=NEEDS_HEAD,
            code="no-loss",
        )
    return float(outputs[0])


def run(model: nn.Module, inputs: Example) -> Any:
    """Return the outputs of a forward of one window (seq,) or of several (batch, seq); raises `TrainingError` if it fails."""
    device = next(model.parameters()).device
    try:
        return model(**{key: torch.atleast_2d(value).to(device) for key, value in inputs.items()})
    except Exception as error:  # the model's own code may raise anything
        labelled = "labels" in inputs
        raise TrainingError(
            f"{class_of(model)} cannot {'compute a loss for' if labelled else 'read'} {inputs['input_ids'].shape[-1]} tokens",
            why=first_line(error),
            remedy=NEEDS_HEAD if labelled else "use a shorter --length",
            code="no-loss" if labelled else "too-long",
        ) from error
