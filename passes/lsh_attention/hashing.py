"""Locality-sensitive hashes: the bucket of a vector in each round, by random rotations that never change.

    bucket(x) = argmax [x R; −x R]          R: (d, buckets / 2), one for each round

Vectors at a small angle to one another are likely to have the same bucket. The largest of the numbers is the same whatever the
length of x, so that nothing has to be normalized.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_rotations(width: int, rounds: int, buckets: int, seed: int, like: Tensor) -> Tensor:
    """R of all rounds, (rounds, d, buckets / 2), the same for the same seed on every device; no values where `like` has none."""
    if like.is_meta:
        return torch.empty(rounds, width, buckets // 2, device="meta", dtype=like.dtype)
    drawn = torch.randn(rounds, width, buckets // 2, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device=like.device, dtype=like.dtype)


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """The bucket of each vector in each round: x (…, tokens, d) and R (rounds, d, b / 2) to (rounds, …, tokens). No gradient."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, rotations.dtype), torch.float32)
    x = x.detach().to(dtype)
    rounds = []
    for rotation in rotations.detach().to(dtype):
        y = x @ rotation
        largest = y.abs().argmax(-1, keepdim=True)
        rounds.append((largest + rotation.shape[-1] * (y.gather(-1, largest) < 0)).squeeze(-1))
    return torch.stack(rounds)
