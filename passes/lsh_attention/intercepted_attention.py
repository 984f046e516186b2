"""The attention within a module's own code, computed by another module: its call of torch's fused attention is intercepted.

Queries, keys and values arrive as the model's code has made them: projected, normalized, rotated, after its cache, with its mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from retrofit.passes.lsh_attention.bucketed_attention import BucketedAttention
from retrofit.sdk import RetrofitError, Wrapper, cache_among, child_modules

FUSED = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)


class InterceptedCalls(TorchFunctionMode):
    """Within this context `attention` is called, with `cache`, in place of torch's fused attention; `count` is how often."""

    def __init__(self, attention: nn.Module, cache: Any) -> None:
        super().__init__()
        self.attention, self.cache, self.count = attention, cache, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FUSED:
            return function(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():  # a compiled mode has no attributes that change
            self.count += 1
        return self.attention(*args, **(kwargs or {}), cache=self.cache)


class InterceptedAttention(Wrapper):
    """Calls the attention module `layer`, whose code attends by `attention`."""

    def __init__(self, layer: nn.Module, attention: BucketedAttention, keeps_buckets: bool) -> None:
        super().__init__(layer)
        self.attention, self.keeps_buckets = attention, keeps_buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        children = child_modules(self)
        cache = cache_among(args, kwargs) if self.keeps_buckets else None
        with InterceptedCalls(children["attention"], cache) as calls:
            result = children["layer"](*args, **kwargs)
        if not torch.compiler.is_compiling() and not calls.count:
            raise RetrofitError(
                f"the attention {self.attention.name} does not call torch's scaled_dot_product_attention any more",
                why="attention in buckets replaces that call",
                remedy="choose attn_implementation='sdpa', as when the model was rewritten",
            )
        return result
