"""The attention within a module's own code, computed by another module: its call of torch's fused attention is answered by that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.passes.lsh_attention.bucketed_attention import BucketedAttention
from retrofit.sdk import AnsweredFusedAttention, RetrofitError, Wrapper, cache_among, child_modules


class InterceptedAttention(Wrapper):
    """Calls the attention module `layer`, whose code attends by `attention`."""

    def __init__(self, layer: nn.Module, attention: BucketedAttention, keeps_buckets: bool) -> None:
        super().__init__(layer)
        self.attention, self.keeps_buckets = attention, keeps_buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        children = child_modules(self)
        cache = cache_among(args, kwargs) if self.keeps_buckets else None
        calls: list[bool] = []

        def answer(*operands: Any, **named: Any) -> Tensor:
            calls.append(True)
            return children["attention"](*operands, **named, cache=cache)  # type: ignore[no-any-return]

        with AnsweredFusedAttention(answer):
            result = children["layer"](*args, **kwargs)
        if not torch.compiler.is_compiling() and not calls:
            raise RetrofitError(
                f"the attention {self.attention.name} does not call torch's scaled_dot_product_attention any more",
                why="attention in buckets replaces that call",
                remedy="choose attn_implementation='sdpa', as when the model was rewritten",
            )
        return result
