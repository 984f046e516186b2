"""Inlining: every part of a graph module becomes nodes of one flat graph, which computes the same to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from retrofit.errors import DoesNotFitError
from retrofit.graphs.graph_parts import GraphPart

Owner = fx.GraphModule | GraphPart
SHARED = "shared"


def let_go(owner: Owner, targets: Iterable[str]) -> None:
    """The owner no longer holds what it handed over and does not use itself, nor modules that held nothing else."""
    used = {str(node.target) for node in owner.graph.nodes if node.op in ("get_attr", "call_module")}
    for target in targets:
        if any(f"{one}.".startswith(f"{target}.") or f"{target}.".startswith(f"{one}.") for one in used):
            continue
        while target:
            path, _, leaf = target.rpartition(".")
            holder = held_at(owner, path)
            if holder is None:
                break
            for registry in (holder._modules, holder._parameters, holder._buffers):
                registry.pop(leaf, None)
            holder._non_persistent_buffers_set.discard(leaf)
            if type(holder) is not nn.Module or holder._modules or holder._parameters or holder._buffers:
                break
            target = path


def held_too(owner: Owner, name: str, target: str) -> bool:
    """Whether the owner itself holds what is `target` in its part `name`, under that name."""
    path, _, leaf = target.rpartition(".")
    holder, inner = held_at(owner, path), held_at(owner, f"{name}.{path}".rstrip("."))
    if holder is None or inner is None:
        return False
    return leaf not in holder._modules and getattr(holder, leaf, None) is getattr(inner, leaf, holder)


def held_at(owner: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, None where there is none."""
    for piece in filter(None, path.split(".")):
        if piece not in owner._modules:
            return None
        owner = owner.get_submodule(piece)
    return owner


def dissolve(owner: Owner, call: fx.Node) -> None:
    """`inline`, but for the finish."""
    name = str(call.target)
    part = held_at(owner, name) if call.op == "call_module" else None
    if not isinstance(part, GraphPart):
        raise DoesNotFitError(f"{call.name} cannot be inlined", why="what it calls is no graph", remedy="choose the call of a part")
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(inputs, call.args, strict=True))
    with owner.graph.inserting_before(call):
        for node in part.graph.nodes:
            if node.op == "output":
                replace(call, fx.node.map_arg(node.args[0], values.__getitem__))
            elif node.op != "placeholder":
                values[node] = owner.graph.node_copy(node, values.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    own = node.meta.get(SHARED, False) and held_too(owner, name, str(node.target))
                    values[node].target = node.target if own else f"{name}.{node.target}"
    owner.graph.erase_node(call)
    if not any(node.op == "call_module" and f"{name}.".startswith(f"{node.target}.") for node in owner.graph.nodes):
        path, _, leaf = name.rpartition(".")
        owner.get_submodule(path)._modules[leaf] = holding(part)
        let_go(owner, [f"{name}.{node.target}" for node in part.graph.nodes if node.meta.get(SHARED, False)])


def inline_all(owner: Owner) -> None:
    """No part of the graph module is a graph module: it is one graph, with the weights under the names they had."""
    while call := next((node for node in owner.graph.nodes if calls_a_part(owner, node)), None):
        dissolve(owner, call)
    finish(owner)


def calls_a_part(owner: Owner, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(held_at(owner, str(node.target)), GraphPart)


def replace(call: fx.Node, result: Any) -> None:
    """What read the call's value, or its values one by one, reads the result."""
    if isinstance(result, fx.Node):
        call.replace_all_uses_with(result)
        return
    for user in list(call.users):
        user.replace_all_uses_with(result[user.args[1]])
        user.graph.erase_node(user)


def holding(part: nn.Module) -> nn.Module:
    """A plain module that holds what the part held."""
    plain = nn.Module()
    for registry in ("_modules", "_parameters", "_buffers"):
        getattr(plain, registry).update(getattr(part, registry))
    plain._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
    plain.training = part.training
    return plain


def finish(owner: Owner) -> None:
    """The graph is without dead code, well-formed, and what runs."""
    made = owner if isinstance(owner, fx.GraphModule) else fx.GraphModule(owner, owner.graph)
    made.graph.eliminate_dead_code()
    made.graph.lint()
    owner.recompile()
