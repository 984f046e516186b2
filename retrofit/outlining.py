"""Outlining and inlining: nodes of a graph become a module of their own, and a module that is a graph becomes nodes again.

Both are done in place, leave the function as it is to the last bit, and leave a graph that torch's linter accepts, its nodes with
the shapes, dtypes and source lines they had. Weights keep their names: what an inlined part `layers.3.ffn` held is still held
there, and a part takes over what lies under its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import fx, nn

from retrofit.errors import DoesNotFitError
from retrofit.graph_module import GraphPart, attach, getitem, register

Owner = fx.GraphModule | GraphPart
SHARED = "shared"  # of a part's weight: the owner had it under the same name, and holds it still


def outline(owner: Owner, nodes: Iterable[fx.Node], name: str) -> fx.Node:
    """`nodes` are the part `name` of the graph module that they stood in; its call is returned.

    Weights that they read come with them. Raises `DoesNotFitError`, before anything is changed, where no one call can stand for
    the nodes.
    """
    chosen = dict.fromkeys(node for node in owner.graph.nodes if node in set(nodes))
    later = computed_from(owner.graph, chosen)
    at_the_door(owner, chosen, later, name)
    entered = list(dict.fromkeys(one for node in chosen for one in node.all_input_nodes if one not in chosen and not is_held(one)))
    left = [node for node in chosen if any(user not in chosen for user in node.users)]
    read = {str(one.target) for node in chosen for one in (node, *node.all_input_nodes) if one.op in ("get_attr", "call_module")}
    part = made_of(owner, chosen, entered, left, name)
    start, end = next(iter(chosen)), next(reversed(chosen))
    for node in stretch(owner.graph, start, end):  # what stands among them without reading them comes before them
        if node not in chosen and node not in later:
            start.prepend(node)
    with owner.graph.inserting_before(start):
        call = owner.graph.create_node("call_module", name, tuple(entered), {}, name=f"from_{name.rpartition('.')[2]}")
        whole = len(left) == 1
        values = [call if whole else owner.graph.call_function(getitem, (call, place)) for place in range(len(left))]
    for node, value in zip(left, values, strict=True):
        value.meta = dict(node.meta)
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in chosen)
    for node in reversed(chosen):
        owner.graph.erase_node(node)
    attach(owner, name, GraphPart.of(part))
    for module in owner.get_submodule(name).modules():
        module.training = owner.training if type(module) is nn.Module or isinstance(module, GraphPart) else module.training
    finish(owner)
    let_go(owner, (target for target in read if not target.startswith(f"{name}.")))
    for node in owner.get_submodule(name).graph.nodes:  # type: ignore[union-attr]
        node.meta[SHARED] = is_held(node) and held_too(owner, name, str(node.target))
    return call


def at_the_door(owner: Owner, chosen: Collection[fx.Node], later: Collection[fx.Node], name: str) -> None:
    """One call can stand for the nodes."""
    what = f"these nodes cannot become the part {name!r}"
    if not chosen or not any(user not in chosen for node in chosen for user in node.users):
        raise DoesNotFitError(what, why="nothing reads them", remedy="choose nodes whose values are used")
    odd = next((node for node in chosen if node.op not in ("call_function", "call_module")), None)
    if odd is not None:
        raise DoesNotFitError(what, why=f"{odd.name} is no operation but a {odd.op}", remedy="leave it out: weights come along")
    for node in chosen:
        between = next((one for one in node.all_input_nodes if one in later), None)
        if between is not None:
            why = f"{node.name} reads {between.name}, which is computed from others of them and is none of them"
            raise DoesNotFitError(what, why=why, remedy=f"take {between.name} in, or leave {node.name} out")
    present = held_at(owner, name)
    if present is not None and type(present) is not nn.Module:
        raise DoesNotFitError(what, why=f"there is a {type(present).__name__} of that name", remedy="choose another name")


def computed_from(graph: fx.Graph, chosen: Collection[fx.Node]) -> set[fx.Node]:
    """What is computed from the chosen nodes and is none of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in chosen and any(one in chosen or one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def stretch(graph: fx.Graph, start: fx.Node, end: fx.Node) -> list[fx.Node]:
    """The nodes from `start` to `end`."""
    nodes = list(graph.nodes)
    return nodes[nodes.index(start) : nodes.index(end) + 1]


def is_held(node: fx.Node) -> bool:
    """Whether the node is a parameter or buffer."""
    return node.op == "get_attr"


def made_of(owner: Owner, chosen: Iterable[fx.Node], entered: list[fx.Node], left: list[fx.Node], name: str) -> fx.GraphModule:
    """The chosen nodes as a graph module from what enters them to what leaves them."""
    root, graph = nn.Module(), fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in inside:
            inside[node] = graph.node_copy(node, value)
            if node.op in ("get_attr", "call_module"):
                inside[node].target = hand_over(owner, root, str(node.target), name)
        return inside[node]

    for node in entered:
        inside[node] = graph.placeholder(node.name)
        inside[node].meta = dict(node.meta)
    for node in chosen:
        value(node)
    results = tuple(inside[node] for node in left)
    graph.output(results[0] if len(results) == 1 else results)
    graph.lint()
    part = fx.GraphModule(root, graph, "Part")
    for path, module in root.named_modules():  # a graph module takes every buffer for one that is saved
        if module._non_persistent_buffers_set:
            part.get_submodule(path)._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return part


def hand_over(owner: Owner, root: nn.Module, target: str, name: str) -> str:
    """The name in `root` of what is `target` in `owner`, which it holds too."""
    inner = target.removeprefix(f"{name}.")
    path, _, leaf = target.rpartition(".")
    holder = owner.get_submodule(path)
    if leaf in holder._modules:
        attach(root, inner, holder.get_submodule(leaf))
    else:
        register(root, inner, getattr(holder, leaf), leaf not in holder._non_persistent_buffers_set)
    return inner


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


def inline(owner: Owner, call: fx.Node) -> None:
    """The part that `call` calls stands as nodes in its place, its weights under the names they had.

    What it shares with its owner since it was outlined is the owner's again.
    """
    dissolve(owner, call)
    finish(owner)


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
