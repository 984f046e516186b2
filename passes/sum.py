"""Sum: an extra embedding is added to the token representation, the plainest way to spend parameters on an external memory.

    x = E[id] + S[id]        E: [V, d] the dense table   S: [V, d] `extra`, zero at the start

The baseline that AltUp is measured against: Alternating Updates for Efficient Transformers (NeurIPS 2023), supplement, Table 7, and
the paper on external memory before it, Table 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes import sum_reference as once_more
from retrofit.sdk import (
    Anatomy,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Site,
    Wrapper,
    argument_place,
    find_argument,
    map_first,
    shape,
)


class SummedEmbedding(Wrapper):
    """What the token embedding `layer` returns, plus the row of `extra` for each id; ids added later get nothing."""

    def __init__(self, layer: nn.Module, extra: nn.Embedding) -> None:
        super().__init__(layer)
        self.extra = extra
        self.place = argument_place(layer, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        container, key = find_argument(self.place, list(args), dict(kwargs))
        ids = container[key]
        return map_first(self.layer(*args, **kwargs), lambda y: y + self.look_up(ids).to(y.dtype))

    def look_up(self, ids: Tensor) -> Tensor:
        rows = self.extra.num_embeddings
        if all(len(one) <= rows for one in self.layer.parameters()):
            return self.extra(ids)  # type: ignore[no-any-return]
        return F.embedding(ids.clamp(max=rows - 1), self.extra.weight) * (ids < rows).unsqueeze(-1)


def owns(module: nn.Module, weight: nn.Parameter) -> bool:
    """Whether the weight is the module's own parameter, or all the parameters it has, under whatever names."""
    return any(one is weight for one in module.parameters(recurse=False)) or {*map(id, module.parameters())} == {id(weight)}


@dataclasses.dataclass(frozen=True)
class SumPlan(Plan):
    """The token table and the modules that look it up."""

    table: str = ""  # name of the parameter
    width: int = 0  # d


@dataclasses.dataclass(frozen=True)
class SumEmbedding(Pass[SumPlan]):
    """Add a second, zero-initialised embedding to the token representation: V·d parameters."""

    name: ClassVar[str] = "sum"
    summary: ClassVar[str] = "add an extra embedding to the token representation (the papers' Sum baseline)"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, Table 7"
    rewrites: ClassVar[str] = "token embedding"
    reference: ClassVar[MethodReference] = MethodReference(
        {SummedEmbedding: ModuleReference(once_more.summed_embedding, ("layer",))}, start=once_more.start
    )
    remedy: ClassVar[str] = "apply it to a model of text; altup(embedding=recycled) widens any stream"
    way_around: ClassVar[str] = "its own code may depend on the stream's width: try altup(embedding=recycled)"

    @property
    def exact(self) -> bool:
        return True

    def plan(self, anatomy: Anatomy) -> SumPlan:
        if anatomy.embedding is None:
            return SumPlan((), (NearMiss("", "it looks up no token embedding: its inputs are no token ids", in_any_form=True),))
        model, table = anatomy.model, anatomy.embedding.parameter
        parts = [part for part in anatomy.embeddings if part.parameter == table]
        width = int((shape(anatomy.node(parts[0].node)) or (0,))[-1])
        weight = model.get_parameter(table)
        rows = weight.shape[0]
        sites: list[Site] = []
        near_misses: list[NearMiss] = []
        for path in dict.fromkeys(part.name for part in parts):
            module = model.get_submodule(path) if path else model
            if not owns(module, weight):
                why = f"its own code looks the table {table} up, so no module returns what the extra embedding is added to"
                near_misses.append(NearMiss(path, why, "look tokens up with nn.Embedding"))
            elif not isinstance(module, SummedEmbedding):
                sites.append(Site(path, f"plus an embedding of {rows:,} × {width}"))
        if near_misses:  # tokens looked up at one place would have two representations
            return SumPlan((), tuple(near_misses))
        formula = f"V·d = {rows:,}·{width} = {rows * width:,}"
        return SumPlan(tuple(sites), new_parameters=rows * width, formula=formula, table=table, width=width)

    def apply(self, plan: SumPlan, edit: Edit) -> None:
        weight = edit.model.get_parameter(plan.table)
        extra = nn.Embedding(weight.shape[0], plan.width, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(extra.weight)
        for site in plan.sites:
            edit.replace_module(site.name, SummedEmbedding(edit.model.get_submodule(site.name), extra))
