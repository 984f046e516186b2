"""Partition the vertices of a dense graph into equal blocks with as little weight inside the blocks as possible.

General partitioners (METIS, networkx's Kernighan-Lin) put what belongs together into one block, on sparse graphs or in Python.
Here it goes into different blocks, and the graph is a dense matrix: pairs of blocks exchange vertices, which is Kernighan and Lin's
step, all pairs of a round at once. The pairs of one round share no block, so the weight falls by exactly what each exchange gains.
"""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS = 8  # at most; in a sweep each block is paired with each other one once
TOLERANCE = 1e-3  # the last sweep removes less than this part of the weight inside


def balanced_partition(weights: Tensor, size: int) -> Tensor:
    """Blocks of `size` vertices of the graph with the symmetric `weights` [n, n]: (n / size, size), in order inside each block.

    No exchange of two vertices would improve them much: in the last sweep all exchanges together removed less than `TOLERANCE` of
    the weight inside. The same weights give the same blocks.
    """
    count, rest = divmod(len(weights), size)
    if rest:
        raise ValueError(f"{len(weights)} vertices do not make blocks of {size}")
    heavy_first = weights.sum(1).argsort(descending=True, stable=True)
    blocks = heavy_first.view(size, count).t().contiguous()  # each gets its share of the heavy ones
    if count > 1 and size > 1:
        inside = weight_inside(weights, blocks)
        for _ in range(SWEEPS):
            for left, right in round_robin(count, weights.device):
                exchange_vertices(weights, blocks, left, right)
            before, inside = inside, weight_inside(weights, blocks)
            if before - inside <= TOLERANCE * abs(before):
                break
    blocks = blocks.sort(1).values
    return blocks[blocks[:, 0].argsort()]


def weight_inside(weights: Tensor, blocks: Tensor) -> float:
    """The weight of all pairs of different vertices in one block, each pair counted twice."""
    return sum(float(weights[block][:, block].sum() - weights[block, block].sum()) for block in blocks)


def round_robin(count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The rounds of a tournament: in each every block meets another one, and over all rounds every other one once."""
    ring: list[int | None] = [*range(count), *[None] * (count % 2)]  # an odd one has a free round
    half, rounds = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a is not None and b is not None]
        rounds.append((torch.tensor([a for a, _ in pairs], device=device), torch.tensor([b for _, b in pairs], device=device)))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def exchange_vertices(weights: Tensor, blocks: Tensor, left: Tensor, right: Tensor) -> None:
    """Each block of `left` swaps vertices with its pair in `right`, the best two first, while the weight inside falls."""
    size = blocks.shape[1]
    both = torch.cat([blocks[left], blocks[right]], 1)  # (pairs, 2 size)
    among = weights[both.unsqueeze(2), both.unsqueeze(1)]  # (pairs, 2 size, 2 size)
    among.diagonal(dim1=1, dim2=2).zero_()
    side = torch.ones_like(both, dtype=weights.dtype)  # 1: left, −1: right
    side[:, size:] = -1
    pull = (among @ side.unsqueeze(2)).squeeze(2)  # weight to the left block less weight to the right one
    least = torch.finfo(weights.dtype).eps * size * among.abs().amax((1, 2))
    pairs = torch.arange(len(both), device=weights.device)
    for _ in range(size):
        gain = pull * side  # weight to its own block less weight to the other
        leaving, entering = (gain.masked_fill(side != way, -torch.inf) for way in (1, -1))
        best, at = (leaving.unsqueeze(2) + entering.unsqueeze(1) + 2 * among).flatten(1).max(1)
        going = (best > least).nonzero().squeeze(1)
        if not len(going):
            break
        for vertex, way in ((at // (2 * size), -1), (at % (2 * size), 1)):
            moved = vertex[going]
            side[going, moved] = way
            pull[going] += 2 * way * among[pairs[going], moved]
    by_side = side.argsort(dim=1, descending=True, stable=True)
    both = both.gather(1, by_side)
    blocks[left], blocks[right] = both[:, :size], both[:, size:]
