"""The header of a safetensors file: tensor offsets.

A file consists of the length of its header (8 bytes, little endian), a header in JSON, possibly padded with spaces, and the
tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import torch

from retrofit.errors import CheckpointError, kind_of

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
        header, begin, whole = read_header(file)
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


def read_header(file: Path) -> tuple[dict[str, Any], int, int]:
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
