"""A rewritten model saved with what came with the dense one: tokenizer, chat template, the other modules of a pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from retrofit.pipeline.tokenization import read_tokenizer
from retrofit.runtime import gguf_header
from retrofit.runtime.atomic_writes import whole_directory
from retrofit.storage.pipeline_directories import MODULES, module_folders, transformer_folder

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json", ".xml", "_data")


def has_companions(source: Path) -> bool:
    """Whether more than a model may be at `source`."""
    return source.is_dir() or source.suffix == gguf_header.SUFFIX


def tokenizer_place(source: Path) -> Path:
    """Where the tokenizer of the model at `source` would be."""
    return transformer_folder(source) if source.is_dir() else source


def save_with_companions(model: PreTrainedModel, source: Path, output: Path, *, force: bool) -> Path:
    """The model is in the directory `output`, and with it what else `source` holds, a directory's files byte for byte.

    Left out are hidden files, and the weights of the dense model in whatever format; other modules keep theirs.
    """
    with whole_directory(output, force=force) as draft:
        if not source.is_dir():
            model.save_pretrained(draft)
            tokenizer = read_tokenizer(source)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            return output
        folder = transformer_folder(source)
        place = draft / folder.relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(place)
        if (source / MODULES).is_file():
            copy_modules(source, folder, draft)
        else:
            copy_files(source, draft)
    return output


def copy_modules(source: Path, folder: Path, draft: Path) -> None:
    """Everything of a pipeline but the weights of the transformer in `folder` is in `draft`."""
    others = [one for one in module_folders(source) if one not in (source, folder) and one.is_dir()]
    for other in others:
        shutil.copytree(other, draft / other.relative_to(source), dirs_exist_ok=True)
    copied = {draft / one.relative_to(source) for one in others}
    for inner in (source, *(one for one in sorted(source.rglob("*")) if one.is_dir())):
        place = draft / inner.relative_to(source)
        if not any(part.startswith(".") for part in inner.relative_to(source).parts) and copied.isdisjoint((place, *place.parents)):
            copy_files(inner, place)


def copy_files(source: Path, draft: Path) -> None:
    """The files of one directory that are neither hidden nor weights are in `draft`, but for those that it has already."""
    for file in source.iterdir():
        if (
            file.is_file()
            and not file.name.startswith(".")
            and not file.name.endswith(WEIGHTS)
            and not (draft / file.name).exists()
        ):
            draft.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, draft / file.name)
