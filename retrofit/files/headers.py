"""The headers of untrusted files: tensor offsets, and the metadata of a GGUF file (ggml's gguf.md, versions 2 and 3).

A model's directory has one safetensors file, or several and an index. Such a file consists of the length of its header (8 bytes,
little endian), a header in JSON, possibly padded with spaces, and the tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import stat
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from retrofit.errors import CheckpointError, first_line, kind_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
METADATA = "__metadata__"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # of a model in a directory
AGAIN = "copy or download it again"
LONGEST = 100_000_000  # bytes of a header; safetensors' own limit
PLACE = "data_offsets"


@dataclasses.dataclass(frozen=True)
class Extent:
    """The place of a tensor's bytes in a file."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def extents_in(file: Path) -> dict[str, Extent]:
    """Return the places of the tensors in a safetensors file, by name.

    Every byte after the header belongs to exactly one tensor. Raises `CheckpointError` if it is no safetensors file, or is
    truncated.
    """
    try:
        header, begin, whole = read_safetensors_header(file)
        found = {name: extent_of(file, begin, name, entry) for name, entry in header.items() if name != METADATA}
        end = begin
        for name, extent in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
            if extent.start != end:
                raise ValueError(f"{name} begins at byte {extent.start:,}, and what is before it ends at {end:,}")
            end += extent.size
        if end != whole:
            raise ValueError(f"its tensors end at byte {end:,}, the file at {whole:,}")
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read",
            why=error.strerror or str(error),
            remedy="check the path and its permissions",
            code="unreadable",
        ) from error
    except (ValueError, RecursionError) as error:
        why = "its header is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{file} cannot be read as safetensors", why=why, remedy="download it again, or save the model again", code="unreadable"
        ) from error
    return found


def read_safetensors_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, the byte at which the tensors begin, and the file's size. Raises `ValueError` without a header."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise ValueError("it is not a regular file")
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        whole = os.fstat(opened.fileno()).st_size
        if not 2 <= length <= whole - 8:
            raise ValueError("its header does not end within it")
        if length > LONGEST:
            raise ValueError(f"its header is longer than {LONGEST:,} bytes")
        header = json.loads(opened.read(length), object_pairs_hook=without_repetition)
    if not isinstance(header, dict):
        raise ValueError(f"its header is {kind_of(header)} and no table of tensors")
    return header, 8 + length, whole


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) < len(pairs):
        raise ValueError("two entries of its header have one name")
    return held


def extent_of(file: Path, begin: int, name: str, entry: Any) -> Extent:
    """Return the place that a header's entry gives. Raises `ValueError` if it contradicts itself."""
    if not isinstance(entry, dict) or not are_sizes(entry.get("shape")) or not are_sizes(entry.get(PLACE)):
        raise ValueError(f"{name} has no shape or no place in the file")
    if entry.get("dtype") not in DTYPES:
        raise ValueError(f"{name} is of type {entry.get('dtype')!r}, which is not known")
    extent = Extent(file, begin + entry[PLACE][0], DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if entry[PLACE] != [entry[PLACE][0], entry[PLACE][0] + extent.size]:
        raise ValueError(f"{name} of the shape {list(extent.shape)} takes {extent.size:,} bytes, and its place has another size")
    return extent


def are_sizes(value: Any) -> bool:
    """Return whether the value is a list of integers ≥ 0."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in a directory, possibly none; a single file has priority over shards.

    Raises `CheckpointError` if the index cannot be read, or names a file that is missing or outside the directory.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(weight_map(folder).values()))]


def weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; empty if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ValueError("its weight_map is not a table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read", why=first_line(error), remedy=AGAIN, code="unreadable") from error
    for name in sorted(set(named.values())):
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name or "\\" in name:
            raise CheckpointError(
                f"{index} names a file outside its directory: {name}",
                why="its content would become part of the result",
                remedy="put the file next to the index if it belongs to the model",
                code="untrusted",
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is incomplete: {name} is missing", why=f"{INDEX} names it", remedy=AGAIN, code="incomplete"
            )
    return dict(named)


def extents_of(folder: Path) -> dict[str, Extent]:
    """Return the place of each tensor of the model in a directory, by its name in the files.

    Raises `CheckpointError` if a file is damaged, or if a name is in two files.
    """
    found: dict[str, Extent] = {}
    for file in weight_files(folder):
        for name, extent in extents_in(file).items():
            if name in found:
                raise CheckpointError(
                    f"{folder} holds {name} twice", why=f"in {found[name].file.name} and in {file.name}", remedy=AGAIN, code="twice"
                )
            found[name] = extent
    return found


# ── GGUF ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless the file specifies it
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TOKENS = "tokenizer.ggml.tokens"


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
class GGUFHeader:
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


def read_gguf_header(path: Path) -> GGUFHeader:
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

    def header(self) -> GGUFHeader:
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
        return GGUFHeader(metadata, places, -(-self.position // alignment) * alignment, len(self.content))

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
