"""The fingerprint of a parameter, by which it is recognised later without keeping it: shape, dtype, checksum, a sample."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

ROWS = 1 << 20  # elements summed up at a time
ROW_BYTES = 8192
SAMPLE = 4096


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What is kept of a tensor that holds a parameter, or a multiple of one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int | None  # of the values divided by the scale; None where that would round them
    sample: torch.Tensor  # some of its elements, at fixed places, in float64
    trainable: bool
    storage: int  # names of one tensor have one storage
    scale: float = 1.0
    finite: bool = True  # no element is NaN or infinite, where all were read

    @staticmethod
    def of(value: torch.Tensor, storage: int = 0, scale: float = 1.0) -> Fingerprint:
        """The fingerprint of `value`, which is `scale` times a parameter."""
        crc, finite = read(value, scale) if abs(math.frexp(scale)[0]) == 0.5 else (None, True)  # a power of two
        return Fingerprint(tuple(value.shape), value.dtype, crc, sample(value), value.requires_grad, storage, scale, finite)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def matches(self, now: Fingerprint) -> bool:
        """Whether `now` holds this parameter times its scale: bit for bit where that is a power of two, else by the sample."""
        if now.shape != self.shape:
            return False
        if now.dtype == self.dtype and now.checksum is not None:
            return now.checksum == self.checksum
        precision = torch.finfo(now.dtype).eps if now.dtype.is_floating_point else 0.0
        return torch.allclose(now.sample, now.scale * self.sample, rtol=2 * precision, atol=0.0)


def chunks(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in order, a bounded number at a time, on the CPU."""
    rows = value.detach().unsqueeze(0) if value.dim() == 0 else value.detach()
    step = max(1, ROWS // max(1, math.prod(rows.shape[1:])))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].cpu().contiguous().reshape(-1)


def checksum(value: torch.Tensor, scale: float = 1.0) -> int:
    """A checksum of the bytes of `value / scale` in their order, read a bounded number at a time.

    It is the CRC-32 of sums: of the bytes as words of eight in rows of a fixed width, each row's and each column's sum, modulo 2⁶⁴.
    A change that keeps all of these touches at least two rows and two columns. Sums are read as fast as memory is; a CRC is not.
    """
    return read(value, scale)[0]


def read(value: torch.Tensor, scale: float = 1.0) -> tuple[int, bool]:
    """The `checksum` of `value / scale`, and whether every element is finite, from one reading."""
    total, finite = 0, True
    for chunk in chunks(value):
        finite = finite and is_finite(chunk)
        content = (chunk if scale == 1.0 else chunk / scale).view(torch.uint8)
        whole = len(content) // ROW_BYTES * ROW_BYTES
        table = aligned(content[:whole]).view(torch.int64).view(-1, ROW_BYTES // 8)  # (rows, words)
        for part in (table.sum(0), table.sum(1), content[whole:]) if whole else (content,):
            total = zlib.crc32(part.numpy().data, total)
    return total, finite


def is_finite(chunk: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: the extremes are not."""
    if not chunk.is_floating_point() or not chunk.numel():
        return True
    least, most = (chunk.float() if chunk.itemsize < 2 else chunk).aminmax()  # eight bits are for storage
    return bool(least.isfinite() & most.isfinite())


def aligned(content: torch.Tensor) -> torch.Tensor:
    """Bytes that can be viewed as words."""
    return content.clone() if content.storage_offset() % 8 else content


def sample(value: torch.Tensor, most: int = SAMPLE) -> torch.Tensor:
    """Up to `most` elements, evenly spread, in float64."""
    count = value.numel()
    places = torch.arange(0, count, max(1, count // most))[:most]
    indices = torch.unravel_index(places.to(value.device), value.shape) if value.dim() else ()
    return value.detach()[indices].reshape(-1).to("cpu", torch.float64)


def fingerprints(model: nn.Module) -> dict[str, Fingerprint]:
    """A fingerprint of every parameter by each of its names; shared ones are read once."""
    prints: dict[int, Fingerprint] = {}
    by_name: dict[str, Fingerprint] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in prints:
            prints[id(parameter)] = Fingerprint.of(parameter, len(prints))
        by_name[name] = prints[id(parameter)]
    return by_name


def count_elements(prints: Iterable[Fingerprint]) -> int:
    """The number of elements, shared ones counted once."""
    return sum({one.storage: one.elements for one in prints}.values())
