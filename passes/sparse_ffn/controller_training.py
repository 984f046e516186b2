"""The controller trained as a classifier: which units of each block contribute most?

    loss = − Σ_u s_u² log softmax(x C1 C2 + c)_u        summed over the blocks, averaged over tokens; s_u² = c_u² / Σ c²

A block counts by its part of a token's energy. Three tokens in four are drawn at even chances, the fourth in proportion to its
energy Σ c²: the few with massive activations, on which a model depends, are learnt and outweigh no others. The best probabilities
are the expected shares of the block's energy, whose order is right for any number of active units.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retrofit.passes.sparse_ffn.contributions import CHUNK, Contributions, shares

STEPS = 300  # of Adam
BATCH = 256  # tokens
RATE = 1e-2  # highest learning rate; x is whitened, so that one rate suits every model
MASSIVE = 0.25  # of the tokens of a batch are drawn in proportion to their energy
WARM = 20  # steps until it is reached; a cosine brings it down to zero
SPREAD = 1.5  # of the logits in a block before the first step

Maps = tuple[Tensor, Tensor, Tensor]  # C1, C2, c


def train_controller(contributions: Contributions, x: Tensor, white: Tensor, order: Tensor, n: int, start: Maps) -> Maps:
    """C1, C2 and c after training from `start`, all for `white`, which is x, (tokens, d), whitened; units come in `order`.

    The same arguments give the same result. Units are laid out by their place in a block, (N, blocks): a softmax along a row of a
    few numbers takes twenty times as long.
    """
    order, start = by_place(order, n), (start[0], by_place(start[1], n), by_place(start[2], n))
    target, energy = white.new_empty(len(x), len(order), dtype=torch.half), white.new_empty(len(x), dtype=torch.double)
    for (_, c), shared, whole in zip(contributions.chunks(x), target.split(CHUNK), energy.split(CHUNK), strict=True):
        shared.copy_(shares(c)[:, order].square())
        whole.copy_(c.double().square().sum(1))
    chances = (1 - MASSIVE) / len(x) + MASSIVE * energy.cpu() / energy.sum().cpu().clamp_min(1e-30)
    c1, c2, bias = start
    places = (white[:BATCH] @ c1 @ c2 + bias).unflatten(1, (n, -1))
    scale = SPREAD / (places - places.mean(1, keepdim=True)).square().mean().sqrt().clamp_min(1e-30)
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        maps = [one.clone().requires_grad_() for one in (c1, scale * c2, scale * bias)]
        adam = torch.optim.Adam(maps, lr=RATE, betas=(0.9, 0.99))
        for step in range(STEPS):
            adam.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / STEPS)) / 2
            drawn = torch.multinomial(chances, BATCH, replacement=True, generator=generator).to(white.device)
            logits = (white[drawn] @ maps[0] @ maps[1] + maps[2]).unflatten(1, (n, -1))
            loss = -(target[drawn].float().unflatten(1, (n, -1)) * logits.log_softmax(1)).sum() / BATCH
            adam.zero_grad()
            loss.backward()
            adam.step()
    c1, c2, bias = (one.detach() for one in maps)
    return c1, by_block(c2, n), by_block(bias, n)


def by_place(values: Tensor, n: int) -> Tensor:
    """Values of units in blocks of n, (…, d_ff), with the first units of all blocks first."""
    return values.unflatten(-1, (-1, n)).mT.flatten(-2)


def by_block(values: Tensor, n: int) -> Tensor:
    """The inverse of `by_place`."""
    return by_place(values, values.shape[-1] // n)
