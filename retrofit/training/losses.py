"""The outputs of a model that are logits, and losses for models that compute none: of labels, or of sentence embeddings.

Graphs, exported programs, ONNX files and models in plain torch get the loss of their labels.

Sentence embeddings are trained on plain text: each text goes through the model twice and is distinguished from the others of its
batch. The two embeddings of a text differ by dropout alone. Unsupervised SimCSE: Gao, Yao, Chen (2021), arXiv:2104.08821, §3, with
its temperature.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import TrainingError
from retrofit.inputs.example_inputs import beside_ids, forward_parameters, is_required, kinds_beside_ids
from retrofit.inputs.probes import accepts, named_outputs
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training.settings import Settings
from retrofit.training.windows import WINDOW


def without_labels(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward that computes no loss and keeps no cache."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", WINDOW)}
    return {**inputs, "use_cache": False} if accepts(model, "use_cache") else inputs


def find_logits(outputs: Any) -> Tensor | None:
    """Return the output named `logits`, else the first, that has three dimensions."""
    named = [outputs["logits"]] if isinstance(outputs, Mapping) and "logits" in outputs else []
    return next((value for value in (*named, *list_of(outputs)) if isinstance(value, Tensor) and value.dim() == 3), None)


def token_logits(outputs: Any) -> Tensor:
    """Return the logits in what a model returned, as `find_logits` finds them; raises `TrainingError` where there are none."""
    found = find_logits(outputs)
    if found is None:
        raise TrainingError(
            "the model returns no logits for each token",
            why="none of its outputs is (batch, seq, vocabulary)",
            remedy="train a model with a language-modelling head",
            code="no-logits",
        )
    return found


def list_of(outputs: Any) -> list[Any]:
    """Return what a model returned, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, Mapping) else list(outputs)


REMEDY = "train a Hugging Face model with a language-modelling head, or one that takes input_ids and returns logits"


def accepts_labels(model: nn.Module) -> bool:
    """Return whether the model's forward takes `labels`, or any keyword."""
    parameters = forward_parameters(model).values()
    return any(one.name == "labels" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def add_loss(model: nn.Module) -> nn.Module:
    """`model` where it takes labels, else wrapped in one that does; raises `TrainingError` where its inputs cannot be derived."""
    if accepts_labels(model):
        return model
    parameters = forward_parameters(model)
    required = [name for name, one in parameters.items() if is_required(one)]
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
    """Return the class of a model as its user knows it, whether or not a loss was added."""
    return type(model.model if isinstance(model, WithLabelLoss) else model).__name__


class WithLabelLoss(nn.Module):
    """A model from ids to logits and, given labels, its loss: the mean cross-entropy of the logits at p and the label at p.

    The losses that its modules record, such as those that balance experts, are added to it.
    """

    def __init__(self, model: nn.Module, ids: str, beside: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.model, self.ids, self.beside = model, ids, beside  # the last by name, of inputs that follow from the ids

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """(batch, seq) ids, and labels that are -100 where nothing is learned, to the loss, if there are labels, and the logits."""
        recording: AbstractContextManager[list[Tensor]] = nullcontext([]) if labels is None else auxiliary_losses()
        with recording as others:
            logits = find_logits(named_outputs(self.model(**self.inputs(input_ids))))
        if logits is None:
            raise TrainingError(
                f"{type(self.model).__name__} gives no logits",
                why="none of its outputs is (batch, seq, vocabulary)",
                remedy=REMEDY,
                code="no-logits",
            )
        if labels is None:
            return (logits,)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return (loss + sum(one.to(loss) for one in others), logits)

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """Return the ids of windows without padding, and the other inputs the model takes with them."""
        return {self.ids: ids} | beside_ids(ids, self.beside)


TEMPERATURE = 0.05
EMBEDDING = "sentence_embedding"  # its name among what a sentence-transformers model returns


def embeds_sentences(model: nn.Module) -> bool:
    """Return whether the model is one of sentence-transformers, which makes one vector of a text."""
    package = sys.modules.get("sentence_transformers")
    return package is not None and isinstance(model, package.SentenceTransformer)


@dataclasses.dataclass(frozen=True)
class SameText:
    """A text is told from the others of its batch by its embedding; the ids before and after it are the tokenizer's own."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    shift: int = 0
    name: str = "texts told apart (SimCSE)"

    def example(self, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        whole = torch.cat([ids.new_tensor(self.before), ids, ids.new_tensor(self.after)])
        return {"input_ids": whole, "labels": whole}  # the label of a text is the text itself


class WithContrastiveLoss(nn.Module):
    """A sentence-transformers model from ids to embeddings and, given labels, its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """(batch, seq) ids to the loss, if there are labels, and the embeddings: (batch, width)."""
        one = self.embed(input_ids)
        if labels is None:
            return (one,)
        other = self.embed(input_ids)
        similarity = F.normalize(one.float(), dim=-1) @ F.normalize(other.float(), dim=-1).T / TEMPERATURE  # (batch, batch)
        return F.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device)), one

    def embed(self, ids: Tensor) -> Tensor:
        embedding: Tensor = self.model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[EMBEDDING]
        return embedding


def embedding_distance(found: Tensor, expected: Tensor) -> Tensor:
    """Σ ‖found − expected‖² / Σ ‖expected‖² over a batch of embeddings, (batch, width): of unit vectors, mean 2 (1 − cosine)."""
    if found.shape != expected.shape:
        raise TrainingError(
            f"the teacher's embeddings have {expected.shape[-1]} numbers, the model's {found.shape[-1]}",
            why="the modules after the transformer are others",
            remedy="name the dense sentence-transformers model that was rewritten",
            code="other-model",
            option="teacher",
        )
    return (found.float() - expected.float()).square().sum() / expected.float().square().sum()


def same_text(tokenizer: Any, settings: Settings) -> SameText:
    """Return the objective for a model with this tokenizer.

    Raises `TrainingError` where a batch holds nothing to tell a text from.
    """
    if settings.batch_size < 2:
        raise TrainingError(
            f"--batch-size {settings.batch_size} is too small for sentence embeddings",
            why="a text is told from the others of its batch",
            remedy="give 2 or more",
            option="batch_size",
        )
    plain, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return SameText(tuple(whole[:start]), tuple(whole[start + len(plain) :]))
