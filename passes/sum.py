"""Sum: adds an extra embedding to the token representation, the simplest way to spend parameters on an external memory.

    x = E[id] + S[id]        E: [V, d] the dense table   S: [V, d] `extra`, zero at the start

The baseline of AltUp, Alternating Updates for Efficient Transformers (NeurIPS 2023), supplement, Table 7, and of the earlier paper
on external memory, Table 1.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Observed,
    Pass,
    Plan,
    Problems,
    Site,
    SiteCall,
    Wrapper,
    argument_at,
    argument_place,
    map_first,
)
from retrofit.sdk.program import shape


def summed_embedding(call: SiteCall) -> Tensor:
    """Return E[id] + S[id]; E[id] for an id without a row in S."""
    module: Any = call.module
    ids = call.argument(module.place)
    y = call.given("layer", {module.place: ids}, 0)
    table = module.extra.weight
    rows = [table[id] if id < len(table) else torch.zeros_like(table[0]) for id in ids.flatten().tolist()]
    return y + torch.stack(rows).view(*ids.shape, -1)


def start(observed: Observed) -> Problems:
    """Check that S starts at zero."""
    for site in observed.sites:
        if bool(site.module.extra.weight.any()):  # type: ignore[union-attr,operator]
            yield site.path, "the extra embedding does not begin at zero"


class SummedEmbedding(Wrapper):
    """The output of the token embedding `layer` plus the row of `extra` for each id; none for ids added later."""

    def __init__(self, layer: nn.Module, extra: nn.Embedding) -> None:
        super().__init__(layer)
        self.extra = extra
        self.place = argument_place(layer, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ids = argument_at(self.place, args, kwargs)
        return map_first(self.layer(*args, **kwargs), lambda y: y + self.look_up(ids).to(y.dtype))

    def look_up(self, ids: Tensor) -> Tensor:
        rows = len(self.extra.weight)
        if all(len(parameter) <= rows for parameter in self.layer.parameters()):
            return self.extra(ids)  # type: ignore[no-any-return]
        return F.embedding(ids.clamp(max=rows - 1), self.extra.weight) * (ids < rows).unsqueeze(-1)


class SummedTable(SummedEmbedding, nn.Embedding):
    """A summed embedding whose `layer` is an `nn.Embedding`, and which is one too, with the table, sizes and padding of `layer`.

    Setting `num_embeddings`, as `resize_token_embeddings` does, resizes the extra embedding too; new rows are zero.
    """

    def __init__(self, layer: nn.Embedding, extra: nn.Embedding) -> None:
        nn.Module.__init__(self)  # `nn.Embedding.__init__` would create a table; `layer` has it
        self.layer, self.extra = layer, extra
        self.place = argument_place(layer, 0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", *nn.Embedding.__constants__):
            setattr(self.layer, name, value)
        else:
            super().__setattr__(name, value)
        if name == "num_embeddings":
            resize(self.extra, value)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not torch.compiler.is_compiling() and reads_past(sys._getframe(1)):
            self.require_no_extra()
        return super().__getattr__(name)

    def require_no_extra(self) -> None:
        """Raise `DoesNotFitError` unless the extra embedding is zero: PEFT looks up tokens that it trains in the table alone."""
        extra = self.extra.weight
        if not extra.is_meta and bool(extra.any()):
            raise DoesNotFitError(
                "PEFT cannot train single tokens (trainable_token_indices) of a table with a non-zero extra embedding",
                why="it reads the table without the extra embedding",
                remedy='adapt the whole table: target_modules=["embed_tokens"] or modules_to_save=["embed_tokens"]',
                code="single-tokens",
            )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def reads_past(reader: FrameType) -> bool:
    """Return whether the reader of the table is PEFT's layer that looks up tokens itself and never calls the embedding."""
    peft = sys.modules.get("peft.tuners.trainable_tokens.layer")
    return peft is not None and isinstance(reader.f_locals.get("self"), peft.TrainableTokensLayer)


def resize(table: nn.Embedding, rows: int) -> None:
    """Resize `table` to `rows` rows: the last rows are dropped, new ones are zero."""
    weight = table.weight.data
    if len(weight) != rows:
        table.weight.data = F.pad(weight[:rows], (0, 0, 0, max(0, rows - len(weight))))
        table.num_embeddings = rows


def summed(layer: nn.Module, extra: nn.Embedding) -> SummedEmbedding:
    """Return the module that replaces the token embedding `layer`."""
    return SummedTable(layer, extra) if isinstance(layer, nn.Embedding) else SummedEmbedding(layer, extra)


def owns(module: nn.Module, weight: nn.Parameter) -> bool:
    """Return whether the weight is the module's own parameter, or the only parameter in it, under any name."""
    return any(parameter is weight for parameter in module.parameters(recurse=False)) or {*map(id, module.parameters())} == {
        id(weight)
    }


def other_holders(model: nn.Module, weight: nn.Parameter, sites: Sequence[Site]) -> list[str]:
    """Return the paths of embeddings outside the sites that hold the token table, as those of models that set it in two stacks."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = tuple(f"{owner}." for owner in (*(site.name for site in sites), *found))  # a summed table has its own embedding
        if isinstance(module, nn.Embedding) and module.weight is weight and not f"{path}.".startswith(inside):
            found.append(path)
    return found


@dataclasses.dataclass(frozen=True)
class SumPlan(Plan):
    """The token table and the modules that look it up."""

    table: str = ""  # name of the parameter
    width: int = 0  # d


@dataclasses.dataclass(frozen=True)
class SumEmbedding(Pass[SumPlan]):
    """Adds a second, zero-initialized embedding to the token representation: V·d parameters."""

    name: ClassVar[str] = "sum"
    summary: ClassVar[str] = "add an extra embedding to the token representation (the papers' Sum baseline)"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, Table 7"
    rewrites: ClassVar[str] = "token embedding"
    exact = True
    reference: ClassVar[MethodReference] = MethodReference(
        {SummedEmbedding: ModuleReference(summed_embedding, ("layer",))}, start=start
    )
    remedy: ClassVar[str] = "apply it to a model of text; altup(embedding=recycled) widens any stream"
    way_around: ClassVar[str] = "its own code may depend on the stream's width: try altup(embedding=recycled)"

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def plan(self, anatomy: Anatomy) -> SumPlan:
        if anatomy.embedding is None:
            why = "it looks up no token embedding: its inputs are not token ids"
            return SumPlan((), (NearMiss("", why, in_any_form=True, code="missing"),))
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
                why = f"its own code looks up the table {table}, so no module returns the embeddings alone"
                near_misses.append(NearMiss(path, why, "look tokens up with nn.Embedding", code="no-owner"))
            elif not isinstance(module, SummedEmbedding):
                sites.append(Site(path, f"plus an embedding of {rows:,} × {width}"))
        if near_misses:  # otherwise tokens would have two representations
            return SumPlan((), tuple(near_misses))
        formula = f"V·d = {rows:,}·{width} = {rows * width:,}"
        return SumPlan(tuple(sites), new_parameters=rows * width, formula=formula, table=table, width=width)

    def apply(self, plan: SumPlan, edit: Edit) -> None:
        weight = edit.model.get_parameter(plan.table)
        extra = nn.Embedding(weight.shape[0], plan.width, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(extra.weight)
        for path in (*(site.name for site in plan.sites), *other_holders(edit.model, weight, plan.sites)):
            edit.replace_module(path, summed(edit.model.get_submodule(path), extra))
