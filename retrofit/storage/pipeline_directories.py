"""Directories of sentence-transformers: a list of modules, in `modules.json`, one of which is a transformer.

`EmbeddingComparison` measures how far the embeddings of such a directory move when its transformer is rewritten.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import CheckpointError, first_line
from retrofit.inputs.usable_models import transformers_models
from retrofit.passbase.tokenization import read_texts
from retrofit.process import quiet, serialized

MODULES, CONFIG = "modules.json", "config.json"


def transformer_folder(path: Path) -> Path:
    """Return the folder of the transformers model in a directory: the directory itself, or the one that its `modules.json` names.

    Raises `CheckpointError` where the modules hold no transformer, or several.
    """
    if not (path / MODULES).is_file():
        return path
    folders = [folder for folder in module_folders(path) if names_transformer(folder / CONFIG)]
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise CheckpointError(
            f"{path} holds no transformer",
            why=f"no module that {MODULES} names has a {CONFIG} of a transformers model",
            remedy="give a directory of sentence-transformers whose modules begin with a transformer, or a Hugging Face directory",
        )
    raise CheckpointError(
        f"{path} holds {len(folders)} transformers",
        why=", ".join(str(folder.relative_to(path)) for folder in folders),
        remedy=f"name the folder of one of them: {folders[0]}",
    )


def is_pipeline(path: Path) -> bool:
    """Return whether a directory is one of sentence-transformers."""
    return (path / MODULES).is_file()


@serialized
def load_pipeline(path: Path) -> Any:
    """Return the whole sentence-transformers model in a directory, its transformer rewritten as its recipe says, in eval mode.

    Raises `CheckpointError` where the package is missing, and where the modules hold no transformer, or several.
    """
    transformer_folder(path)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a model of sentence-transformers",
            why=first_line(error),
            remedy="pip install sentence-transformers, or give the folder of its transformer alone",
            code="not-installed",
        ) from error
    with quiet(progress_bars=True):
        return SentenceTransformer(str(path), device="cpu", local_files_only=True, trust_remote_code=False).eval()


def other_modules(path: Path) -> list[str]:
    """Return the kinds of a pipeline's modules other than its transformer, in order: `Pooling`, `Normalize`."""
    module_folders(path)  # raises where the list is not one
    inside, listed = transformer_folder(path), json.loads((path / MODULES).read_text(encoding="utf-8"))
    return [str(entry.get("type", entry["path"])).rpartition(".")[2] for entry in listed if path / entry["path"] != inside]


def module_folders(path: Path) -> list[Path]:
    """Return the folders that `modules.json` names, each once, those of a module's own modules below it included."""
    try:
        named = json.loads((path / MODULES).read_text(encoding="utf-8"))
        direct = [path / entry["path"] for entry in named]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / MODULES} is not a list of modules", why=first_line(error), code="unreadable") from error
    for folder in direct:
        if not folder.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(
                f"{path / MODULES} names a module outside the directory",
                why=str(folder),
                remedy="put the module into the directory",
                code="untrusted",
            )
    below = [file.parent for folder in direct if folder != path for file in sorted(folder.glob(f"*/{CONFIG}"))]
    return list(dict.fromkeys([*direct, *below]))


def names_transformer(config: Path) -> bool:
    """Return whether the file is the config of a transformers model, and not of another module."""
    try:
        content: Any = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


TEXTS = 64  # lines that are embedded


@dataclasses.dataclass(frozen=True)
class EmbeddingComparison:
    """A whole pipeline, lines of text, and the dense model's embeddings of them."""

    pipeline: Any
    texts: list[str]
    dense: Tensor  # (texts, width)

    @staticmethod
    def of(path: Path, model: nn.Module, files: list[Path]) -> EmbeddingComparison | None:
        """Return the comparison for the dense `model` of the pipeline at `path`; None if `path` is none, or the text is empty."""
        texts = spread(read_texts(files))
        if not is_pipeline(path) or not texts:
            return None
        pipeline = load_pipeline(path)
        put_transformer(pipeline, model)
        return EmbeddingComparison(pipeline, texts, encode(pipeline, texts))

    def measured(self, model: nn.Module) -> str:
        """Return the cosines of the embeddings with the rewritten `model` to those of the dense one."""
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
    owner, name = next(
        (module, name) for module in pipeline.modules() for name, child in module.named_children() if child is inside
    )
    setattr(owner, name, model)


def encode(pipeline: Any, texts: list[str]) -> Tensor:
    embeddings: Tensor = pipeline.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    return embeddings.float()
