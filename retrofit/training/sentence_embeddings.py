"""Sentence embeddings trained on plain text: each text goes through the model twice and is told from the others of its batch.

The two embeddings of a text differ by dropout alone. Unsupervised SimCSE: Gao, Yao, Chen (2021), arXiv:2104.08821, §3, with its
temperature.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import TrainingError
from retrofit.training.settings import Settings

TEMPERATURE = 0.05
EMBEDDING = "sentence_embedding"  # its name among what a sentence-transformers model returns


def embeds_sentences(model: nn.Module) -> bool:
    """Whether the model is one of sentence-transformers, which makes one vector of a text."""
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
        )
    return (found.float() - expected.float()).square().sum() / expected.float().square().sum()


def same_text(tokenizer: Any, settings: Settings) -> SameText:
    """The objective for a model with this tokenizer; raises `TrainingError` where a batch holds nothing to tell a text from."""
    if settings.batch_size < 2:
        raise TrainingError(
            f"--batch-size {settings.batch_size} is too small for sentence embeddings",
            why="a text is told from the others of its batch",
            remedy="give 2 or more",
        )
    plain, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return SameText(tuple(whole[:start]), tuple(whole[start + len(plain) :]))
