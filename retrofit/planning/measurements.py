"""Measurements by name, on disk as soon as they are there, so that a run that was interrupted goes on from them.

A folder with `measured.json`, which says what they depend on, and the sketches of what each replacement does to the predictions.
Without a folder they are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from retrofit.errors import PlanningError, first_line
from retrofit.files.atomic_writes import whole_file

RECORD = "measured.json"
FORMAT = "retrofit plan's measurements"
NAMES = {"text": "text, or in how many of its tokens are used"}  # of facts, in messages
Value = TypeVar("Value")


class KeptMeasurements:
    """What was measured so far."""

    def __init__(self, folder: Path | None, facts: dict[str, Any], *, force: bool = False) -> None:
        self.folder, self.facts = folder, facts
        self.values: dict[str, Any] = {}
        self.sketches: dict[str, Tensor] = {}
        if folder is not None:
            self.open(folder, force=force)

    @staticmethod
    def value_in(folder: Path | None, name: str) -> Any:
        """The value called `name` that a folder holds, of whatever plan; None where it holds none."""
        try:
            return None if folder is None else json.loads((folder / RECORD).read_text(encoding="utf-8"))["values"][name]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `open` says what is wrong with it
            return None

    def open(self, folder: Path, *, force: bool) -> None:
        """What the folder holds is known; raises `PlanningError` where that is of something else and `force` is not given."""
        record = folder / RECORD
        if folder.exists() and not (folder.is_dir() and (record.is_file() or not any(folder.iterdir()))):
            raise PlanningError(
                f"{folder} exists already",
                why="it does not hold measurements of retrofit plan",
                remedy="choose another -o",
                code="occupied",
            )
        if not record.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            return
        try:
            kept = json.loads(record.read_text(encoding="utf-8"))
            facts, values = kept["facts"], dict(kept["values"])
            known = kept["format"] == FORMAT
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PlanningError(
                f"{record} cannot be read", why=str(error), remedy="remove the directory, or choose another -o", code="unreadable"
            ) from error
        if known and facts == self.facts:
            self.values = values
            return
        if not force:
            apart = [NAMES.get(name, name) for name in self.facts if facts.get(name) != self.facts[name]] if known else ["format"]
            raise PlanningError(
                f"{folder} holds the measurements of another plan",
                why=f"it differs in {' and '.join(apart)}",
                remedy="choose another -o, or start over with --force",
                code="exists",
            )
        for file in (*folder.glob("*.safetensors"), record):
            file.unlink()

    def measure(self, name: str, action: Callable[[], Any]) -> Any:
        """The value called `name`, measured by `action` where it is not known yet. It is plain data."""
        if name not in self.values:
            self.values[name] = action()
            self.write()
        return self.values[name]

    def put(self, name: str, value: Any) -> None:
        """The value called `name` is this one from now on."""
        if self.values.get(name) != value:
            self.values[name] = value
            self.write()

    def write(self) -> None:
        """All values are on disk."""
        if self.folder is not None:
            with whole_file(self.folder / RECORD, force=True) as file:
                file.write(json.dumps({"format": FORMAT, "facts": self.facts, "values": self.values}, indent=1).encode())

    def file(self, name: str) -> Path | None:
        """Where tensors of this name are kept; None where nothing is."""
        return None if self.folder is None else self.folder / f"{name}.safetensors"

    def keep_sketch(self, name: str, sketch: Tensor) -> None:
        """The sketch called `name` is kept; it is written before the value that says that it is there."""
        self.sketches[name] = sketch
        if (path := self.file(name)) is not None:
            with whole_file(path, force=True) as file:
                file.write(save({"u": sketch.to(torch.float16)}))

    def sketch(self, name: str) -> Tensor:
        """The sketch called `name`, rounded as it is on disk."""
        if name not in self.sketches:
            path = self.file(name)
            assert path is not None
            try:
                self.sketches[name] = load(path.read_bytes())["u"]
            except (OSError, SafetensorError, KeyError) as error:
                remedy = f"remove {path.parent}, or name another -o"
                raise PlanningError(f"{path} cannot be read", why=first_line(error), remedy=remedy, code="unreadable") from error
        return self.sketches[name].to(torch.float16).float()
