"""Markers: nodes in a trace that record which tensor enters and leaves which module call.

While a model is traced, hooks put one on each tensor that a submodule receives or returns. Nothing reads them; they go through all
that happens to the graph, as operations that must be kept do. Afterwards they are removed again, and what they marked becomes the
inputs and outputs of the calls, and what the code left in the attributes of its module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from retrofit.program.module_stacks import innermost_call
from retrofit.program.program import Call, Key

KEPT = "attribute "  # before the name, in a marker of what a call left in its module


class Marker:
    """Marks the tensors on one side of one call."""

    def __init__(self, call: int, leaves: bool) -> None:
        self.call, self.leaves = call, leaves
        self.marked: dict[int, torch.Tensor] = {}  # by the identity of the tensor

    def mark(self, item: Any, key: Key) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if add_marker(item, self.call, self.leaves, repr(key)):
            return item
        if id(item) not in self.marked:  # once: modules compare arguments with `is`
            self.marked[id(item)] = torch.ops.retrofit.mark(item, self.call, self.leaves, repr(key))
        return self.marked[id(item)]

    def mark_all(self, value: Any) -> Any:
        """`value` with a marker on every tensor in it, one level of tuple, list or mapping deep."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.mark(item, position) for position, item in enumerate(value)))
        if isinstance(value, (tuple, list)):
            return type(value)(self.mark(item, position) for position, item in enumerate(value))
        if isinstance(value, MutableMapping):
            for key in list(value):
                if isinstance(value[key], torch.Tensor):
                    value[key] = self.mark(value[key], key)
            return value
        return self.mark(value, None)


def add_marker(item: torch.Tensor, *how: Any) -> bool:
    """The graph that is being traced has a marker of `item`, where the trace knows the node of it; returns whether it does.

    The node alone, not the operation: a dispatch under fake tensors takes longer than everything else that is done for a call.
    """
    mode = get_proxy_mode()
    tracked = None if mode is None else get_proxy_slot(item, mode.tracer, None)
    if mode is None or tracked is None:  # a constant, or a tensor inside a functional transform
        return False
    source = tracked.proxy.node  # type: ignore[attr-defined]
    marker = mode.tracer.create_node("call_function", torch.ops.retrofit.mark.default, (source, *how), {})
    marker.meta["val"] = source.meta["val"]
    return True


@contextlib.contextmanager
def mark_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Within this context every call of a submodule of `model` is recorded, and its tensors are marked."""
    calls = [Call("", 0, 0, None)]
    stack = [calls[0]]
    held: list[dict[str, torch.Tensor]] = []  # the attributes of the modules on the stack when they were called
    counts: dict[str, int] = {}
    handles: list[Any] = []
    names = [(module, set(vars(module))) for module in model.modules()]
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    other_names = {first: tuple(others) for first, *others in paths.values()}

    def before(path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call(path, counts.get(path, 0), len(calls), stack[-1], other_names.get(path, ()))
            counts[path] = call.index + 1
            calls.append(call)
            stack.append(call)
            held.append(tensor_attributes(module))
            marker = Marker(call.number, leaves=False)
            return marker.mark_all(tuple(args)), marker.mark_all(dict(kwargs))

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call, before = stack.pop(), held.pop()
        for name, value in tensor_attributes(module).items():
            if value is not before.get(name):
                add_marker(value, call.number, True, KEPT + name)
        return Marker(call.number, leaves=True).mark_all(output)

    try:
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for module, known in names:  # `torch.export` restores what was there before, and leaves what is new: tensors of the trace
            for name in tensor_attributes(module).keys() - known:
                delattr(module, name)


def tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that the module holds past its parameters and buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def restore_users(graph: fx.Graph) -> None:
    """Every node knows its users again: `torch.export` clears those of the result of a region under `no_grad`."""
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            operand.users.setdefault(node)


def remove_markers(graph: fx.Graph, calls: list[Call]) -> dict[fx.Node, Call]:
    """The graph has no markers and the calls have their inputs and outputs; returns the innermost call of every node."""
    owner: dict[fx.Node, Call] = {}
    mark = torch.ops.retrofit.mark.default
    by_path = CallsByPath(calls)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        if node.target is mark:
            source, number, leaves, key = node.args
            call = calls[number]
            if not leaves:
                by_path.under_way[call.path] = call
            if key.startswith(KEPT):
                call.kept[key.removeprefix(KEPT)] = source
            else:
                (call.outputs if leaves else call.inputs).setdefault(parse_key(key), source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        owner[node] = innermost_call(node, by_path, calls[0])
    return owner


class CallsByPath(dict[tuple[str, int], Call]):
    """Calls by path and index; of a module with several paths, whose calls the tracer counts by path, the one under way."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__({(call.path, call.index): call for call in calls})
        self.first = {path: call.path for call in calls if call.names for path in (call.path, *call.names)}
        self.under_way: dict[str, Call] = {}  # by the first path of a module: the call that began last, in the order of the trace

    def get(self, key: tuple[str, int], default: Any = None) -> Any:
        return self.under_way.get(self.first.get(key[0], "")) or super().get(key, default)


def parse_key(text: str) -> Key:
    """The key that a marker holds as its `repr`."""
    if text == "None":
        return None
    return int(text) if text.lstrip("-").isdigit() else text[1:-1]
