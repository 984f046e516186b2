"""What AltUp does to one model, as data: the weights that get wider, the modules around the stream, the wrapper of each layer."""

from __future__ import annotations

import dataclasses

from retrofit.passes.altup.growth import Growth
from retrofit.passes.altup.widening import WideningPlan
from retrofit.sdk import Plan


@dataclasses.dataclass(frozen=True)
class WideTable:
    """A token table whose rows get K blocks, or d + e columns, of which e are projected to the other blocks after the look-up."""

    growth: Growth
    width: int  # d
    paths: tuple[str, ...]  # of the modules that look it up


@dataclasses.dataclass(frozen=True)
class WideHead:
    """A head that reads the whole stream; where it is tied to a token table, its blocks are weighed before it."""

    weight: str  # name of the parameter
    path: str  # of the module whose argument is the stream, "" where the product is in code that has it from elsewhere
    growth: Growth | None  # None where it is tied: the table's growth is its own

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
    trained: bool  # whether the layer has coefficients of its own, and not just their start
    stream_in: int | str
    stream_out: int | str | None
    narrow: dict[int | str, int]
    expand: bool
    combine: tuple[float, ...] | None
    rotate: bool


@dataclasses.dataclass(frozen=True)
class AltUpPlan(Plan):
    """What happens to the weights and modules outside the layers, and to each layer."""

    tables: tuple[WideTable, ...] = ()
    heads: tuple[WideHead, ...] = ()
    repeated: tuple[Growth, ...] = ()  # parameters that are added to the stream, a copy for each block
    widening: WideningPlan = dataclasses.field(default_factory=WideningPlan)
    layers: tuple[LayerPlan, ...] = ()
    readers: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # last layer of a stack → the module that reads the stream then
