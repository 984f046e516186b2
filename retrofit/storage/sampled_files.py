"""Checkpoints written to be read back and thrown away: of a large weight the file holds a sample, and for the rest a hole.

Nothing is lost of what a file says about a weight: its name, shape, dtype and place. A hole takes no time to write and none of the
disk; it reads as zeros.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

WHOLE = 1 << 20  # bytes: a weight of no more is written whole
BLOCK, BLOCKS = 4096, 16  # of a larger one, so many blocks of so many bytes


@contextlib.contextmanager
def write_samples(model: nn.Module) -> Iterator[None]:
    """Within this context `save_pretrained` writes a sample of each large parameter of `model`.

    Whatever else it writes, and a weight that it converts on its way, is written whole.
    """
    large = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters() if is_large(parameter)}
    transformers = sys.modules["transformers.modeling_utils"]
    save_file = transformers.safe_save_file  # type: ignore[attr-defined]

    def save_samples(tensors: Mapping[str, torch.Tensor], filename: str, metadata: dict[str, str] | None = None) -> None:
        sampled = {name for name, tensor in tensors.items() if large.get(tensor.data_ptr()) == tensor.nbytes}
        if sampled:
            write_safetensors(Path(filename), tensors, sampled, metadata or {})
        else:
            save_file(tensors, filename, metadata=metadata)

    transformers.safe_save_file = save_samples  # type: ignore[attr-defined]
    try:
        yield
    finally:
        transformers.safe_save_file = save_file  # type: ignore[attr-defined]


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], sampled: set[str], metadata: dict[str, str]) -> None:
    """Write a safetensors file of contiguous tensors, with holes in those that are `sampled`.

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
            for first, last in blocks(len(content)) if name in sampled else [(0, len(content))]:
                file.seek(start + places[name] + first)
                file.write(content[first:last].cpu().numpy().data)


def dtype_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a dtype."""
    text = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    return str(header[""]["dtype"])


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, one after the other."""
    return value.detach().reshape(-1).view(torch.uint8)


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the places of a sample in `size` bytes: blocks evenly spread, the first and the last bytes among them."""
    starts = {max(0, size - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)}
    return ((start, min(size, start + BLOCK)) for start in sorted(starts))


def is_large(weight: torch.Tensor) -> bool:
    """Return whether a sample of the weight is enough."""
    return weight.nbytes > WHOLE


def same_sample(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree bit for bit wherever a file of samples holds them."""
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_contiguous() and b.is_contiguous()):
        return False
    left, right = as_bytes(a), as_bytes(b)
    places = blocks(len(left)) if is_large(a) else [(0, len(left))]
    return all(torch.equal(left[first:last], right[first:last]) for first, last in places)
