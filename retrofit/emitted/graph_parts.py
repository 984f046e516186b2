"""The pieces of graph modules: modules with a graph, the functions that it calls, names in a tree of modules, structural equality.

Two graphs are structurally equal if they have the same operations in the same order, on the same weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import DoesNotFitError


class Graph(fx.GraphModule):
    """A graph module whose copies have all its attributes: config, examples, what was rewritten."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        new: Graph = super().__deepcopy__(memo)  # type: ignore[assignment]
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key not in new.__dict__})
        return new


class GraphPart(nn.Module):
    """A part of a graph module: a module with a `graph`, which a second capture sees as a module like any other.

    `torch.export` inlines a `GraphModule` inside a model into the code around it.
    """

    graph: fx.Graph

    @staticmethod
    def of(made: fx.GraphModule) -> GraphPart:
        """Return a part with the graph and the state of a graph module."""
        kind = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        part: GraphPart = kind()
        for registry in ("_modules", "_parameters", "_buffers"):
            getattr(part, registry).update(getattr(made, registry))
        part._non_persistent_buffers_set = set(made._non_persistent_buffers_set)
        part.graph = made.graph
        return part

    def recompile(self) -> None:
        """`forward` is compiled from `graph` again."""
        made = fx.GraphModule(self, self.graph)
        self.__class__ = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        self.graph = made.graph

    def __reduce__(self) -> Any:
        return GraphPart.of, (fx.GraphModule(self, self.graph),)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPart:
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return new


# ── Functions that graphs call ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_sizes(value: Tensor, name: str, sizes: tuple[int | None, ...], largest: tuple[int | None, ...] = ()) -> Tensor:
    """Return the argument called `name`; raise `DoesNotFitError` where it differs from a fixed size or exceeds the largest."""
    for dim, size in enumerate(sizes):
        if size is not None and value.shape[dim] != size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"this graph takes {size} there: the model's code fixed it when it was captured",
                remedy="give inputs of that size, or capture the model again: with dynamic sizes, or example_inputs= of that size",
                code="size",
                site=name,
            )
    for dim, size in enumerate(largest):
        if size is not None and value.shape[dim] > size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"this graph takes at most {size} there, as what it was made from does",
                remedy="give a smaller input",
                code="size",
                site=name,
            )
    return value


def mask_or_ones(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Return the mask, or ones where there is none."""
    return torch.ones_like(ids) if mask is None else mask


def getitem(values: Any, index: int) -> Any:
    """`values[index]`."""
    return values[index]


# ── Names in a tree of modules ────────────────────────────────────────────────────────────────────────────────────────────────────


def register_tensor(root: nn.Module, name: str, value: Tensor, saved: bool = True) -> None:
    """`value` is the parameter or buffer called `name` of `root`; plain modules are added for the path to it."""
    path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, path.split(".")):
        if not isinstance(getattr(owner, piece, None), nn.Module):
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    elif leaf not in owner._buffers:
        owner.register_buffer(leaf, value, persistent=saved)


def attach_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """`module` is the submodule `name` of `root`, and holds also what the module there held before."""
    owner_path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, owner_path.split(".")):
        if piece not in owner._modules:
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    present = owner._modules.get(leaf)
    owner.add_module(leaf, module)
    if present is not None and present is not module:  # what the region around reads of that module
        merge_module(present, module)


def merge_module(held: nn.Module, module: nn.Module) -> None:
    """`module` holds also what `held` holds."""
    for registry in ("_parameters", "_buffers"):
        getattr(module, registry).update(getattr(held, registry))
    module._non_persistent_buffers_set |= held._non_persistent_buffers_set
    for name, child in held.named_children():
        if name in module._modules:
            merge_module(child, module.get_submodule(name))
        else:
            module.add_module(name, child)


# ── Structural equality ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_structurally_equal(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules compute the same function of their arguments on the same parameters."""
    graph, its_graph = getattr(module, "graph", None), getattr(other, "graph", None)
    if not (isinstance(graph, fx.Graph) and isinstance(its_graph, fx.Graph)):
        return type(module) is type(other) and not module.state_dict() and getattr(module, "p", None) == getattr(other, "p", None)
    ours, theirs = list(graph.nodes), list(its_graph.nodes)
    places = {node: number for nodes in (ours, theirs) for number, node in enumerate(nodes)}
    return len(ours) == len(theirs) and all(
        mine.op == its.op
        and describe_arguments(mine, places) == describe_arguments(its, places)
        and have_same_target(module, mine, other, its)
        for mine, its in zip(ours, theirs, strict=True)
    )


def describe_arguments(node: fx.Node, places: dict[fx.Node, int]) -> str:
    """Return the arguments of a node as text, its operands by their positions in the graph."""
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: f"node {places[operand]}"))


def have_same_target(module: nn.Module, mine: fx.Node, other: nn.Module, its: fx.Node) -> bool:
    """Return whether two nodes call the same function or equal modules, or read the same tensor."""
    if mine.op == "get_attr":
        return is_same_tensor(attribute(module, str(mine.target)), attribute(other, str(its.target)))
    if mine.op == "call_module":
        return is_structurally_equal(module.get_submodule(str(mine.target)), other.get_submodule(str(its.target)))
    return mine.op in ("placeholder", "output") or mine.target is its.target


def is_same_tensor(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the tensors are the same parameter, or constants with the same values."""
    if tensor is other or isinstance(tensor, nn.Parameter) or isinstance(other, nn.Parameter):
        return tensor is other
    return (tensor.dtype, tensor.device, tensor.shape) == (other.dtype, other.device, other.shape) and torch.equal(tensor, other)


def attribute(module: nn.Module, name: str) -> Any:
    """Return the attribute at a dotted name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)
