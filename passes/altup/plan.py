"""AltUp of one model as data: the weights that get wider, the modules around the stream, the wrapper of each layer."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor, nn

from retrofit.passes.altup.widening import WideningPlan
from retrofit.sdk import Edit, Plan

Start = Literal["copies", "noise", "zeros"]
REPEATED = "a copy for each block, (K−1) times its size"  # what a parameter gets that is added to the stream


@dataclasses.dataclass(frozen=True)
class Growth:
    """The parameter `name`, times `scale`, gets `extent` entries more along `dim`."""

    name: str
    dim: int
    extent: int
    start: Start  # of the new entries: copies of the dense ones, noise with their spread, or zeros
    what: str  # how many there are, as a formula
    scale: float = 1.0

    def new_elements(self, model: nn.Module) -> int:
        old = model.get_parameter(self.name)
        return old.numel() // old.shape[self.dim] * self.extent


def grow(growth: Growth, edit: Edit) -> None:
    """Replace the parameter by the longer one wherever it is registered, and the width where modules store it."""
    old, dim = edit.model.get_parameter(growth.name), growth.dim
    width = old.shape[dim]
    size = list(old.shape)
    size[dim] += growth.extent
    new = nn.Parameter(old.detach().new_empty(size), requires_grad=old.requires_grad)
    dense, rest = new.detach().split([width, growth.extent], dim)
    dense.copy_(old)
    if growth.scale != 1.0:
        dense.mul_(growth.scale)
    fill(rest, dense, old, growth)
    for module in list(edit.model.modules()):
        if any(parameter is old for parameter in module._parameters.values()):
            for attribute in ("embedding_dim", "in_features"):
                if getattr(module, attribute, None) == width:
                    edit.set_attribute(module, attribute, new.shape[dim])
    index = [slice(None)] * old.dim()
    index[dim] = slice(0, width)
    edit.widen_parameter(old, new, tuple(index), growth.what, growth.scale)


def fill(rest: Tensor, dense: Tensor, old: Tensor, growth: Growth) -> None:
    """Fill `rest` with the start of the new entries."""
    if growth.start == "zeros":
        rest.zero_()
    elif growth.start == "noise":
        rest.normal_(std=1.0 if old.is_meta else float(old.detach().std()))
    else:
        for part in rest.split(old.shape[growth.dim], growth.dim):
            part.copy_(dense)


@dataclasses.dataclass(frozen=True)
class WideTable:
    """A token table whose rows get K blocks, or d + e columns; e of them are projected to the other blocks after the look-up."""

    growth: Growth
    width: int  # d
    paths: tuple[str, ...]  # of the modules that look it up


@dataclasses.dataclass(frozen=True)
class WideHead:
    """A head that reads the whole stream; if it is tied to a token table, its blocks are weighted before it."""

    weight: str  # name of the parameter
    path: str  # of the module whose argument is the stream; "" if the product is in other code
    growth: Growth | None  # None if it is tied, because the table grows

    @property
    def tied(self) -> bool:
        return self.growth is None


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The wrapper of one layer's module; the fields are arguments of `AltUpLayer`, and these:"""

    name: str
    width: int
    active: int
    next_active: int  # block that the next layer works on
    trained: bool  # whether the layer has coefficients as parameters, and not just their initial values
    stream_in: int | str
    stream_out: int | str | None
    narrow: dict[int | str, int]
    expand: bool
    combine: tuple[float, ...] | None
    rotate: bool


@dataclasses.dataclass(frozen=True)
class AltUpPlan(Plan):
    """The changes to the weights and modules outside the layers, and to each layer."""

    tables: tuple[WideTable, ...] = ()
    heads: tuple[WideHead, ...] = ()
    repeated: tuple[Growth, ...] = ()  # parameters that are added to the stream, a copy for each block
    widening: WideningPlan = dataclasses.field(default_factory=WideningPlan)
    layers: tuple[LayerPlan, ...] = ()
    # The last layer of a stack → the module that reads the stream then.
    readers: dict[str, str] = dataclasses.field(default_factory=dict)
    runs: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of stacks whose dense stream hops: the module that calls the layers, those
