"""The files of a directory that belong to its model; kinds of model files, by their names."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
from pathlib import Path
from typing import Any

from retrofit.errors import CheckpointError, first_few, kind_of

OWN = (  # written by transformers, sentence-transformers and tokenizers
    *("config.json", "generation_config.json", "adapter_config.json", "training_args.bin"),
    *("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json"),
    *("adapter_model.*", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.json", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
TEMPLATES = "additional_chat_templates"  # the folder of a tokenizer's chat templates other than the first
CARD, OF_A_RECIPE = "README.md", "<!-- retrofit: begin -->"  # the beginning of a card's text on a retrofitted model
SHOWN = 3  # names shown in an error


def is_model_folder(path: Path) -> bool:
    """Return whether the directory holds a model written by transformers or sentence-transformers."""
    config, modules = read_json(path / "config.json"), read_json(path / "modules.json")
    described = isinstance(config, dict) and ("model_type" in config or "architectures" in config)
    return described or (isinstance(modules, list) and all(isinstance(module, dict) and "path" in module for module in modules))


def require_replaceable(path: Path) -> None:
    """Raises `CheckpointError` unless a model may replace the directory's content: it is a model, and not the current directory."""
    with contextlib.suppress(OSError):  # the current directory does not exist any more
        if Path.cwd().resolve().is_relative_to(path.resolve()):
            raise CheckpointError(
                f"{path} cannot be replaced",
                why="it is or contains the current directory",
                remedy="choose another name",
                code="occupied",
            )
    names = sorted(entry.name for entry in path.iterdir())
    if names and not is_model_folder(path):
        raise CheckpointError(
            f"{path} exists and is not the directory of a model",
            why=f"it holds {first_few(names, SHOWN)}, and no config.json of a model; only a model may be overwritten",
            remedy="choose another name",
            code="occupied",
        )


def carry_over(old: Path, new: Path) -> None:
    """Move into `new` the files in `old` that are not its model's, unless `new` has its own; remove `old`."""
    for entry in sorted(old.iterdir()):
        place, folder = new / entry.name, entry.is_dir() and not entry.is_symlink()
        if folder and entry.name == TEMPLATES:
            shutil.rmtree(entry)
        elif folder and place.is_dir():
            carry_over(entry, place)
        elif not folder and (place.exists() or place.is_symlink() or is_own(entry)):
            entry.unlink()
        else:
            entry.rename(place)  # raises if `old` has a directory where `new` has a file
    old.rmdir()


def is_own(file: Path) -> bool:
    """Return whether a file belongs to a model, by its name, or is a card that describes how the model was rewritten."""
    return any(fnmatch.fnmatchcase(file.name, pattern) for pattern in OWN) or (file.name == CARD and says_recipe(file))


def says_recipe(card: Path) -> bool:
    """Return whether a card describes how the model was rewritten."""
    return card.is_file() and OF_A_RECIPE in card.read_text(encoding="utf-8", errors="surrogateescape")


def read_json(file: Path) -> Any:
    """Return the file's data; None if it does not exist or is not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def as_path(given: object) -> Path:
    """Return the given text or path as a path. Raises `CheckpointError` for anything else."""
    if isinstance(given, (str, os.PathLike)):
        return Path(given)
    raise CheckpointError(
        f"{str(given)[:80]} is not a path", why=f"it is {kind_of(given)}", remedy="pass a str or pathlib.Path", code="name"
    )


# ── Kinds of files, by their names ────────────────────────────────────────────────────────────────────────────────────────────────


FILES = (".pt", ".pth")
EXPORTED = ".pt2"
ONNX = ".onnx"
GGUF = ".gguf"
DESCRIBED = {EXPORTED: "an exported program", ONNX: "an ONNX file", GGUF: "a GGUF file"}  # files that say how to build their model
OTHER_FORMATS = (".safetensors", ".ckpt", ".bin", ".npz", ".h5")
NOT_WRITTEN = (*OTHER_FORMATS, GGUF, ".npy", ".pkl", ".pickle", ".msgpack", ".json", ".zip")
SUFFIXES = (*FILES, EXPORTED, ONNX, *NOT_WRITTEN)


def is_file_name(path: Path) -> bool:
    """Return whether `save` writes a file at this path, or refuses to, rather than a directory."""
    return path.suffix.lower() in SUFFIXES


def require_writable_kind(path: Path) -> None:
    """Raises `CheckpointError` if the name is that of a kind of file in which models are not saved."""
    suffix = path.suffix.lower()
    if suffix in NOT_WRITTEN:
        raise CheckpointError(f"{path}: models are not saved as {suffix}", remedy="name a .pt file or a directory", code="name")
    if suffix in SUFFIXES and path.suffix != suffix:
        raise CheckpointError(
            f"{path}: the suffix {suffix} must be lower case", remedy=f"name {path.with_suffix(suffix)}", code="name"
        )
