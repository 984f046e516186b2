"""Measurements kept one by one: each has a name and an estimate of its seconds, and begins only while there is time for it.

What fails inside a part is a result like any other. After an error of the device nothing more can be measured in the same process.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FAILED = "failed"  # the key of what an exception said
DEVICE_WORDS = (
    "cuda error",
    "cuda driver error",
    "cublas_status",
    "capturing",
    "graph capture",
    "device-side assert",
    "illegal memory",
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement. `seconds` is about what it takes on a GPU of 2023, models and compilation included.

    Parts of one group are measured by one process, in their order. While one that is `alone` is measured nothing else runs.
    """

    key: str
    seconds: float
    run: Callable[[], dict[str, Any]]
    group: str = ""
    alone: bool = False


class Kept:
    """Results by key, in a file that is whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def keep(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1))
        part.replace(self.path)


class Trouble:
    """Whether an error has left the device in a state that this process cannot measure in."""

    device = False


def attempt(action: Callable[[], Any]) -> Any:
    """What the action returns; where it raises, what it said, under `FAILED`. Nothing is tried on a device that is spoiled."""
    if Trouble.device:
        return failed("not tried after an error of the device")
    try:
        return action()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        Trouble.device |= any(word in text.lower() for word in DEVICE_WORDS)
        return failed(text)


def shortened(text: str, most: int = 300) -> str:
    """The first lines of a message, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def timed(part: Part) -> dict[str, Any]:
    """What the part found, or that it failed, and its seconds; what it held on the device is free again."""
    began = time.monotonic()
    result = attempt(part.run)
    release_memory()
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def work(parts: Iterable[Part], kept: Kept) -> None:
    """Runs, in this process, what has no result yet."""
    for part in parts:
        if part.key not in kept.values:
            print(f"> {part.key}")
            kept.keep(part.key, result := timed(part))
            print(f"  {summary(result)}")


def failed(text: str) -> dict[str, Any]:
    return {FAILED: shortened(text)}


def summary(result: dict[str, Any]) -> str:
    return f"{result.get('seconds', 0.0):.1f} s  {shortened(json.dumps(result), 200)}"


def release_memory() -> None:
    """What a part held on the device is free again."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and not Trouble.device:
        torch.cuda.empty_cache()
