"""One softmax over two sets of keys, where scores are written out: the model's own code makes both sets of them.

    p = softmax([s; t + log w])            s: scores of the attention's own keys, t: those of the other keys, w = 1 in the method
    y = p_s v + p_t v'                     by the product that the model's own code makes of its weights and its values

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retrofit.passes.merge_cross_attention.other_keys import AttentionToOthers
from retrofit.passes.merge_cross_attention.written_out_calls import AnsweredScores, RecordedScores


class JointSoftmax(AttentionToOthers):
    """The weights of the keys of a call and of others."""

    replaces = "a softmax between two products"

    def forward(self, scores: Tensor, dtype: torch.dtype | None = None, *, other: Mapping[str, Any] | None = None) -> Tensor:
        """Of scores (…, T, K) and others (…, T, K') the weights (…, T, K + K'); … is batch and heads, or their product."""
        if other is None:
            return scores.softmax(-1, dtype)
        others = other["scores"].reshape(*scores.shape[:-1], -1).to(scores.dtype)
        if self.weighs:
            by_head = others.reshape(-1, self.heads, *others.shape[-2:])
            others = (by_head + self.added()).to(scores.dtype).reshape(others.shape)
        return torch.cat([scores, others], -1).softmax(-1, dtype)

    @staticmethod
    def recorded(calls: list[dict[str, Any]]) -> RecordedScores:
        """A context in which the scores and the values of a written-out attention go into `calls`."""
        return RecordedScores(calls)

    def answering(self, other: Mapping[str, Any] | None, calls: list[bool]) -> AnsweredScores:
        """A context in which this module, with the keys `other` besides, answers for the softmax."""
        return AnsweredScores(self, other, calls)
