"""Directories of sentence-transformers: a list of modules, in `modules.json`, one of which is a transformer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retrofit.errors import CheckpointError, first_line
from retrofit.runtime.one_at_a_time import one_at_a_time
from retrofit.runtime.quiet import quiet

MODULES, CONFIG = "modules.json", "config.json"


def transformer_folder(path: Path) -> Path:
    """The folder of the transformers model in a directory: the directory itself, or the one that its `modules.json` names.

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
    """Whether a directory is one of sentence-transformers."""
    return (path / MODULES).is_file()


@one_at_a_time
def load_pipeline(path: Path) -> Any:
    """The whole sentence-transformers model in a directory, its transformer rewritten as its recipe says, in eval mode.

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
        ) from error
    with quiet(progress_bars=True):
        return SentenceTransformer(str(path), device="cpu", local_files_only=True, trust_remote_code=False).eval()


def other_modules(path: Path) -> list[str]:
    """The kinds of a pipeline's modules other than its transformer, in order: `Pooling`, `Normalize`."""
    module_folders(path)  # raises where the list is not one
    inside, listed = transformer_folder(path), json.loads((path / MODULES).read_text(encoding="utf-8"))
    return [str(entry.get("type", entry["path"])).rpartition(".")[2] for entry in listed if path / entry["path"] != inside]


def module_folders(path: Path) -> list[Path]:
    """The folders that `modules.json` names, each once, those of a module's own modules below it included."""
    try:
        named = json.loads((path / MODULES).read_text(encoding="utf-8"))
        direct = [path / entry["path"] for entry in named]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / MODULES} is not a list of modules", why=first_line(error)) from error
    for folder in direct:
        if not folder.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(
                f"{path / MODULES} names a module outside the directory",
                why=str(folder),
                remedy="put the module into the directory",
            )
    below = [file.parent for folder in direct if folder != path for file in sorted(folder.glob(f"*/{CONFIG}"))]
    return list(dict.fromkeys([*direct, *below]))


def names_transformer(config: Path) -> bool:
    """Whether the file is the config of a transformers model, and not of another module."""
    try:
        content: Any = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content
