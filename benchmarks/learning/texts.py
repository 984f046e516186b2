"""Texts that come with Python: the documentation of the language, the standard library's sources, those of a whole environment."""

from __future__ import annotations

import dataclasses
import functools
import lzma
import random
import site
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "ensurepip"}

SMALLEST, LARGEST, LONGEST_LINE = (
    800,
    120_000,
    400,
)  # bytes of a file, characters of a line: beyond are stubs, tables, generated code
SAME, SHORT = 0.5, 16  # a file is a copy where more than this share of its lines was seen before; shorter lines say nothing


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


def documentation_topics(folder: Path) -> list[str]:
    """The same, a text for each topic, in a mixed order."""
    names = sorted(topics)
    random.Random(0).shuffle(names)
    return [topics[name] for name in names]


@functools.cache
def library_half(half: int) -> list[str]:
    """Half of the standard library's files, some four megabytes, drawn at random: no file is in both halves."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not NOT_LIBRARY.intersection(file.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    return ["\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files[half::2])]


def environment_files() -> Iterator[tuple[str, str]]:
    """Yield the name and text of the Python sources of this environment, in an order that is the same wherever they are installed.

    They are those of the standard library and of the installed packages, which `constraints.txt` pins. A file is left out where
    more than half of its lines were in files before it: copies, and models that were written by copying another.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    roots = [library, *map(Path, site.getsitepackages())]
    found = {}
    for root in roots:
        for file in root.rglob("*.py"):
            name = file.relative_to(root)
            if not (root == library and name.parts[0] == "site-packages") and not name.parts[0].startswith("__editable__"):
                found.setdefault(name.as_posix(), file)
    names = sorted(found)
    random.Random(0).shuffle(names)
    seen: set[int] = set()
    for name in names:
        content = found[name].read_bytes() if SMALLEST < found[name].stat().st_size < LARGEST else b""
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        lines = text.split("\n")
        if not text or max(map(len, lines)) > LONGEST_LINE:
            continue
        marks = [zlib.crc32(line.encode()) for stripped in lines if len(line := stripped.strip()) >= SHORT]
        if sum(mark in seen for mark in marks) <= SAME * len(marks):
            yield name, text
        seen.update(marks)


END_OF_FILE = "\0"  # no source holds it


def read_sources(folder: Path) -> list[str]:
    """Return the texts of `environment_files`, which `folder` keeps, so that another environment goes on with the same ones."""
    path = folder / "sources.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        packed = folder / "sources.txt.xz"  # as it travels
        texts = END_OF_FILE.join(text for _, text in environment_files()).encode() if not packed.exists() else None
        part = path.with_suffix(".part")
        part.write_bytes(lzma.decompress(packed.read_bytes()) if texts is None else texts)
        part.replace(path)
    return path.read_bytes().decode().split(END_OF_FILE)


DOCUMENTATION = Text("documentation", documentation, documentation, held_out=0.03)
LIBRARY = Text("library", lambda: library_half(0), lambda: library_half(1), held_out=0.007)
