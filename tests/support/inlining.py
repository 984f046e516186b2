"""Inlining: every part of a graph module becomes nodes of one flat graph, which computes the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from retrofit.emitted.graph_parts import GraphPart
from retrofit.errors import DoesNotFitError

Owner = fx.GraphModule | GraphPart
SHARED = "shared"


def release(owner: Owner, targets: Iterable[str]) -> None:
    """The owner no longer holds `targets` that its graph does not use, nor modules that held nothing else."""
    used = {str(node.target) for node in owner.graph.nodes if node.op in ("get_attr", "call_module")}
    for target in targets:
        if any(f"{one}.".startswith(f"{target}.") or f"{target}.".startswith(f"{one}.") for one in used):
            continue
        while target:
            path, _, leaf = target.rpartition(".")
            holder = module_at(owner, path)
            if holder is None:
                break
            for registry in (holder._modules, holder._parameters, holder._buffers):
                registry.pop(leaf, None)
            holder._non_persistent_buffers_set.discard(leaf)
            if type(holder) is not nn.Module or holder._modules or holder._parameters or holder._buffers:
                break
            target = path


def is_held_directly(owner: Owner, name: str, target: str) -> bool:
    """Whether the owner itself holds, under the same name, what is `target` in its part `name`."""
    path, _, leaf = target.rpartition(".")
    holder, inner = module_at(owner, path), module_at(owner, f"{name}.{path}".rstrip("."))
    if holder is None or inner is None:
        return False
    return leaf not in holder._modules and getattr(holder, leaf, None) is getattr(inner, leaf, holder)


def module_at(owner: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, None where there is none."""
    for piece in filter(None, path.split(".")):
        if piece not in owner._modules:
            return None
        owner = owner.get_submodule(piece)
    return owner


def inline_call(owner: Owner, call: fx.Node) -> None:
    """The call of a part becomes the nodes of the part's graph."""
    name = str(call.target)
    part = module_at(owner, name) if call.op == "call_module" else None
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
                    own = node.meta.get(SHARED, False) and is_held_directly(owner, name, str(node.target))
                    values[node].target = node.target if own else f"{name}.{node.target}"
    owner.graph.erase_node(call)
    if not any(node.op == "call_module" and f"{name}.".startswith(f"{node.target}.") for node in owner.graph.nodes):
        path, _, leaf = name.rpartition(".")
        owner.get_submodule(path)._modules[leaf] = plain_module(part)
        release(owner, [f"{name}.{node.target}" for node in part.graph.nodes if node.meta.get(SHARED, False)])


def inline_all(owner: Owner) -> None:
    """The graph module has no parts: it is one graph, with the weights under the names they had."""
    while call := next((node for node in owner.graph.nodes if is_part_call(owner, node)), None):
        inline_call(owner, call)
    recompile(owner)


def is_part_call(owner: Owner, node: fx.Node) -> bool:
    """Whether the node calls a part of the owner."""
    return node.op == "call_module" and isinstance(module_at(owner, str(node.target)), GraphPart)


def replace(call: fx.Node, result: Any) -> None:
    """Users of the call's value, or of its values one by one, use the result."""
    if isinstance(result, fx.Node):
        call.replace_all_uses_with(result)
        return
    for user in list(call.users):
        user.replace_all_uses_with(result[user.args[1]])
        user.graph.erase_node(user)


def plain_module(part: nn.Module) -> nn.Module:
    """A plain module with the children, parameters and buffers of the part."""
    plain = nn.Module()
    for registry in ("_modules", "_parameters", "_buffers"):
        getattr(plain, registry).update(getattr(part, registry))
    plain._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
    plain.training = part.training
    return plain


def recompile(owner: Owner) -> None:
    """The graph is without dead code, well-formed and compiled."""
    made = owner if isinstance(owner, fx.GraphModule) else fx.GraphModule(owner, owner.graph)
    made.graph.eliminate_dead_code()
    made.graph.lint()
    owner.recompile()
