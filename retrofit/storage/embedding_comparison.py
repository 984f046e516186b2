"""How far the embeddings of a sentence-transformers directory move when its transformer is rewritten."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.pipeline.tokenization import read_texts
from retrofit.runtime.wrapped_models import transformers_models
from retrofit.storage.pipeline_directories import is_pipeline, load_pipeline

TEXTS = 64  # lines that are embedded


@dataclasses.dataclass(frozen=True)
class EmbeddingComparison:
    """A whole pipeline, lines of text, and the dense model's embeddings of them."""

    pipeline: Any
    texts: list[str]
    dense: Tensor  # (texts, width)

    @staticmethod
    def of(path: Path, model: nn.Module, files: list[Path]) -> EmbeddingComparison | None:
        """The comparison for the dense `model` from the pipeline at `path`; None where `path` is none, or the text is empty."""
        texts = spread(read_texts(files))
        if not is_pipeline(path) or not texts:
            return None
        pipeline = load_pipeline(path)
        put_transformer(pipeline, model)
        return EmbeddingComparison(pipeline, texts, encode(pipeline, texts))

    def measured(self, model: nn.Module) -> str:
        """The cosines of the embeddings with the rewritten `model` to those of the dense one."""
        put_transformer(self.pipeline, model)
        cosines = torch.cosine_similarity(encode(self.pipeline, self.texts), self.dense, dim=-1)
        return (
            f"cosine to the dense model's over {len(self.texts)} lines of the text: "
            f"median {float(cosines.median()):.4f}, lowest {float(cosines.min()):.4f}"
        )


def spread(texts: list[str]) -> list[str]:
    """At most `TEXTS` lines that are not empty, from all over the texts."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return [lines[at * len(lines) // TEXTS] for at in range(TEXTS)] if len(lines) > TEXTS else lines


def put_transformer(pipeline: Any, model: nn.Module) -> None:
    """`model` is the transformers model inside the pipeline."""
    inside = transformers_models(pipeline)[0]
    owner, name = next((one, name) for one in pipeline.modules() for name, child in one.named_children() if child is inside)
    setattr(owner, name, model)


def encode(pipeline: Any, texts: list[str]) -> Tensor:
    embeddings: Tensor = pipeline.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    return embeddings.float()
