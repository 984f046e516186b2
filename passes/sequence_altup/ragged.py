"""Rows that hold different numbers of anchors, in one tensor: entries that are not valid are holes, and come first."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class RaggedAnchors:
    """Values of anchors in the order of their columns, (batch, n, …) each, and which of them a row really holds."""

    columns: Tensor  # (batch, n), of the sequence
    valid: Tensor  # (batch, n)
    values: tuple[Tensor, ...]

    def append(self, columns: Tensor, valid: Tensor, values: tuple[Tensor, ...]) -> RaggedAnchors:
        """These entries and then the new ones."""
        joined = tuple(torch.cat(pair, 1) for pair in zip(self.values, values, strict=True))
        return RaggedAnchors(torch.cat([self.columns, columns], 1), torch.cat([self.valid, valid], 1), joined)

    def compact(self, valid: Tensor, most: int | None = None) -> RaggedAnchors:
        """The valid entries of each row, its last `most` at the most, with as few holes before them as possible."""
        width = int(valid.sum(1).max()) if valid.numel() else 0
        if width == valid.shape[1] and most is None and bool((valid[:, 1:] >= valid[:, :-1]).all()):
            return RaggedAnchors(self.columns, valid, self.values)
        width = width if most is None else min(width, most)
        order = torch.argsort(valid.int(), dim=1, stable=True)[:, valid.shape[1] - width :]

        def pick(value: Tensor) -> Tensor:
            index = order.view(*order.shape, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:])
            return value.gather(1, index)

        return RaggedAnchors(pick(self.columns), pick(valid), tuple(pick(value) for value in self.values))
