"""Operations that write into what they read become ones that give a new value.

`torch` can do that for any program, by tracing it once more, which takes long. Here every operation is gone through once, in order,
knowing what each value that shares memory with a written one has become by then: what is read later is read from there, a view is
had anew, and what was written into a view is put back into what it is a view of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from retrofit.program.aten_ops import ACTIVATION, ATTENTION, CONVOLUTION, NORM, PRODUCT, op

aten: Any = torch.ops.aten
ANEW = (PRODUCT | CONVOLUTION | ATTENTION | NORM | ACTIVATION) - {"einsum"}  # an einsum of one operand may only turn it
# What gives what a view is one of: an operation and its operands, from that as it was, the view as it is, the view's other ones.
PutBack = Callable[..., tuple[Any, tuple[Any, ...]]]
PUT_BACK: dict[Any, PutBack] = {
    aten.slice.Tensor: lambda base, part, *how: (aten.slice_scatter.default, (base, part, *how)),
    aten.select.int: lambda base, part, *how: (aten.select_scatter.default, (base, part, *how)),
    aten.diagonal.default: lambda base, part, *how: (aten.diagonal_scatter.default, (base, part, *how)),
    aten.transpose.int: lambda base, part, *how: (aten.transpose.int, (part, *how)),
    aten.t.default: lambda base, part: (aten.t.default, (part,)),
    aten.permute.default: lambda base, part, order: (aten.permute.default, (part, back_from(order))),
    aten.unsqueeze.default: lambda base, part, dim: (aten.squeeze.dim, (part, dim)),
}
VMAP = "torch._functorch.predispatch"  # where the operations are that begin a vmap and end it
VIEWS = {*PUT_BACK, aten.view.default, aten.expand.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}


class UnknownError(Exception):
    """What a value has become by now is not known."""


def mutates(node: fx.Node) -> bool:
    """Whether the operation writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functionalize(graph: fx.Graph) -> bool:
    """Whether no operation of the graph writes into an operand, now.

    Where one writes into an input or a weight, or into memory that a value read later may or may not share, the graph is left as
    it is. So is one with a `vmap` in it, which hangs on the order of its operations.
    """
    if any(getattr(node.target, "__module__", "") == VMAP for node in graph.nodes):
        return False
    trial = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copied[node] = trial.node_copy(node, copied.__getitem__)
    try:
        Aliasing(trial).run()
    except UnknownError:
        return False
    Aliasing(graph).run()
    return True


