"""Low-rank adapters: every projection of attention and feed-forward gets a trainable path of rank r next to it.

    y = layer(x) + (α/r) (x A) B        A: [d_in, r] `a`   B: [r, d_out] `b`, zero at the start

LoRA: Low-Rank Adaptation of Large Language Models (ICLR 2022), §4.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.sdk import (
    Anatomy,
    ArgumentPlace,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Site,
    Wrapper,
    argument_place,
    collect_near_miss,
    find_argument,
    map_first,
    option,
    selected_layers,
)
from retrofit.sdk.program import shape
from retrofit_low_rank.reference import low_rank_adapter, start


class LowRankAdapter(Wrapper):
    """What `layer` returns plus (α/r) (x A) B, x being its argument `stream_in`: (…, d_in) to (…, d_out)."""

    def __init__(self, layer: nn.Module, stream_in: ArgumentPlace, sizes: tuple[int, int], rank: int, alpha: float) -> None:
        super().__init__(layer)
        self.stream_in, self.scale = stream_in, alpha / rank
        like = next(layer.parameters())
        self.a = nn.Parameter(torch.randn(sizes[0], rank, device=like.device, dtype=like.dtype) / math.sqrt(sizes[0]))
        self.b = nn.Parameter(torch.zeros(rank, sizes[1], device=like.device, dtype=like.dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        container, key = find_argument(self.stream_in, list(args), dict(kwargs))
        x: Tensor = container[key]
        return map_first(
            self.layer(*args, **kwargs), lambda y: y + (self.scale * (x.to(self.a.dtype) @ self.a @ self.b)).to(y.dtype)
        )


@dataclasses.dataclass(frozen=True)
class AdaptedMatrix(Site):
    """A module that multiplies by one weight matrix, and where its input is."""

    stream_in: int | str
    sizes: tuple[int, int]  # d_in, d_out


@dataclasses.dataclass(frozen=True)
class LowRankPlan(Plan):
    """The matrices that get an adapter."""

    sites: tuple[AdaptedMatrix, ...] = ()


@dataclasses.dataclass(frozen=True)
class LowRank(Pass[LowRankPlan]):
    """Add a trainable low-rank path next to every projection (LoRA)."""

    paper: ClassVar[str] = "LoRA: Low-Rank Adaptation of Large Language Models, §4.1"
    rewrites: ClassVar[str] = "projection"
    exact = True  # B is zero at the start
    reference: ClassVar[MethodReference] = MethodReference(
        {LowRankAdapter: ModuleReference(low_rank_adapter, given=("layer",))}, start=start
    )

    rank: int = option(8, "r, the rank of an adapter", minimum=1)
    alpha: float = option(16.0, "α, adapters are scaled by α/r", minimum=0)
    branches: str = option("all", "which projections get adapters", choices=("all", "attention", "ffn"))
    layers: str = option("all", "depths that get adapters, e.g. 0-5+8")

    def plan(self, anatomy: Anatomy) -> LowRankPlan:
        sites: dict[str, AdaptedMatrix] = {}  # by path: a module that several layers share gets one adapter
        near_misses: list[NearMiss] = []
        for name in self.weights(anatomy):
            with collect_near_miss(name, near_misses):
                site = self.site(name, anatomy)
                sites.setdefault(site.name, site)
        count = sum(self.rank * sum(site.sizes) for site in sites.values())
        return LowRankPlan(
            sites=tuple(sites.values()),
            near_misses=tuple(near_misses),
            new_parameters=count,
            formula=f"Σ r·(d_in + d_out) over {len(sites)} matrices = {count:,}",
        )

    def weights(self, anatomy: Anatomy) -> Iterator[str]:
        """The names of the weights that the options ask for, each once, in order of depth."""
        names: list[str] = []
        for stack, depth in selected_layers(anatomy, self.layers, self.name):
            layer = stack.layers[depth]
            branches = {"all": layer.branches, "attention": layer.attentions, "ffn": layer.ffns}[self.branches]
            names += [projection.name for branch in branches for projection in branch.projections if projection.name]
        yield from dict.fromkeys(names)

    def site(self, weight: str, anatomy: Anatomy) -> AdaptedMatrix:
        """The module that multiplies by `weight`; raises `DoesNotFitError` where it does more than that."""
        path = weight.rpartition(".")[0]
        call = next((call for call in anatomy.program.calls if call.path == path), None)
        if call is None or anatomy.model.get_parameter(weight).dim() != 2:
            raise DoesNotFitError(f"low-rank: {weight} has no module of its own", why="no module multiplies by this matrix alone")
        before = {key: size for key, node in call.inputs.items() if (size := shape(node)) and key is not None}
        after = shape(call.outputs[None]) if None in call.outputs else None
        if len(before) != 1 or not after:
            raise DoesNotFitError(f"low-rank: {path} is no plain projection", why="it takes or returns more than one tensor")
        ((key, size),) = before.items()
        if {size[-1], after[-1]} != set(anatomy.model.get_parameter(weight).shape):
            raise DoesNotFitError(
                f"low-rank: {path} is no plain projection", why=f"{size[-1]} columns go in and {after[-1]} come out"
            )
        return AdaptedMatrix(path, f"plus an adapter of rank {self.rank}", key, (size[-1], after[-1]))

    def apply(self, plan: LowRankPlan, edit: Edit) -> None:
        for site in plan.sites:
            module = edit.model.get_submodule(site.name)
            adapter = LowRankAdapter(module, argument_place(module, site.stream_in), site.sizes, self.rank, self.alpha)
            edit.replace_module(site.name, adapter)
            edit.expect_late_gradient(adapter.a)  # until B has left zero
