"""A rewritten model saved with the dense one's other files: tokenizer, chat template, other modules of a pipeline, the model card.

The card is the README.md of the directory: the changes made by the passes, followed by its earlier text.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from retrofit.errors import CheckpointError, RetrofitError
from retrofit.files.atomic_writes import whole_directory
from retrofit.files.model_folders import CARD, GGUF, OF_A_RECIPE, TEMPLATES, says_recipe
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import as_pass
from retrofit.passbase.replaying import rewritten_part
from retrofit.passbase.tokenization import read_tokenizer
from retrofit.storage.directories import is_pipeline, module_folders, transformer_folder
from retrofit.storage.sampled_files import write_no_zeros

BEGIN, END = OF_A_RECIPE, "<!-- retrofit: end -->"
FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # the metadata at the beginning of a card on the Hugging Face hub
METADATA = "---\nlibrary_name: transformers\ntags:\n- retrofit\n---\n"
DESCRIPTION = re.compile(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)


def write_card(model: nn.Module, folder: Path, replaced: Path | None = None) -> None:
    """Describe, in README.md in `folder`, the passes that `model` went through; for a dense model remove that description.

    The earlier text follows the description, and its metadata precede it; the description of an earlier recipe is removed. The
    earlier text is that of README.md in `folder`, or else in the directory `replaced` that the folder will replace, if there is
    one.
    """
    former = replaced / CARD if replaced is not None else None
    if former is not None and former.is_file() and not former.is_symlink() and not (folder / CARD).exists():
        shutil.copyfile(former, folder / CARD)
    text = description(model)
    if text is not None:
        put_on_card(text, folder)
    else:
        take_off_card(folder)


def put_on_card(text: str, folder: Path) -> None:
    """Put `text` into README.md in `folder`, before the text on the dense model."""
    file = folder / CARD
    before = file.read_text(encoding="utf-8", errors="surrogateescape") if file.is_file() else ""
    found = FRONT.match(before)
    front = found[0] if found else "" if before else METADATA
    rest = DESCRIPTION.sub("", before[found.end() if found else 0 :]).lstrip("\n")
    of_dense = f"\n\nOf the dense model:\n{END}\n\n{rest}" if rest else f"\n{END}\n"
    file.write_text(f"{front}{BEGIN}\n{text}{of_dense}", encoding="utf-8", errors="surrogateescape")


def take_off_card(folder: Path) -> None:
    """Restore the dense model's README.md in `folder`; delete it if it was empty."""
    file = folder / CARD
    if not says_recipe(file):
        return
    before = file.read_text(encoding="utf-8", errors="surrogateescape")
    left = DESCRIPTION.sub("", before)
    if left == METADATA:
        file.unlink()
    else:
        file.write_text(left, encoding="utf-8", errors="surrogateescape")


def description(model: nn.Module) -> str | None:
    """Return the description of a retrofitted model, as Markdown; None for a dense one."""
    part = rewritten_part(model)
    specs = recipe_storage.stored_recipe(part)
    if not specs:
        return None
    count = sum(parameter.numel() for parameter in part.parameters())
    return "\n".join(
        [
            f"# {type(part).__name__}, retrofitted",
            "",
            f"A dense model that retrofit rewrote. It has {count:,} parameters now.",
            "",
            "| pass | what it does | from | function at step 0 |",
            "| --- | --- | --- | --- |",
            *map(row, specs),
            "",
            "`from_pretrained` loads it where retrofit is installed (`pip install retrofit-transformers`); nothing has to be",
            "imported. The recipe is in `config.json`, as `quantization_config`, though nothing is quantized. Where retrofit is",
            "not installed transformers warns of an unknown quantization type, and what it loads then is **not this model**:",
            "weights of modules that the dense class does not have are left out.",
        ]
    )


def row(spec: str) -> str:
    """Return the row on a pass; only name and options if the pass is no longer installed."""
    try:
        pass_ = as_pass(spec)
    except RetrofitError:
        return f"| `{spec}` | | | |"
    return f"| `{pass_.spec()}` | {pass_.summary} | {pass_.paper} | {'exact' if pass_.exact else 'approximate'} |"


WEIGHTS = (  # endings of the names of weight files
    *(".safetensors", ".bin", ".pt", ".pth", ".pt2", ".ckpt", ".h5", ".keras", ".msgpack", ".ot", ".tflite", ".pte", ".mlmodel"),
    *(".onnx", ".gguf", ".index.json", ".xml", "_data"),
)


def has_companions(source: Path) -> bool:
    """Return whether there may be other files than the model's at `source`."""
    return source.is_dir() or source.suffix == GGUF


def tokenizer_place(source: Path) -> Path:
    """Return the place of the tokenizer of the model at `source`."""
    return transformer_folder(source) if source.is_dir() else source


def save_with_companions(model: PreTrainedModel, source: Path, output: Path, *, force: bool) -> Path:
    """Write the model to the directory `output`, together with the other files of `source`, byte for byte.

    Excluded are hidden files, folders except those of chat templates, and the dense model's weights in any format; the weights of
    other modules are included. README.md describes the model, followed by its earlier text. Raises `CheckpointError` if a link
    leads out of the directory.
    """
    with whole_directory(output, force=force) as draft, write_no_zeros():
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
    """Add to `folder`, later `output`, the files of `source` that the model's own do not replace, and the card."""
    for file in files:
        copy = folder / file.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    write_card(model, folder, output)


def companion_files(source: Path) -> list[Path]:
    """Return the files of a directory that are saved with a rewritten model; none of them is a link out of the directory.

    Raises `CheckpointError` for such a link, and for one to another directory.
    """
    files = [*kept_files(source), *(kept_files(source / TEMPLATES) if (source / TEMPLATES).is_dir() else ())]
    if is_pipeline(source):
        folder = transformer_folder(source)
        others = set(module_folders(source)) - {source, folder}
        for place, folders, names in os.walk(source):
            inner = Path(place)
            if not others.isdisjoint((inner, *inner.parents)):
                files += [inner / name for name in sorted(names)]  # a complete module of the pipeline
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
    """Yield the files directly in a directory that are neither hidden nor weights."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(WEIGHTS):
            yield file


def is_within(file: Path, source: Path) -> bool:
    """Return whether the file, links followed, lies in the directory, or with its revision in a cache of the Hugging Face hub."""
    real, target = source.resolve(), file.resolve()
    snapshots = next((place for place in real.parents if place.name == "snapshots"), None)
    blobs = snapshots and snapshots.parent / "blobs"  # models--name/snapshots/revision/… links to models--name/blobs
    return target.is_relative_to(real) or target.parent == blobs


def foreign_link(link: Path) -> CheckpointError:
    return CheckpointError(
        f"{link} is a link out of the model's directory",
        why=f"its target, {link.resolve()}, would be copied to the result",
        remedy="put a copy of it there if it belongs to the model, else remove it",
        code="untrusted",
    )
