"""Checkpoints of transformers' trainer: written whole or not at all, and refused where something that a run needs is missing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import WEIGHTS_NAME

from retrofit.errors import TrainingError, first_line, kind_of
from retrofit.files.atomic_writes import whole_file
from retrofit.process import deferred_signals

OF_TORCH = ("PytorchStreamWriter", "inline_container")  # in what torch says of a file that it could not write
FULL = 1 << 20  # bytes: where less is free, that was it


@contextlib.contextmanager
def whole_checkpoint(folder: Path) -> Iterator[None]:
    """Within this context `folder` is written; a signal waits until it is whole, and if that fails it is gone.

    Raises `TrainingError` where a file cannot be written.
    """
    try:
        with deferred_signals():
            yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and not any(word in str(error) for word in OF_TORCH):
            raise
        with deferred_signals():
            shutil.rmtree(folder, ignore_errors=True)
        raise TrainingError(
            f"the checkpoint {folder} cannot be written",
            why=reason_of(error, folder.parent),
            remedy=f"check the free space in {folder.parent}; the same command with --resume goes on from the checkpoint before, "
            "if there is one",
            code="unwritable",
        ) from error


def reason_of(error: Exception, folder: Path) -> str:
    """Why a file could not be written: torch says that it was not, and seldom why."""
    known = error if isinstance(error, OSError) else next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
    if known is not None and known.errno is not None:
        return os.strerror(known.errno).lower()
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < FULL:
            return os.strerror(errno.ENOSPC).lower()
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield what an exception was raised from, or while handling."""
    cause: BaseException | None = error
    while cause is not None:
        cause = cause.__cause__ or cause.__context__
        if cause is not None:
            yield cause


DIAL = "dial.json"  # in a checkpoint: where the dials stood
OPTIMIZER, SCHEDULER, RANDOM, STATE = "optimizer.pt", "scheduler.pt", "rng_state*.pth", "trainer_state.json"


def require_whole_checkpoint(folder: Path, model: nn.Module) -> None:
    """Require every weight of `model`, and the states of optimizer, scheduler, random numbers and trainer.

    Raises `TrainingError` and names what is missing or damaged. Nothing that is read runs code.
    """
    require_state(folder)
    if not read_entry(folder / OPTIMIZER).get("state"):
        raise not_whole(folder, f"{OPTIMIZER} holds no state")
    require_numbers(folder)
    saved = read_entry(folder / WEIGHTS_NAME)
    for name, weight in model.state_dict().items():
        if name not in saved:
            raise not_whole(folder, f"{WEIGHTS_NAME} lacks {name}")
        if not isinstance(saved[name], torch.Tensor):
            raise not_whole(folder, f"{name} in {WEIGHTS_NAME} is not a tensor")
        if saved[name].shape != weight.shape:
            raise not_whole(folder, f"in {WEIGHTS_NAME} {name} is {list(saved[name].shape)}, the model's {list(weight.shape)}")


def require_state(folder: Path) -> None:
    """Raise `TrainingError` unless the states of trainer and scheduler are there."""
    if not isinstance(read_json(folder / STATE), dict):
        raise not_whole(folder, f"{STATE} holds no state")
    if "last_epoch" not in read_entry(folder / SCHEDULER):
        raise not_whole(folder, f"{SCHEDULER} holds no state")


def require_numbers(folder: Path) -> None:
    """Raise `TrainingError` unless the states of the random numbers are there and whole."""
    numbers = sorted(folder.glob(RANDOM))
    if not numbers:
        raise not_whole(folder, f"{RANDOM.replace('*', '')} is missing")
    for file in numbers:
        if not zipfile.is_zipfile(file):
            raise not_whole(folder, f"{file.name} is cut short or damaged")


def read_entry(file: Path) -> Mapping[str, Any]:
    """Return the entries of a file that `torch.save` wrote, their tensors mapped."""
    if not file.is_file():
        raise not_whole(file.parent, f"{file.name} is missing")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise not_whole(file.parent, f"{file.name} cannot be read ({first_line(error)})") from error
    if not isinstance(content, Mapping):
        raise not_whole(file.parent, f"{file.name} holds {kind_of(content)}")
    return content


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise not_whole(file.parent, f"{file.name} cannot be read ({first_line(error)})") from error


def not_whole(folder: Path, why: str) -> TrainingError:
    return TrainingError(
        f"{folder} is not a complete checkpoint",
        why=why,
        remedy="remove it and --resume from the previous one, if there is one; or start over with --force",
        code="incomplete",
    )


def write_dial(checkpoint: Path, share: float, anneal: int) -> None:
    """Write into the checkpoint how far the sites have turned, and in how many steps they do."""
    with whole_file(checkpoint / DIAL, force=True) as file:
        file.write(json.dumps({"share": share, "anneal": anneal}).encode())


def read_dial(checkpoint: Path) -> Mapping[str, Any]:
    file = checkpoint / DIAL
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
