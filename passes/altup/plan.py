"""The plan of AltUp for one model: the weights that grow, the modules around the stream, the wrapper of each layer."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn

from retrofit.passes.altup.widening import WideningPlan
from retrofit.sdk import Edit, Plan

Start = Literal["copies", "noise", "zeros"]
REPEATED = "a copy for each block, (K−1) times its size"  # the growth of a parameter that is added to the stream


@dataclasses.dataclass(frozen=True)
class Growth:
    """The parameter `name` is multiplied by `scale` and gets `extent` more entries along `dim`."""

    name: str
    dim: int
    extent: int
    start: Start  # of the new entries: copies of the dense ones, noise with their spread, or zeros
    what: str  # their number, as a formula
    scale: float = 1.0

    def term(self, model: nn.Module) -> tuple[str, int]:
        """Return the label and the number of the new elements."""
        old = model.get_parameter(self.name)
        return f"{self.name}, {self.what}", old.numel() // old.shape[self.dim] * self.extent


def grow(growth: Growth, edit: Edit) -> None:
    """Replace the parameter by the longer one in every module that holds it, and update the width that the modules store."""
    old, dim = edit.model.get_parameter(growth.name), growth.dim
    width = old.shape[dim]
    size = list(old.shape)
    size[dim] += growth.extent
    new = nn.Parameter(old.detach().new_empty(size), requires_grad=old.requires_grad)
    dense, rest = new.detach().split([width, growth.extent], dim)
    dense.copy_(old)
    if growth.scale != 1.0:
        dense.mul_(growth.scale)
    if growth.start == "zeros":
        rest.zero_()
    elif growth.start == "noise":
        rest.normal_(std=1.0 if old.is_meta else float(old.detach().std()))
    else:
        for part in rest.split(width, dim):
            part.copy_(dense)
    for module in list(edit.model.modules()):
        if any(parameter is old for parameter in module._parameters.values()):
            for attribute in ("embedding_dim", "in_features"):
                if getattr(module, attribute, None) == width:
                    edit.set_attribute(module, attribute, new.shape[dim])
    index = [slice(None)] * old.dim()
    index[dim] = slice(0, width)
    edit.widen_parameter(old, new, tuple(index), growth.what, growth.scale)


@dataclasses.dataclass(frozen=True)
class WideTable:
    """A token table whose rows become K·d wide, or d + e; the e columns are projected to the other blocks after the look-up."""

    growth: Growth
    width: int  # d
    paths: tuple[str, ...]  # of the modules that look rows up in it


@dataclasses.dataclass(frozen=True)
class WideHead:
    """A head that reads the whole stream; if it is tied to a token table, its argument's blocks are weighted."""

    weight: str  # name of the parameter
    path: str  # of the module whose argument is the stream; "" if the product is in other code
    growth: Growth | None  # None if it is tied: the table grows


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The wrapper of the layer `name`."""

    name: str
    width: int
    active: int
    next_active: int  # the block that the next layer computes
    trained: bool  # whether the coefficients are parameters; otherwise they keep their initial values
    arguments: dict[str, Any]  # keyword arguments of `AltUpLayer`


@dataclasses.dataclass(frozen=True)
class AltUpPlan(Plan):
    """The changes to the weights and modules outside the layers, and to each layer."""

    tables: tuple[WideTable, ...] = ()
    heads: tuple[WideHead, ...] = ()
    repeated: tuple[Growth, ...] = ()  # parameters that are added to the stream: a copy for each block
    widening: WideningPlan = dataclasses.field(default_factory=WideningPlan)
    layers: tuple[LayerPlan, ...] = ()
    readers: dict[str, str] = dataclasses.field(default_factory=dict)  # last layer of a stack → module that then reads the stream
    runs: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of stacks whose dense stream hops: module that calls the layers, layers
