"""How a strided layer turns from the dense layer into its own: it computes fewer and fewer of the tokens between its anchors."""

from __future__ import annotations

import dataclasses

from torch import nn

from retrofit.passes.sequence_altup.strided_layers import StridedLayer


@dataclasses.dataclass(frozen=True)
class ComputedTokens:
    """At 0 all tokens are computed and a1, a2, b are 1, 0, 1: the dense layer. At 1 it is the method, with its own scalars."""

    name: str = "the share of the tokens that are computed"

    def fits(self, site: nn.Module) -> bool:
        return any(isinstance(module, StridedLayer) for module in site.modules())

    def turn(self, site: nn.Module, share: float) -> None:
        """So much of the tokens between anchors is no longer computed."""
        for module in site.modules():
            if isinstance(module, StridedLayer):
                module.dense_share = 1.0 - share
