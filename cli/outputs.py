"""Output paths, the files written with a model, and the file named when a write fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.failures import UsageError
from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import final_name
from retrofit.files.model_folders import EXPORTED, GGUF, ONNX, is_file_name, require_writable_kind

if TYPE_CHECKING:
    from torch import nn

    from retrofit.progress import Progress

GRAPHS = (EXPORTED, ONNX)  # files of models without a class


def default_output(model: Path, words: Sequence[str]) -> Path:
    """Return the default output: `model.altup.pt` for `model.pt`, a directory `model.altup` for `model` or `model.gguf`.

    `words` are e.g. the names of the passes.
    """
    model = with_a_name(model)
    done = ".".join(words)
    if model.suffix == GGUF:
        return model.with_name(f"{model.stem}.{done}")  # a directory can hold the tokenizer in the file
    suffix = EXPORTED if model.suffix in GRAPHS else ".pt"
    return model.with_name(f"{model.name}.{done}" if model.is_dir() else f"{model.stem}.{done}{suffix}")


def beside(model: Path, word: str) -> Path:
    """Return `model.logits` for `model.pt` and for a directory `model`."""
    model = with_a_name(model)
    return model.with_name(f"{model.name if model.is_dir() else model.stem}.{word}")


def with_a_name(model: Path) -> Path:
    """Return the path; for `.` and `..` the absolute path, which ends with the directory's name."""
    return model if model.name not in ("", "..") else model.resolve()


def check_output(output: Path, force: bool, suffix: str = "") -> Path:
    """Return `output`. Raises an error if no file may be written there or its suffix is not `suffix`."""
    if suffix and output.suffix.lower() != suffix:
        raise UsageError(f"{output} is not a {suffix} file", remedy=f"call it {output.name}{suffix}")
    final_name(output, force=force, directory=False)
    return output


def check_model_output(output: Path, force: bool, source: Path | None = None) -> Path:
    """Return `output`. Raises an error if the model derived from `source` cannot be written there."""
    require_writable_kind(output)
    if source is not None and source.suffix in GRAPHS and output.suffix not in GRAPHS:
        raise UsageError(
            f"{output} cannot hold the result of {source}",
            why="it is a graph, which no model class can rebuild",
            remedy=f"name a {' or '.join(GRAPHS)} file with -o",
        )
    final_name(output, force=force, directory=not is_file_name(output))
    return output


def output_for(model: nn.Module, output: Path, force: bool, chosen: bool) -> Path:
    """Return `output`, or a `.pt2` file of that name if it is a `.pt` file from which the model could not be built again.

    Raises an error instead if the user has chosen `output`.
    """
    from retrofit.inputs.usable_models import transformer_inside
    from retrofit.storage.checkpoint import require_savable

    try:
        require_savable(model, output)
    except CheckpointError as error:
        if chosen or error.code != "no-config" or transformer_inside(model) is not model:  # whose graph is not that of the model
            raise
        return check_model_output(output.with_suffix(EXPORTED), force)
    return output


def form_for(model: nn.Module, output: Path) -> str:
    """Return the form to rewrite: "graph" for modules of the user's in a `.pt2` file, which trains only what is rewritten there."""
    from torch.fx import GraphModule

    from retrofit.inputs.usable_models import transformer_inside
    from retrofit.surgery.transformers_bookkeeping import is_transformers

    if output.suffix != EXPORTED or is_transformers(model) or isinstance(model, GraphModule):
        return "module"
    return "graph" if transformer_inside(model) is model else "module"


def require_companions(source: Path, output: Path) -> None:
    """Raise an error if the other files of the directory `source` cannot be copied to the directory `output`."""
    from retrofit.storage.companions import companion_files

    if source.is_dir() and not is_file_name(output):
        companion_files(source)


def write_model(model: nn.Module, source: Path, output: Path, force: bool, progress: Progress) -> None:
    """Save the model at `output`; to a directory, also copy the other files of `source`, or the tokenizer of a GGUF file."""
    from transformers import PreTrainedModel

    from retrofit.storage.checkpoint import save
    from retrofit.storage.companions import has_companions, save_with_companions

    progress(f"writing {output}")
    if isinstance(model, PreTrainedModel) and has_companions(source) and not is_file_name(output):
        save_with_companions(model, source, output, force=force)
    else:
        save(model, output, force=force)


@contextlib.contextmanager
def name_in_errors(output: Path) -> Iterator[None]:
    """Name `output` in an `OSError` raised within this context that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(output)
        raise
