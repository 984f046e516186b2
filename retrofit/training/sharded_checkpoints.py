"""State in as many files as processes wrote it, which any number of processes reads: each the rows that it needs.

A file holds tensors by name; of one whose rows are divided, the rows of its process, where they start, and the size of the whole.
It is read without running any code, and mapped, so that a process reads no more than its part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrofit.errors import first_line
from retrofit.training import processes
from retrofit.training.sharding import own_rows
from retrofit.training.whole_checkpoints import not_whole

NAME = re.compile(r"-(\d{5})-of-(\d{5})\.pt$")
PART, START, SIZE = "part", "start", "size"


def write_parts(folder: Path, kind: str, state: Mapping[str, Any]) -> None:
    """This process's part of the state is in its file of that kind."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: own_part(value) if hasattr(value, "dim") else value for name, value in state.items()}
    torch.save(parts, folder / f"{kind}-{processes.number():05d}-of-{processes.count():05d}.pt")


def own_part(value: Tensor) -> dict[str, Any]:
    """The rows of a tensor that this process holds: all of one that is not divided."""
    local = local_rows(value).detach()
    return {PART: local.cpu().clone(), START: first_row(value), SIZE: list(value.shape)}


def local_rows(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def first_row(value: Tensor) -> int:
    """Where the rows start that this process holds."""
    return own_rows(value).start if hasattr(value, "to_local") and value.dim() else 0


def read_parts(folder: Path, kind: str) -> list[Mapping[str, Any]]:
    """The files of that kind, mapped; raises `TrainingError` where one of them is missing or damaged."""
    files = sorted(file for file in folder.glob(f"{kind}-*.pt") if NAME.search(file.name))
    count = {int(match.group(2)) for file in files if (match := NAME.search(file.name))}
    if len(count) != 1 or len(files) != count.pop():
        raise not_whole(folder, f"the files {kind}-….pt are not all there")
    found = []
    for file in files:
        try:
            found.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:
            raise not_whole(folder, f"{file.name} cannot be read ({first_line(error)})") from error
    return found


@torch.no_grad()
def fill_from_parts(value: Tensor, name: str, parts: list[Mapping[str, Any]], folder: Path) -> None:
    """This process's rows of `value` are those in the files; raises `TrainingError` where they do not hold them all."""
    mine, start = local_rows(value), first_row(value)
    for part in parts:
        require_entry(part.get(name), name, value, folder)
    if not value.dim():
        mine.copy_(parts[0][name][PART])
        return
    end, filled = start + len(mine), 0
    for part in parts:
        entry = part[name]
        first, rows = entry[START], entry[PART]
        low, high = max(start, first), min(end, first + len(rows))
        if low <= start + filled < high:
            mine[low - start : high - start] = rows[low - first : high - first].to(mine.device)
            filled = high - start
    if filled < len(mine):
        raise not_whole(folder, f"rows of {name} are missing")


def require_entry(entry: Any, name: str, value: Tensor, folder: Path) -> None:
    """The entry holds rows of a tensor of the size of `value`, else `TrainingError`."""
    size = list(value.shape)
    if not isinstance(entry, Mapping) or entry.get(SIZE) != size:
        held = entry.get(SIZE) if isinstance(entry, Mapping) else "nothing"
        raise not_whole(folder, f"{name} is {size}, and the files hold {held}")
    rows, start = entry.get(PART), entry.get(START)
    if not (isinstance(rows, Tensor) and type(start) is int and start >= 0 and rows.dim() == len(size)):
        raise not_whole(folder, f"{name} has no rows there, or no number of the first")
    if list(rows.shape[1:]) != size[1:] or (size and start + len(rows) > size[0]):
        raise not_whole(folder, f"the rows of {name} are not such of a tensor of {size}")
