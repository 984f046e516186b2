"""Locality-sensitive hashes: the bucket of a vector in each round, by random rotations that never change.

    bucket(x) = argmax [x R; −x R]          R: (d, buckets / 2), one for each round

Vectors at a small angle to one another are likely to have the same bucket. The largest of the numbers is the same whatever the
length of x, so that nothing has to be normalized.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE, MANY_AT_ONCE = 4096, 1 << 18  # vectors, on a CPU and elsewhere


def random_rotations(width: int, rounds: int, buckets: int, seed: int, like: Tensor) -> Tensor:
    """R of all rounds, (rounds, d, buckets / 2), the same for the same seed on every device; no values where `like` has none."""
    if like.is_meta:
        return torch.empty(rounds, width, buckets // 2, device="meta", dtype=like.dtype)
    drawn = torch.randn(rounds, width, buckets // 2, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device=like.device, dtype=like.dtype)


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """The bucket of each vector in each round: x (…, tokens, d) and R (rounds, d, b / 2) to (rounds, …, tokens). No gradient."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, rotations.dtype), torch.float32)
    x, rotations = x.detach().to(dtype), rotations.detach().to(dtype)
    vectors = x.numel() // x.shape[-1] if not torch.compiler.is_compiling() else 0
    at_once = AT_ONCE if x.device.type == "cpu" else MANY_AT_ONCE
    if vectors <= at_once:
        return torch.stack([buckets_of(x, rotation) for rotation in rotations])
    parts = x.reshape(-1, x.shape[-1]).split(at_once)  # of which the products stay in a processor's cache
    rounds = [torch.cat([buckets_of(part, rotation) for part in parts]) for rotation in rotations]
    return torch.stack(rounds).view(len(rotations), *x.shape[:-1])


def buckets_of(x: Tensor, rotation: Tensor) -> Tensor:
    """The bucket of each vector by one rotation."""
    y = x @ rotation
    largest = y.abs().argmax(-1, keepdim=True)
    return (largest + rotation.shape[-1] * (y.gather(-1, largest) < 0)).squeeze(-1)
