"""Modules that replace a feed-forward, and how one is installed in a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from retrofit.anatomy.feed_forward_sites import FeedForward
from retrofit.runtime.packed_rows import unpacked
from retrofit.surgery.edit import Edit
from retrofit.surgery.wrappers import argument_place, find_argument


class FeedForwardBlock(nn.Module):
    """A module that replaces the feed-forward `site`, until then part of `old`; a subclass computes y in `compute`."""

    def __init__(self, site: FeedForward, old: nn.Module) -> None:
        super().__init__()
        self.width, self.units = site.width, site.units
        self.place = argument_place(old, site.stream_in if site.stream_in is not None else 0)
        self.tail = site.tail

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        container, key = find_argument(self.place, list(args), dict(kwargs))
        y = self.compute(container[key])
        return y if self.tail is None else self.tail(y)

    def compute(self, x: Tensor) -> Tensor:
        """y of x: (…, d) to (…, d)."""
        raise NotImplementedError


class RowMajor(Conv1D):
    """y = h W + b with W stored (d_ff, d): the row of a hidden unit is contiguous, and the bias may be missing."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.nx, self.nf = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class PackableRows(nn.Linear):
    """y = h W + b with W stored (d_ff, d), for quantizers that pack the weight of a linear layer in place: so they pack the rows.

    W is unpacked to be multiplied by; who needs a few rows reads these (`retrofit.runtime.packed_rows`).
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, unpacked(self.weight).to(x.dtype).t(), self.bias)


class GatheredFeedForward(nn.Module):
    """A feed-forward whose matrices were applied by several modules, as one module of them: `up`, `hidden`, `down`."""

    def __init__(self, site: FeedForward, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.hidden, self.down = up, site.hidden, down
        self.place = argument_place(down, site.stream_in if site.stream_in is not None else 0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        container, key = find_argument(self.place, list(args), kwargs)
        return self.down(self.hidden(self.up(container[key])))  # type: ignore[no-any-return]


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """An `nn.Linear` that holds these very parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    layer.bias = bias  # type: ignore[assignment]
    return layer


def install_feed_forward(site: FeedForward, block: nn.Module, edit: Edit) -> None:
    """`block`, which maps x to y, replaces the feed-forward."""
    for path in site.bypassed:
        edit.replace_module(path, nn.Identity())
    edit.replace_module(site.path, block)
