"""A rewritten model saved with what came with the dense one: tokenizer, chat template, the other modules of a pipeline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel

from retrofit.errors import CheckpointError
from retrofit.pipeline.tokenization import read_tokenizer
from retrofit.runtime import gguf_header
from retrofit.runtime.atomic_writes import whole_directory
from retrofit.runtime.model_folders import TEMPLATES
from retrofit.storage.model_card import write_card
from retrofit.storage.pipeline_directories import MODULES, module_folders, transformer_folder

WEIGHTS = (  # how the names of files of weights end
    *(".safetensors", ".bin", ".pt", ".pth", ".pt2", ".ckpt", ".h5", ".keras", ".msgpack", ".ot", ".tflite", ".pte", ".mlmodel"),
    *(".onnx", ".gguf", ".index.json", ".xml", "_data"),
)


def has_companions(source: Path) -> bool:
    """Whether more than a model may be at `source`."""
    return source.is_dir() or source.suffix == gguf_header.SUFFIX


def tokenizer_place(source: Path) -> Path:
    """Where the tokenizer of the model at `source` would be."""
    return transformer_folder(source) if source.is_dir() else source


def save_with_companions(model: PreTrainedModel, source: Path, output: Path, *, force: bool) -> Path:
    """The model is in the directory `output`, and with it what else `source` holds, a directory's files byte for byte.

    Left out are hidden files, folders of anything but chat templates, and the weights of the dense model in whatever format; other
    modules keep theirs. README.md says what the model is now before what it said (`model_card`). Raises `CheckpointError` where a
    link leads out of the directory.
    """
    with whole_directory(output, force=force) as draft:
        if not source.is_dir():
            model.save_pretrained(draft)
            tokenizer = read_tokenizer(source)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            write_card(model, draft, output)
            return output
        files = companion_files(source)
        place = draft / transformer_folder(source).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(place)
        add_companions(model, source, files, draft, output)
    return output


def add_companions(model: PreTrainedModel, source: Path, files: list[Path], folder: Path, output: Path) -> None:
    """Beside the model in `folder`, which will be `output`, are those files of `source` that it did not write, and the card."""
    for file in files:
        copy = folder / file.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    write_card(model, folder, output)


def companion_files(source: Path) -> list[Path]:
    """The files of a directory that are kept with a rewritten model; none of them is a link that leads out of the directory.

    Raises `CheckpointError` for such a link, and for one to another directory.
    """
    files = [*kept_files(source), *(kept_files(source / TEMPLATES) if (source / TEMPLATES).is_dir() else ())]
    if (source / MODULES).is_file():
        folder = transformer_folder(source)
        others = {one for one in module_folders(source) if one not in (source, folder)}
        for place, folders, names in os.walk(source):
            inner = Path(place)
            if not others.isdisjoint((inner, *inner.parents)):
                files += [inner / name for name in sorted(names)]  # a module of the pipeline, whole
            else:
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                files += kept_files(inner) if inner != source else ()
            for link in (inner / name for name in folders if (inner / name).is_symlink()):
                raise foreign_link(link)
    for file in files:
        if not is_within(file, source):
            raise foreign_link(file)
    return files


def kept_files(folder: Path) -> Iterator[Path]:
    """The files right in a directory that are neither hidden nor weights."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(WEIGHTS):
            yield file


def is_within(file: Path, source: Path) -> bool:
    """Whether the file lies in the directory, its links followed, or with its revision in a cache of the Hugging Face hub."""
    real, target = source.resolve(), file.resolve()
    snapshots = next((place for place in real.parents if place.name == "snapshots"), None)
    blobs = snapshots and snapshots.parent / "blobs"  # models--name/snapshots/revision/… links to models--name/blobs
    return target.is_relative_to(real) or target.parent == blobs


def foreign_link(link: Path) -> CheckpointError:
    return CheckpointError(
        f"{link} is a link out of the model's directory",
        why=f"what it leads to, {link.resolve()}, would be copied to the result",
        remedy="put a copy of it there if it belongs to the model, else remove it",
    )
