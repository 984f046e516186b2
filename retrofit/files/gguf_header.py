"""The header of a GGUF file: metadata and tensor offsets (ggml's gguf.md, versions 2 and 3)."""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from retrofit.errors import CheckpointError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless the file specifies it
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TOKENS = "tokenizer.ggml.tokens"
AGAIN = "copy or download it again"


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """One tensor of the file: its ggml type, and the `offset` of its first byte in the data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Header:
    """The metadata of a GGUF file, with arrays replaced by their lengths, and its tensors."""

    metadata: dict[str, Any]
    tensors: tuple[TensorPlace, ...]
    data: int  # the byte at which the tensors begin
    size: int  # of the file, in bytes

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.metadata.get(TOKENS))


def read_header(path: Path) -> Header:
    """Return the header of the file. Raises `CheckpointError` if it is no GGUF file, or is truncated or damaged."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file",
                why="it does not start with GGUF",
                remedy=f"{AGAIN}, or check its name",
                code="unreadable",
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return Cursor(content).header()
            except (struct.error, ValueError, TypeError, KeyError, OverflowError, ZeroDivisionError, RecursionError) as error:
                raise CheckpointError(
                    f"{path} cannot be read as a GGUF file",
                    why="its header is cut short or damaged",
                    remedy=AGAIN,
                    code="unreadable",
                ) from error
            except CheckpointError as error:
                error.what = f"{path}: {error.what}"
                raise


class Cursor:
    """A position in the bytes of a GGUF file, which advances as they are read."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.position, self.order = content, len(MAGIC), "<"

    def header(self) -> Header:
        version = self.number("I")
        if version & 0xFFFF == 0:  # written by a machine with the other byte order
            self.order, self.position = ">", len(MAGIC)
            version = self.number("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"unsupported GGUF version {version}",
                why=f"supported: {' and '.join(map(str, VERSIONS))}",
                remedy="convert it with the tools of llama.cpp",
                code="unknown-version",
            )
        tensors, entries = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(entries):
            key = self.text()
            metadata[key] = self.value(self.number("I"))
        places = tuple(self.tensor() for _ in range(tensors))
        alignment = int(metadata.get("general.alignment", ALIGNMENT))
        return Header(metadata, places, -(-self.position // alignment) * alignment, len(self.content))

    def number(self, letter: str) -> Any:
        """Return the next number, in struct's format `letter`."""
        (value,) = struct.unpack_from(self.order + letter, self.content, self.position)
        self.position += struct.calcsize(letter)
        return value

    def text(self) -> str:
        self.skip_text()
        return self.last.decode()

    def skip_text(self) -> None:
        length = self.number("Q")
        self.last = self.content[self.position : self.position + length]
        if len(self.last) < length:
            raise struct.error("the text goes past the end of the file")
        self.position += length

    def value(self, kind: int) -> Any:
        """Return the next value of this kind; for an array, its length."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        element, length = self.number("I"), self.number("Q")
        if element == STRING:
            for _ in range(length):
                self.skip_text()
        elif element == ARRAY:
            for _ in range(length):
                self.value(ARRAY)
        else:
            self.position += length * struct.calcsize(SCALARS[element])
        return length

    def tensor(self) -> TensorPlace:
        name = self.text()
        extents = [self.number("Q") for _ in range(self.number("I"))]
        return TensorPlace(name, tuple(reversed(extents)), self.number("I"), self.number("Q"))
