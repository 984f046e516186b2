"""Which dimensions of a tensor run along the tokens: of masks in every form, positions, rotary tables, biases.

This is inferred from two captures of the model, at two batch sizes and two lengths: a dimension that changed with the length is one
of tokens, the first of two that of the queries, the last that of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from retrofit.passes.sequence_altup.argument_paths import ArgumentPath

HIDDEN = -5e3  # masks that are added hide a key by −1e4 or less; no bias of a trained attention comes near

Shapes = Mapping[ArgumentPath, torch.Size]  # of the tensors in a call


@dataclasses.dataclass(frozen=True)
class TokenDims:
    """A tensor's dimensions that run along tokens, queries before keys, and whether it shows which tokens are padding."""

    rank: int
    positions: tuple[int, ...]
    batch: int | None  # the dimension whose extent is the batch, or a multiple of it
    shows_padding: bool = False
    zero_is_real: bool = False  # of a mask by tokens alone: added, or true where there is padding


NO_TOKENS = TokenDims(0, (), None)


def infer_token_dims(one: Shapes, other: Shapes, stream: ArgumentPath, tokens_first: bool = False) -> dict[ArgumentPath, TokenDims]:
    """The token dimensions of the tensors of two calls, whose streams are (batch, tokens, width), or (tokens, batch, width)."""
    (batch, length), (other_batch, other_length) = (
        (size[1], size[0]) if tokens_first else size[:2] for size in (one[stream], other[stream])
    )
    found: dict[ArgumentPath, TokenDims] = {}
    for path in one.keys() & other.keys():
        pairs = list(zip(one[path], other[path], strict=False))
        if len(one[path]) != len(other[path]):
            continue
        positions = tuple(dim for dim, pair in enumerate(pairs) if pair == (length, other_length))
        rows = [dim for dim, (a, b) in enumerate(pairs) if dim not in positions and a != b and a * other_batch == b * batch]
        found[path] = TokenDims(len(pairs), positions, rows[0] if rows else None)
    return found


def token_dims_at_call(value: Tensor, known: TokenDims | None) -> TokenDims | None:
    """The token dimensions of a tensor in a call: the `known` ones where the rank is that; those of a mask; None where unknown."""
    if known is not None and known.rank == value.dim():
        return known
    if known is not None and known.shows_padding and value.dim() == 2:
        return TokenDims(2, (1,), 0, shows_padding=True)
    if value.dim() == 4 and (known is None or known.shows_padding):
        return TokenDims(4, (2, 3), 0, shows_padding=True)
    return NO_TOKENS if value.dim() == 0 else None


# ── Masks ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """`visible` as a mask of that type: boolean, or added to the scores."""
    if dtype == torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def unpadded_tokens(mask: Tensor, dims: TokenDims, batch: int, start: int, length: int) -> Tensor:
    """Which of the `length` tokens from key `start` on are no padding, as `mask` shows: (1 or batch, length)."""
    dim = dims.positions[-1]
    if len(dims.positions) == 2 and mask.shape[dims.positions[0]] == length:
        visible = mask_diagonal(mask, start, length, *dims.positions)  # a token sees itself unless it is padding
    else:
        visible = mask.narrow(dim, start, length).movedim(dim, -1)
    if visible.is_floating_point():
        visible = visible > (HIDDEN if mask.dim() > 2 or dims.zero_is_real else 0.5)
    elif dims.zero_is_real:
        visible = visible == 0
    elif visible.dtype != torch.bool:
        visible = visible != 0
    rows = dims.batch
    if rows is None or mask.shape[rows] == 1:
        return visible.reshape(-1, length).any(0, keepdim=True)
    return visible.movedim(rows, 0).reshape(batch, -1, length).any(1)


def mask_diagonal(mask: Tensor, start: int, length: int, queries: int, keys: int) -> Tensor:
    """The entry of each of the `length` queries for the key at its own index plus `start`, along a new last dimension."""
    if isinstance(start, int):
        return mask.diagonal(start, queries, keys).narrow(-1, 0, length)
    mask = mask.movedim((queries, keys), (-2, -1))  # while a program is traced, `start` may be symbolic
    columns = (start + torch.arange(length, device=mask.device)).view(-1, 1)
    return mask.gather(-1, columns.expand(*mask.shape[:-1], 1)).squeeze(-1)
