"""The small pass of docs/write_a_pass.md: what the branches of one kind return is scaled by a trainable number each."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.sdk import (
    Anatomy,
    Edit,
    MethodReference,
    ModuleReference,
    Observed,
    Pass,
    Plan,
    Problems,
    Site,
    SiteCall,
    WrappedModule,
    Wrapper,
    argument_place,
    map_first,
    option,
)


class Scaled(Wrapper):
    """What `layer` returns, times 1 + α."""

    def __init__(self, layer: nn.Module, place: WrappedModule) -> None:
        super().__init__(layer)
        like = next(layer.parameters())
        self.alpha = nn.Parameter(torch.zeros(1, device=like.device, dtype=like.dtype))
        self.stream_in, self.stream_out = argument_place(layer, place.stream_in), place.stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_first(self.layer(*args, **kwargs), lambda y: (1 + self.alpha) * y, self.stream_out)


@dataclasses.dataclass(frozen=True)
class ScalePlan(Plan):
    """The modules whose results are scaled."""

    places: tuple[WrappedModule, ...] = ()


@dataclasses.dataclass(frozen=True)
class Scale(Pass[ScalePlan]):
    """Multiply what the branches of one kind return by a trainable number each."""

    exact = True  # α is zero at the start

    kind: str = option("ffn", "which branches are scaled", choices=("ffn", "moe", "attention"))

    def plan(self, anatomy: Anatomy) -> ScalePlan:
        places, near_misses = anatomy.sites(self.kind)
        return ScalePlan(
            sites=tuple(Site(place.path, "times 1 + α") for place in places),
            near_misses=tuple(near_misses),
            new_parameters=len(places),
            formula=f"1 for each of {len(places)} modules",
            places=tuple(places),
        )

    def apply(self, plan: ScalePlan, edit: Edit) -> None:
        for place in plan.places:
            place.install(edit, functools.partial(Scaled, place=place))


def scaled(call: SiteCall) -> Tensor:
    """layer(x) + α layer(x)."""
    x = call.argument(call.module.stream_in)
    y = call.given("layer", {call.module.stream_in: x}, call.module.stream_out, others=None)
    return y + call.module.alpha * y


def start(observed: Observed) -> Problems:
    """α is zero."""
    for site in observed.sites:
        if site.module.alpha:
            yield site.path, "α is not zero"


Scale.reference = MethodReference({Scaled: ModuleReference(scaled, given=("layer",), key="stream_out")}, start=start)
