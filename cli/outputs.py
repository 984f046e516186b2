"""Where results are written, what is written with them, and which file a failure to write names."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.runtime.atomic_writes import final_name, whole_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


def default_output(model: Path, words: Sequence[str]) -> Path:
    """`model.altup.pt` for a file `model.pt` and the names of what was done to it, `model.altup` for a directory `model`."""
    model = model if model.name not in ("", "..") else model.resolve()
    done = ".".join(words)
    suffix = ".pt2" if model.suffix in (".pt2", ".onnx") else ".pt"  # a graph stays one, and trains
    return model.with_name(f"{model.name}.{done}" if model.is_dir() else f"{model.stem}.{done}{suffix}")


def check_output(output: Path, force: bool) -> Path:
    """`output`, where a result may be written there; raises `CheckpointError` before any work where it may not."""
    final_name(output, force=force, directory=output.is_dir())
    return output


@contextlib.contextmanager
def name_in_errors(output: Path) -> Iterator[None]:
    """An `OSError` raised inside names `output` where it named no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(output)
        raise


def save_with_companions(model: PreTrainedModel, source: Path, output: Path, *, force: bool) -> Path:
    """The model is in the directory `output`, and with it the other files of `source`: tokenizer, chat template, …"""
    with whole_directory(output, force=force) as draft:
        model.save_pretrained(draft)
        for file in source.iterdir():
            if (
                file.is_file()
                and not file.name.startswith(".")
                and not file.name.endswith(WEIGHTS)
                and not (draft / file.name).exists()
            ):
                shutil.copyfile(file, draft / file.name)
    return output
