"""The example of its inputs that an exported program carries, with token ids that differ from one another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from retrofit.runtime.probes import is_numbering, is_per_token, is_token_ids

CASTS = ("_to_copy", "to", "clone", "alias", "_assert_tensor_metadata")


def example_tensors(exported: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """The tensors among the program's example inputs, by name.

    Programs are often exported on zeros, ones or counted ids. Nothing can be measured on these, so ids are drawn for them.
    """
    args, kwargs = exported.example_inputs or ((), {})
    named = zip(exported.graph_signature.user_inputs, tree_leaves((args, kwargs)), strict=False)
    held = {name: value for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}
    return held if any(map(is_token_ids, held.values())) else held | drawn_ids(exported, held)


def drawn_ids(exported: torch.export.ExportedProgram, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids for the inputs by which the program looks up its largest table; a numbering is taken for positions beside others."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    rows = {name: max(table_rows(nodes[name]), default=0) for name, value in held.items() if is_per_token(value) and name in nodes}
    tables = {name: count for name, count in rows.items() if count}
    tables = {name: count for name, count in tables.items() if not is_numbering(held[name])} or tables
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(count, held[name].shape, generator=generator).to(held[name])
        for name, count in tables.items()
        if count == max(tables.values())
    }


def table_rows(ids: fx.Node) -> Iterator[int]:
    """How many rows each table has that is looked up by `ids` or a copy of them."""
    for user in ids.users:
        name = getattr(user.target, "_opname", "")
        if name == "embedding" and user.args[1] is ids:
            rows = user.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
            yield from [rows] if isinstance(rows, int) else []
        elif name in CASTS:
            yield from table_rows(user)
