"""What is remembered of a parameter so that it can be recognised later without keeping it: shape, dtype, checksum, a sample."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

ROWS = 1 << 20  # elements summed up at a time
SAMPLE = 4096


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A parameter as it was."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int
    sample: torch.Tensor  # some of its elements, at fixed places, in float64
    trainable: bool
    storage: int  # names that are one tensor have one storage

    @staticmethod
    def of(value: torch.Tensor, storage: int = 0) -> Fingerprint:
        return Fingerprint(tuple(value.shape), value.dtype, checksum(value), sample(value), value.requires_grad, storage)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def is_of(self, value: torch.Tensor) -> bool:
        """Whether `value` is the parameter, bit for bit."""
        return tuple(value.shape) == self.shape and value.dtype == self.dtype and checksum(value) == self.checksum

    def is_of_scaled(self, value: torch.Tensor, scale: float) -> bool:
        """Whether `value` is `scale` times the parameter: bit for bit where that is a power of two, else by the sample."""
        if tuple(value.shape) != self.shape:
            return False
        if value.dtype == self.dtype and abs(math.frexp(scale)[0]) == 0.5:
            return checksum(value, scale) == self.checksum
        precision = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        return torch.allclose(sample(value), scale * self.sample, rtol=2 * precision, atol=0.0)


def chunks(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in order, a bounded number at a time, on the CPU."""
    rows = value.detach().unsqueeze(0) if value.dim() == 0 else value.detach()
    step = max(1, ROWS // max(1, math.prod(rows.shape[1:])))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].cpu().contiguous().reshape(-1)


def checksum(value: torch.Tensor, scale: float = 1.0) -> int:
    """The CRC-32 of the bytes of `value / scale`, read a bounded number at a time."""
    total = 0
    for chunk in chunks(value):
        total = zlib.crc32((chunk if scale == 1.0 else chunk / scale).view(torch.uint8).numpy().data, total)
    return total


def sample(value: torch.Tensor, most: int = SAMPLE) -> torch.Tensor:
    """Up to `most` elements, evenly spread, in float64."""
    count = value.numel()
    places = torch.arange(0, count, max(1, count // most))[:most]
    indices = torch.unravel_index(places.to(value.device), value.shape) if value.dim() else ()
    return value.detach()[indices].reshape(-1).to("cpu", torch.float64)


def fingerprints(model: nn.Module) -> dict[str, Fingerprint]:
    """A fingerprint of every parameter by each of its names; shared ones are read once."""
    seen: dict[int, Fingerprint] = {}
    found: dict[str, Fingerprint] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:
            seen[id(parameter)] = Fingerprint.of(parameter, len(seen))
        found[name] = seen[id(parameter)]
    return found


def elements(prints: Iterable[Fingerprint]) -> int:
    """The number of elements, shared ones counted once."""
    return sum({one.storage: one.elements for one in prints}.values())
