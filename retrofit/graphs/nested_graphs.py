"""Parts of an exported program that are graphs of their own: code under `torch.no_grad`, or with autocast switched off."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from retrofit.errors import CaptureError
from retrofit.program.aten_ops import op
from retrofit.program.autograd_annotations import NO_GRAD, annotation

GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled  # (enabled, graph, *arguments)
AUTOCAST = torch.ops.higher_order.wrap_with_autocast  # (device type, dtype, enabled, with a cache, graph, *arguments)


def inline_nested_graphs(module: fx.GraphModule) -> None:
    """The graph of `module` holds the operations of its nested graphs, annotated where gradients are switched off.

    Raises `CaptureError` for other operations that run a graph of their own.
    """
    for node in list(module.graph.nodes):
        if node.target is GRADIENTS:
            enabled, holder, *arguments = node.args
            inline(module, node, holder, arguments, {NO_GRAD: not enabled})
        elif node.target is AUTOCAST and not node.args[2]:
            inline(module, node, node.args[4], node.args[5:], {})
    holder = next((user for node in module.graph.nodes if node.op == "get_attr" for user in node.users), None)
    if holder is not None:
        raise CaptureError(
            "the program cannot be made a graph of modules",
            why=f"{op(holder)} runs a part of it as a graph of its own",
            remedy="export the model without that operation",
        )
    module.recompile()


def inline(module: fx.GraphModule, node: fx.Node, holder: fx.Node, arguments: Any, annotations: dict[str, Any]) -> None:
    """The operations of the graph that `holder` names replace `node`, which calls it, and have the annotations."""
    nested = module.get_submodule(str(holder.target))
    assert isinstance(nested, fx.GraphModule)
    inline_nested_graphs(nested)
    placeholders = [one for one in nested.graph.nodes if one.op == "placeholder"]
    copies = dict(zip(placeholders, arguments, strict=True))
    with module.graph.inserting_before(node):
        results: Any = module.graph.graph_copy(nested.graph, copies)
    for original, copied in copies.items():
        if original.op != "placeholder" and annotation(copied, NO_GRAD) is None:
            copied.meta["custom"] = (copied.meta.get("custom") or {}) | annotations
    for user in list(node.users):  # each takes one of the results
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not holder.users:
        module.graph.erase_node(holder)
