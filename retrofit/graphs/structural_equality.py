"""Structural equality of graphs: the same operations in the same order, on the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn


def is_structurally_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules compute the same function of their arguments on the same parameters: equal graphs, or equal dropouts."""
    graph, its_graph = getattr(one, "graph", None), getattr(other, "graph", None)
    if not (isinstance(graph, fx.Graph) and isinstance(its_graph, fx.Graph)):
        return type(one) is type(other) and not one.state_dict() and getattr(one, "p", None) == getattr(other, "p", None)
    ours, theirs = list(graph.nodes), list(its_graph.nodes)
    places = {node: number for nodes in (ours, theirs) for number, node in enumerate(nodes)}
    return len(ours) == len(theirs) and all(
        mine.op == its.op
        and describe_arguments(mine, places) == describe_arguments(its, places)
        and have_same_target(one, mine, other, its)
        for mine, its in zip(ours, theirs, strict=True)
    )


def describe_arguments(node: fx.Node, places: dict[fx.Node, int]) -> str:
    """The arguments of a node as text, its operands by their positions in the graph."""
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: f"node {places[operand]}"))


def have_same_target(one: nn.Module, mine: fx.Node, other: nn.Module, its: fx.Node) -> bool:
    """Whether two nodes call the same function or equal modules, or read the same tensor."""
    if mine.op == "get_attr":
        return is_same_tensor(attribute(one, str(mine.target)), attribute(other, str(its.target)))
    if mine.op == "call_module":
        return is_structurally_equal(one.get_submodule(str(mine.target)), other.get_submodule(str(its.target)))
    return mine.op in ("placeholder", "output") or mine.target is its.target


def is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether the tensors are the same parameter, or constants with the same values."""
    if one is other or isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter):
        return one is other
    return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape) and torch.equal(one, other)


def attribute(module: nn.Module, name: str) -> Any:
    """The attribute at a dotted name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)
