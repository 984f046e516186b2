"""How a merged layer turns from the dense one into its own: the weight of the keys that each attention did not have grows."""

from __future__ import annotations

import dataclasses

from torch import nn

from retrofit.passes.merge_cross_attention.merged_layer import MergedCrossAttention
from retrofit.passes.merge_cross_attention.other_keys import AttentionToOthers


@dataclasses.dataclass(frozen=True)
class OtherTokens:
    """At 0 each attention sees the keys it had, which is the dense layer; at 1 it sees both sets."""

    name: str = "the weight of the tokens that an attention did not have"

    def fits(self, site: nn.Module) -> bool:
        """Not where the cross-attention is gone: the layer without it is not the dense one."""
        return any(isinstance(module, MergedCrossAttention) for module in site.modules())

    def turn(self, site: nn.Module, share: float) -> None:
        """The keys that an attention did not have count with this share of their weight."""
        for module in site.modules():
            if isinstance(module, AttentionToOthers):
                module.share = share
