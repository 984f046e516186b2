"""Modules that replace the dense projections of an attention, and the modules inside it that read the same stream.

`SparseAttention` passes the attention's own code the columns of Q, K and V instead of x. Where that code calls its projections,
each of these returns its part of the columns, plus the dense bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.passes.sparse_qkv.modular_projection import ModularProjection
from retrofit.sdk import ArgumentPlace, batch_first, find_argument


class WeightlessProjection(nn.Module):
    """Replaces a dense projection; its `weight` is an empty tensor, for code that initialises every projection's weight by name."""

    @property
    def weight(self) -> Tensor:
        like = next(self.parameters(), torch.empty(()))
        return like.detach().new_empty(0, 1)  # no output features and one input feature: rules for initial weights divide by these


class IdentityProjection(WeightlessProjection):
    """Replaces a dense projection that is gone: returns its argument. The bias, where there was one, is empty too."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.biased = biased

    @property
    def bias(self) -> Tensor | None:
        return self.weight.flatten() if self.biased else None

    def forward(self, y: Tensor) -> Tensor:
        return y


class BiasProjection(WeightlessProjection):
    """Replaces a dense projection whose product is computed elsewhere: adds the dense bias to its argument."""

    bias: nn.Parameter | None

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)

    def forward(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColumnProjection(BiasProjection):
    """Replaces a dense projection: returns `width` columns of its argument, from `start` on, plus the dense bias.

    Column c of the result is the `order[c]`-th of them, where the model's code expects another order. With `sparse` the columns are
    computed here, by that projection of the argument: the stream, (T, batch, d) where `tokens_first`.
    """

    order: Tensor | None

    def __init__(
        self,
        start: int,
        width: int,
        order: list[int],
        bias: nn.Parameter | None,
        sparse: ModularProjection | None,
        device: torch.device,
        tokens_first: bool = False,
    ) -> None:
        super().__init__(bias)
        self.start, self.width, self.sparse, self.tokens_first = start, width, sparse, tokens_first
        reordered = order != list(range(width))
        self.register_buffer("order", torch.tensor(order, device="cpu").to(device) if reordered else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.sparse is None:
            y = x.narrow(-1, self.start, self.width)
        else:
            y = batch_first(self.sparse(batch_first(x, self.tokens_first)), self.tokens_first)
        return super().forward(y if self.order is None else y.index_select(-1, self.order))

    def extra_repr(self) -> str:
        return f"{self.width} columns from {self.start}" if self.sparse is None else f"{self.width} columns"


class SparseOutput(BiasProjection):
    """Replaces a dense output layer: a sparse projection, and the dense bias."""

    def __init__(self, sparse: ModularProjection, bias: nn.Parameter | None) -> None:
        super().__init__(bias)
        self.sparse = sparse

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.sparse(x))


class StreamSlice(nn.Module):
    """Wraps a module inside an attention that reads x and is no projection: passes it the columns from `start` on, which are x.

    The attention's code may read the wrapped module's weight and bias. PEFT finds modules by their last name and by their
    attributes: `reader` is the name of no other module.
    """

    def __init__(self, reader: nn.Module, stream_in: ArgumentPlace, start: int) -> None:
        super().__init__()
        self.reader = reader
        self.start, self.stream_in = start, stream_in

    @property
    def weight(self) -> Any:
        return self.reader.weight

    @property
    def bias(self) -> Any:
        return self.reader.bias

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.stream_in, arguments, keywords)
        container[key] = container[key][..., self.start :]
        return self.reader(*arguments, **keywords)
