"""Safetensors files with holes: a hole takes no time to write and no disk space, and reads as zeros.

Zeros are not written (`write_no_zeros`): a table that starts at zero is in its file, as in any other, without using space. A
checkpoint that is only read back and deleted contains a sample of each large weight (`write_samples`), and otherwise the entry for
it: name, shape, dtype and place.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from retrofit.process import replace_attributes

WHOLE = 1 << 20  # bytes: larger weights are sampled
BLOCK, BLOCKS = 4096, 16  # number and size in bytes of the blocks of a sample
RUN = 1 << 20  # bytes that are written or skipped at once
ZEROS = bytearray(RUN)

Tensors = Mapping[str, torch.Tensor]


def writing_by(write: Callable[[Path, Tensors, dict[str, str]], bool]) -> contextlib.AbstractContextManager[None]:
    """Make `save_pretrained` write safetensors by `write` in this context, and as usual if that returns False."""
    transformers = sys.modules["transformers.modeling_utils"]
    save_file = transformers.safe_save_file  # type: ignore[attr-defined]

    def save(tensors: Tensors, filename: str, metadata: dict[str, str] | None = None) -> None:
        if not write(Path(filename), tensors, metadata or {}):
            save_file(tensors, filename, metadata=metadata)

    return replace_attributes(transformers, safe_save_file=save)


def write_samples(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Make `save_pretrained` write a sample of each large parameter of `model` in this context.

    Everything else, including a weight that it converts, is written whole.
    """
    large = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters() if is_large(parameter)}

    def write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> bool:
        sampled = {name for name, tensor in tensors.items() if large.get(tensor.data_ptr()) == tensor.nbytes}
        if sampled:
            write_safetensors(path, tensors, sampled, metadata)
        return bool(sampled)

    return writing_by(write)


def write_no_zeros() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `save_pretrained` leaves a hole in the file for each long run of zeros in a large weight."""

    def write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> bool:
        plain = all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors.values())
        holes = plain and any(is_large(tensor) and starts_with_zeros(tensor) for tensor in tensors.values())
        if holes:
            write_safetensors(path, tensors, set(), metadata)
        return holes

    return writing_by(write)


def starts_with_zeros(weight: torch.Tensor) -> bool:
    return not bool(as_bytes(weight)[:RUN].any())


def write_safetensors(path: Path, tensors: Tensors, sampled: set[str], metadata: dict[str, str]) -> None:
    """Write a safetensors file of contiguous tensors, with holes in `sampled` tensors and at runs of zeros in others.

    The format: the length of a header in 8 bytes, the header as JSON, then the bytes of the tensors one after the other.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each begins at a multiple of its element's size
    places, end = {}, 0
    for name in names:
        places[name], end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": dtype_name(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [places[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + end)
        for name in names:
            content = as_bytes(tensors[name])
            content = content if name in sampled else content.cpu()
            for first, last in blocks(len(content)) if name in sampled else runs(len(content)):
                written = content[first:last].cpu().numpy().data
                if ZEROS[: last - first] != written:
                    file.seek(start + places[name] + first)
                    file.write(written)


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype."""
    text = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    return str(header[""]["dtype"])


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat tensor."""
    return value.detach().reshape(-1).view(torch.uint8)


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the places of a sample in `size` bytes: evenly spaced blocks, including the first and the last bytes."""
    starts = {max(0, size - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)}
    return ((start, min(size, start + BLOCK)) for start in sorted(starts))


def runs(size: int) -> Iterator[tuple[int, int]]:
    """Yield the places of `size` bytes, in runs that are each written or skipped."""
    return ((start, min(size, start + RUN)) for start in range(0, size, RUN))


def is_large(weight: torch.Tensor) -> bool:
    """Return whether the weight is large enough to be sampled."""
    return weight.nbytes > WHOLE


def same_sample(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree bit for bit wherever a file of samples holds them."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = as_bytes(a.contiguous()), as_bytes(b.contiguous())
    places = blocks(len(left)) if is_large(a) else [(0, len(left))]
    return all(torch.equal(left[first:last], right[first:last]) for first, last in places)
