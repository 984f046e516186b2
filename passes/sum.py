"""Sum: an extra embedding is added to the token representation, the plainest way to spend parameters on an external memory.

    x = E[id] + S[id]        E: [V, d] the dense table   S: [V, d] `extra`, zero at the start

The baseline that AltUp is measured against: Alternating Updates for Efficient Transformers (NeurIPS 2023), supplement, Table 7, and
the paper on external memory before it, Table 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk import Anatomy, DoesNotFitError, Edit, Pass, Rewrite, Site, Wrapper, argument_place, find_argument, map_first


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
        if max(map(len, self.layer.parameters()), default=0) <= rows:
            return self.extra(ids)  # type: ignore[no-any-return]
        return F.embedding(ids.clamp(max=rows - 1), self.extra.weight) * (ids < rows).unsqueeze(-1)


def owns(module: nn.Module, weight: nn.Parameter) -> bool:
    """Whether the weight is the module's own parameter, or all the parameters it has, under whatever names."""
    return any(one is weight for one in module.parameters(recurse=False)) or {*map(id, module.parameters())} == {id(weight)}


@dataclasses.dataclass(frozen=True)
class SumEmbedding(Pass):
    """Add a second, zero-initialised embedding to the token representation: V·d parameters."""

    name: ClassVar[str] = "sum"
    summary: ClassVar[str] = "add an extra embedding to the token representation (the papers' Sum baseline)"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, Table 7"

    @property
    def exact(self) -> bool:
        return True

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        if anatomy.embedding is None:
            raise DoesNotFitError(
                "sum: the model looks up no token embedding",
                why="its inputs are no token ids",
                remedy="apply it to a model of text; altup(embedding=recycled) widens any stream",
            )
        model, table = anatomy.model, anatomy.embedding.parameter
        nodes = anatomy.flow.named
        parts = [part for part in anatomy.embeddings if part.parameter == table]
        width = nodes[parts[0].node].meta["val"].shape[-1]
        weight = model.get_parameter(table)
        extra = nn.Embedding(weight.shape[0], int(width), device=weight.device, dtype=weight.dtype)
        torch.nn.init.zeros_(extra.weight)
        sites = []
        for path in dict.fromkeys(part.name for part in parts):
            module = model.get_submodule(path) if path else model
            if not owns(module, weight):
                raise DoesNotFitError(
                    f"sum: the table {table} is looked up in the code of {path or 'the model'} itself",
                    why="no module stands there whose output the extra embedding could be added to",
                    remedy="look tokens up with nn.Embedding",
                )
            if not isinstance(module, SummedEmbedding):
                edit.replace_module(path, SummedEmbedding(module, extra))
                sites.append(Site(path, f"plus an embedding of {weight.shape[0]:,} × {width}"))
        count = extra.weight.numel()
        return Rewrite(
            self.spec(), True, tuple(sites), new_parameters=count, formula=f"V·d = {weight.shape[0]:,}·{width} = {count:,}"
        )
