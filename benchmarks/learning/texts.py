"""Texts that come with every Python: the documentation of the language, and the sources of the standard library."""

from __future__ import annotations

import dataclasses
import functools
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "ensurepip"}


@dataclasses.dataclass(frozen=True)
class Text:
    """What a dense model is trained on, what it and its rewrites are trained on afterwards, and how much of that is held out."""

    name: str
    first: Callable[[], list[str]]
    then: Callable[[], list[str]]
    held_out: float


def documentation() -> list[str]:
    """Half a megabyte of English and code."""
    return ["\n\n".join(topics[name] for name in sorted(topics))]


@functools.cache
def library_half(half: int) -> list[str]:
    """Half of the standard library's files, some four megabytes, drawn at random: no file is in both halves."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not NOT_LIBRARY.intersection(file.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    return ["\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files[half::2])]


DOCUMENTATION = Text("documentation", documentation, documentation, held_out=0.03)
LIBRARY = Text("library", lambda: library_half(0), lambda: library_half(1), held_out=0.007)
