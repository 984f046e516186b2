"""Models on disk: `save` and `load` for `.pt` files and Hugging Face directories.

A `.pt` file is `{"format", "architecture", "config", "recipe", "state_dict"}` in torch's own container, with the shapes of the
`inputs` that the recipe was applied with, if they were given. It contains no code: `torch.load(path, weights_only=True)` reads it.
A directory has the format of `save_pretrained`. Both contain the recipe. Loading replays it on the empty dense model before the
weights are filled in; a `.pt` file's weights are mapped from the file, not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import whole_directory, whole_file
from retrofit.files.model_folders import DESCRIBED, EXPORTED, FILES, GGUF, ONNX, OTHER_FORMATS, as_path, require_writable_kind
from retrofit.inputs.packed_weights import refuse_packed_layers
from retrofit.onnx.exporter import export_onnx
from retrofit.onnx.importer import from_onnx
from retrofit.passbase.recipe_storage import as_ordinary_model
from retrofit.process import serialized, unbroken
from retrofit.storage.companions import write_card
from retrofit.storage.directories import load_directory, name_file_in_errors
from retrofit.storage.exported_program import load_exported, save_exported
from retrofit.storage.gguf_file import load_gguf
from retrofit.storage.pt_file import architecture_in_file, checkpoint_contents, read_checkpoint, rebuild_model
from retrofit.storage.sampled_files import write_no_zeros


@serialized
def save(model: nn.Module, path: str | Path, *, force: bool = False, tokenizer: Any = None) -> Path:
    """Write the model with its recipe to `path`, a `.pt`, `.pt2` or `.onnx` file or else a directory, completely or not at all.

    An `.onnx` file is for inference, as written by `export_onnx`. In a directory the `tokenizer`, if given, is saved too.

    Raises `CheckpointError` if `path` exists (unless `force`) or cannot be written, or if the model cannot be built again from a
    file.
    """
    path, model = as_path(path), uncompiled(model)
    require_savable(model, path)
    if path.suffix == EXPORTED:
        return save_exported(model, path, force=force)
    if path.suffix == ONNX:
        export_onnx(model, path, force=force)
        return path
    if path.suffix in FILES:
        payload = checkpoint_contents(model)
        with whole_file(path, force=force) as file, unbroken(file) as sink:
            torch.save(payload, sink)
        return path
    with whole_directory(path, force=force) as directory, as_ordinary_model(model), write_no_zeros():
        model.save_pretrained(str(directory))  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
        write_card(model, directory, path)
    return path


def require_savable(model: nn.Module, path: Path) -> None:
    """Raises `CheckpointError` if the name, or the model itself, already shows that it cannot be saved there."""
    model = uncompiled(model)
    require_writable_kind(path)
    refuse_packed_layers(model, CheckpointError, "saved", "which a file of tensors does not hold")
    if path.suffix in FILES:
        architecture_in_file(model)
    elif path.suffix not in (EXPORTED, ONNX) and not hasattr(model, "save_pretrained"):
        raise CheckpointError(
            f"{type(model).__name__} cannot be saved as a directory",
            why="it has no method save_pretrained, as transformers and sentence-transformers models have",
            remedy=f"save it to a file: {path.with_suffix('.pt')}",
            code="name",
        )


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model itself, without torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


@serialized
def load(
    path: str | Path,
    *,
    config: str | Path | None = None,
    allow_pickle: bool = False,
    build: Callable[[], nn.Module] | None = None,
    dtype: torch.dtype | str | None = None,
) -> nn.Module:
    """Return the model saved at `path`, rewritten by its recipe, in eval mode, its weights in `dtype` or as saved.

    An `.onnx` file becomes a graph module that trains (`from_onnx`), a `.gguf` file the transformers model that it was made from.

    `config` is the directory (or config.json) that describes a file of bare weights; `build` creates the dense model for a file's
    weights; `allow_pickle` permits files that can run code when they are read. Raises `CheckpointError`, with the reason.
    """
    path, dtype = as_path(path), as_dtype(dtype)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist",
            remedy="use a .pt checkpoint, a Hugging Face directory, a .gguf, .pt2 or .onnx file",
            code="missing",
        )
    kind = "a directory" if path.is_dir() else DESCRIBED.get(path.suffix)
    if kind is not None:
        require_no_description(path, kind, config, build)
    if path.is_dir() or path.suffix == GGUF:
        with name_file_in_errors(path):
            return load_directory(path, dtype) if path.is_dir() else load_gguf(path, dtype)
    if path.suffix in (EXPORTED, ONNX):
        loaded = load_exported(path, allow_pickle=allow_pickle) if path.suffix == EXPORTED else from_onnx(path)
        return loaded if dtype is None else loaded.to(dtype)
    if path.suffix in (*OTHER_FORMATS, ".json"):
        folder = f", {path.parent}" if (path.parent / "config.json").is_file() else ""
        raise CheckpointError(
            f"{path}: a {path.suffix} file alone is not a model that retrofit reads",
            remedy=f"use the Hugging Face directory{folder}, or a .pt checkpoint",
            code="no-model",
        )
    content = read_checkpoint(path, allow_pickle=allow_pickle)
    with name_file_in_errors(path):
        return rebuild_model(content, path, config=config, build=build, dtype=dtype, imports=allow_pickle)


def require_no_description(path: Path, kind: str, config: object, build: object) -> None:
    """Raises `CheckpointError` if a second description is given for a file or directory that already describes its model."""
    given = [name for name, value in (("config= (--config)", config), ("build=", build)) if value is not None]
    if given:
        raise CheckpointError(
            f"{path} is {kind} with its own config", remedy=f"drop {' and '.join(given)}", option="config", code="combination"
        )


def as_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype, given as such or by name."""
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{given!r} is not a dtype", remedy="use float32, bfloat16 or float16", option="dtype", code="choice")
    return dtype
