"""Where results are written, what is written with them, and which file a failure to write names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.runtime import gguf_header
from retrofit.runtime.atomic_writes import final_name
from retrofit.storage.file_names import is_file_name, require_writable_kind

if TYPE_CHECKING:
    from torch import nn


def default_output(model: Path, words: Sequence[str]) -> Path:
    """`model.altup.pt` for `model.pt` and what was done to it, a directory `model.altup` for `model` or `model.gguf`."""
    model = model if model.name not in ("", "..") else model.resolve()
    done = ".".join(words)
    if model.suffix == gguf_header.SUFFIX:
        return model.with_name(f"{model.stem}.{done}")  # a directory has room for the tokenizer that the file holds
    suffix = ".pt2" if model.suffix in (".pt2", ".onnx") else ".pt"  # a graph stays one, and trains
    return model.with_name(f"{model.name}.{done}" if model.is_dir() else f"{model.stem}.{done}{suffix}")


def check_output(output: Path, force: bool) -> Path:
    """`output`, where a file may be written there; raises `CheckpointError` before any work where it may not."""
    final_name(output, force=force, directory=False)
    return output


def check_model_output(output: Path, force: bool) -> Path:
    """`output`, where a model may be written there; raises `CheckpointError` before any work where it may not."""
    require_writable_kind(output)
    final_name(output, force=force, directory=not is_file_name(output))
    return output


def write_model(model: nn.Module, source: Path, output: Path, force: bool) -> None:
    """The model is at `output`; in a directory with what else the directory or the GGUF file `source` holds."""
    from transformers import PreTrainedModel

    from retrofit.storage.checkpoint import save
    from retrofit.storage.companions import has_companions, save_with_companions

    if isinstance(model, PreTrainedModel) and has_companions(source) and not is_file_name(output):
        save_with_companions(model, source, output, force=force)
    else:
        save(model, output, force=force)


@contextlib.contextmanager
def name_in_errors(output: Path) -> Iterator[None]:
    """An `OSError` raised inside names `output` where it named no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(output)
        raise
