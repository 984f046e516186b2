"""Whether a checkpoint holds all that a run goes on from: transformers' trainer goes on without what is missing."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import WEIGHTS_NAME

from retrofit.errors import TrainingError, first_line, kind_of

OPTIMIZER, SCHEDULER, RANDOM, STATE = "optimizer.pt", "scheduler.pt", "rng_state*.pth", "trainer_state.json"


def require_whole_checkpoint(folder: Path, model: nn.Module) -> None:
    """The checkpoint holds every weight of `model`, and the states of optimizer, scheduler, random numbers and trainer.

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
            raise not_whole(folder, f"{name} in {WEIGHTS_NAME} is no tensor")
        if saved[name].shape != weight.shape:
            raise not_whole(folder, f"in {WEIGHTS_NAME} {name} is {list(saved[name].shape)}, the model's {list(weight.shape)}")


def require_state(folder: Path) -> None:
    """The states of trainer and scheduler are there, else `TrainingError`."""
    if not isinstance(read_json(folder / STATE), dict):
        raise not_whole(folder, f"{STATE} holds no state")
    if "last_epoch" not in read_entry(folder / SCHEDULER):
        raise not_whole(folder, f"{SCHEDULER} holds no state")


def require_numbers(folder: Path) -> None:
    """The states of the random numbers are there and whole, else `TrainingError`."""
    numbers = sorted(folder.glob(RANDOM))
    if not numbers:
        raise not_whole(folder, f"{RANDOM.replace('*', '')} is missing")
    for file in numbers:
        if not zipfile.is_zipfile(file):
            raise not_whole(folder, f"{file.name} is cut short or damaged")


def read_entry(file: Path) -> Mapping[str, Any]:
    """The entries of a file that `torch.save` wrote, their tensors mapped."""
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
        f"{folder} is not a whole checkpoint",
        why=why,
        remedy="remove it, and --resume goes on from the one before if there is one; or start over with --force",
    )