class Aliasing:
    """What the values of a graph are by now, while its operations are gone through."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sharing: dict[fx.Node, set[fx.Node]] = {}  # with which others a value shares its memory, or may
        self.base: dict[fx.Node, fx.Node] = {}  # what a view is one of
        self.same: dict[fx.Node, fx.Node] = {}  # into what the operation wrote that gives this
        self.now: dict[fx.Node, fx.Node | None] = {}  # what it is now, if another; None where that is to be had anew
        self.made: list[fx.Node] = []

    def run(self) -> None:
        """No operation writes into an operand; raises `UnknownError` half way, where some value is not known."""
        for node in list(self.graph.nodes):
            sources = node.all_input_nodes
            for source in sources:
                value = self.current(source, node)
                if value is not source:
                    node.replace_input_with(source, value)
            if mutates(node):
                self.write(node, sources)
            elif node.op == "call_function" and may_share(node) and holds_tensors(node):
                self.share(node, sources)
                if node.target in VIEWS:
                    self.base[node] = sources[0]
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)

    def current(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """What the value is by now, for a reader."""
        if node in self.same:
            return self.current(self.same[node], reader)
        value = self.now.get(node, node)
        if value is None:
            if node not in self.base:
                raise UnknownError
            base = self.current(self.base[node], reader)
            with self.graph.inserting_before(reader):
                value = self.graph.call_function(node.target, (base, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
            value.meta = dict(node.meta)
            self.made.append(value)
            self.now[node] = value
        return value

    def share(self, node: fx.Node, others: list[fx.Node]) -> None:
        """The value may lie in the memory of others."""
        family = {node}.union(*(self.sharing.get(one, {one}) for one in others if holds_tensors(one)))
        for one in family:
            self.sharing[one] = family

    def write(self, node: fx.Node, sources: list[fx.Node]) -> None:
        """The operation gives a new value, which what it wrote into is by now, and all that shares its memory is to be had anew."""
        written, other = sources[0], without_writing(node)
        family = self.sharing.get(written, {written})
        if other is None or any(one.op != "call_function" for one in family):
            raise UnknownError
        node.target = other
        before = self.levels(written, node)
        self.now |= dict.fromkeys(family, None)
        self.share(node, [written])
        self.same[node] = written
        value = last = node
        for one, base in before:
            self.now[one] = value
            if one in self.same or base is None:
                continue
            put_back = PUT_BACK[one.target]
            target, args = put_back(base, value, *one.args[1:])
            with self.graph.inserting_after(last):
                value = last = self.graph.call_function(target, args)
            value.meta = dict(node.meta) | {"val": self.base[one].meta["val"]}
            self.made.append(value)

    def levels(self, written: fx.Node, reader: fx.Node) -> list[tuple[fx.Node, fx.Node | None]]:
        """What is written, what that is a view of, and so on, as far as it can be put back; with what each is a view of, by now."""
        found: list[tuple[fx.Node, fx.Node | None]] = []
        one = written
        while one in self.same or (one in self.base and one.target in PUT_BACK and not one.kwargs):
            if one in self.same:
                found.append((one, None))
                one = self.same[one]
                continue
            try:
                found.append((one, self.current(self.base[one], reader)))
            except UnknownError:  # lost before: whoever reads it will not get it
                break
            one = self.base[one]
        return [*found, (one, None)]


def holds_tensors(node: fx.Node) -> bool:
    """Whether the value is a tensor, or several."""
    return isinstance(node.meta.get("val"), (Tensor, list, tuple))


def back_from(order: list[int]) -> list[int]:
    """The order that undoes one."""
    return [[one % len(order) for one in order].index(place) for place in range(len(order))]


def remove_inference_only_ops(graph: fx.Graph) -> None:
    """What was written over whole is what it was written over with: `aten.copy`, its functional form, has no derivative."""
    for node in list(graph.nodes):
        if node.target is not aten.copy.default or not isinstance(node.args[1], fx.Node):
            continue
        source, made = node.args[1], node.meta["val"]
        value = source.meta["val"]
        if (value.dtype, value.device) != (made.dtype, made.device):
            with graph.inserting_before(node):
                source = graph.call_function(aten._to_copy.default, (source,), {"dtype": made.dtype, "device": made.device})
            source.meta["val"] = value.to(device=made.device, dtype=made.dtype)
        if [*map(str, value.shape)] == [*map(str, made.shape)]:
            node.target, node.args, node.kwargs = aten.clone.default, (source,), {}
        else:
            node.target, node.args, node.kwargs = aten.expand_as.default, (source, node.args[0]), {}


def may_share(node: fx.Node) -> bool:
    """Whether the value may lie in the memory of an operand: it is a view, or what the operation was handed.

    Of an operation that is made of others the schema does not say (`type_as`, and dropout in evaluation).
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if op(node) in ANEW:
        return False
    made_of_others = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return made_of_others or any(one.alias_info is not None and not one.alias_info.is_write for one in target._schema.arguments)


def without_writing(node: fx.Node) -> Any:
    """The operation that gives what `node`, `x.add_(y)` say, leaves in its first operand; None where there is none such."""
    target: Any = node.target
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    other = getattr(packet, schema.overload_name or "default", None)
    if other is None or written != [True, *[False] * (len(written) - 1)]:
        return None
    if [one.name for one in other._schema.arguments] != [one.name for one in schema.arguments]:
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta["val"])
    value, left = other(*args, **kwargs), node.meta["val"]
    same = isinstance(value, Tensor) and value.dtype == left.dtype and value.shape == left.shape
    return other if same else None
