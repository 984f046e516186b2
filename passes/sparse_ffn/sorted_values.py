"""Values of short rows in descending order, all rows at once.

On a CPU torch sorts one row after the other, which takes ten times as long as all else that is done with a block of hidden units. A
sorting network (Batcher's odd-even merge sort; Knuth, The Art of Computer Programming 5.2.2, algorithm M) compares the same two
places of all rows in one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

LONGEST = {"cpu": 64, "cuda": 16}  # rows for which the network is faster: its comparisons grow as n (log n)²


def descending(values: Tensor, dim: int = -1) -> Tensor:
    """The values along a dimension, the largest first, (n, …). Without gradient."""
    values = values.detach()
    if values.shape[dim] > LONGEST.get(values.device.type, 0) or torch.compiler.is_compiling():
        return values.sort(dim=dim, descending=True).values.movedim(dim, 0)
    places = list(values.movedim(dim, 0).contiguous())
    for first, second in comparisons(len(places)):
        a, b = places[first], places[second]
        places[first], places[second] = torch.maximum(a, b), torch.minimum(a, b)
    return torch.stack(places)


@functools.cache
def comparisons(n: int) -> tuple[tuple[int, int], ...]:
    """The places that a sorting network for n values compares, in order."""
    return tuple(merge_exchange(n))


def merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Sorted runs of p places, p = 1, 2, 4, …, are merged two by two: places at a distance from p down to 1 are compared."""
    p = 1
    while p < n:
        apart = p
        while apart:
            for start in range(apart % p, n - apart, 2 * apart):
                for place in range(start, min(start + apart, n - apart)):
                    if place // (2 * p) == (place + apart) // (2 * p):
                        yield place, place + apart
            apart //= 2
        p *= 2
