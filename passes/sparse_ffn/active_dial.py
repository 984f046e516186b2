"""How a sparse feed-forward turns from the dense function into its own: the active units of a block go from N down to k."""

from __future__ import annotations

import dataclasses

from torch import nn

from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward


@dataclasses.dataclass(frozen=True)
class ActiveUnits:
    """All N units of a block are active at 0, which is the dense function; the k of the method at 1."""

    name: str = "the active units of a block"

    def fits(self, site: nn.Module) -> bool:
        """Not where units are multiplied by their probabilities: those of all N would not be the dense function."""
        blocks = sparse_feed_forwards(site)
        return bool(blocks) and not any(block.multiply for block in blocks)

    def turn(self, site: nn.Module, share: float) -> None:
        """So many units are active as lie between N and k, rounded."""
        for block in sparse_feed_forwards(site):
            block.activate(round(block.sparsity - share * (block.sparsity - block.chosen)))


def sparse_feed_forwards(site: nn.Module) -> list[SparseFeedForward]:
    return [module for module in site.modules() if isinstance(module, SparseFeedForward)]
