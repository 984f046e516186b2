"""Functionalize a graph: replace in-place operations by pure ones.

`torch` can functionalize any program by tracing it again, which is slow. Here each operation is visited once, in order, with an
alias analysis: which values may share memory, which are views of which base, and which node holds the current contents of each. A
value read after an in-place write is read from its current node, a view is computed again, and contents written into a view are
scattered into its base.

A recomputed value may have another memory layout than the one that was written into. Its views become reshapes, and operations that
read strides get a copy in the traced layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from retrofit.program.aten_ops import ACTIVATION, ATTENTION, CONVOLUTION, NORM, PRODUCT, extent, op

aten: Any = torch.ops.aten
# Operations whose result never shares memory with an operand. An einsum of one operand may only transpose it.
NON_ALIASING = (PRODUCT | CONVOLUTION | ATTENTION | NORM | ACTIVATION) - {"einsum"}
# The operation, with its operands, that writes a view's new contents back into its base: from the base before the write, the new
# contents, and the view's other arguments.
ViewInverse = Callable[..., tuple[Any, tuple[Any, ...]]]
VIEW_INVERSES: dict[Any, ViewInverse] = {
    aten.slice.Tensor: lambda base, part, *how: (aten.slice_scatter.default, (base, part, *how)),
    aten.select.int: lambda base, part, *how: (aten.select_scatter.default, (base, part, *how)),
    aten.diagonal.default: lambda base, part, *how: (aten.diagonal_scatter.default, (base, part, *how)),
    aten.transpose.int: lambda base, part, *how: (aten.transpose.int, (part, *how)),
    aten.t.default: lambda base, part: (aten.t.default, (part,)),
    aten.permute.default: lambda base, part, order: (aten.permute.default, (part, inverse_permutation(order))),
    aten.unsqueeze.default: lambda base, part, dim: (aten.squeeze.dim, (part, dim)),
}
VIEWS = {
    *VIEW_INVERSES,
    aten.view.default,
    aten.expand.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
# Operations whose result has one memory layout, whatever the layout of their operands.
FIXED_LAYOUT = frozenset(("linear", "mm", "bmm", "addmm", "baddbmm", "layer_norm", "native_layer_norm", "embedding"))
BY_STRIDES = {  # operations that read an operand's strides
    aten.as_strided.default,
    aten.as_strided_scatter.default,
    aten.view.dtype,
    aten.view_as_complex.default,
    aten.sym_stride.int,
    aten.sym_storage_offset.default,
}
VMAP = "torch._functorch.predispatch"  # the module of the operations that begin and end a vmap


class UnknownValueError(Exception):
    """The current contents of a value are not known."""


def mutates(node: fx.Node) -> bool:
    """Return whether the operation writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functionalize(graph: fx.Graph) -> bool:
    """Rewrite the graph so that no operation writes into an operand; return whether that was possible.

    The graph is unchanged if an operation writes into an input or a weight, or into memory that a value read later may or may not
    share, and if it contains a `vmap`, which depends on the order of its operations.
    """
    if any(getattr(node.target, "__module__", "") == VMAP for node in graph.nodes):
        return False
    if not any(map(mutates, graph.nodes)):
        return True
    trial = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copied[node] = trial.node_copy(node, copied.__getitem__)
    try:
        Functionalizer(trial).run()
    except UnknownValueError:
        return False
    Functionalizer(graph).run()
    return True


class Functionalizer:
    """Rewrites a graph in order, with an alias analysis of the visited nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.aliases: dict[fx.Node, set[fx.Node]] = {}  # value → the values that may share its memory, itself included
        self.view_base: dict[fx.Node, fx.Node] = {}  # view → its base
        self.write_target: dict[fx.Node, fx.Node] = {}  # result of an in-place operation → the value it was written into
        self.current: dict[fx.Node, fx.Node | None] = {}  # value → the node with its current contents; None: to be computed again
        self.inserted: list[fx.Node] = []
        self.relaid: set[fx.Node] = set()  # values whose memory layout may differ from the captured one

    def run(self) -> None:
        """Make all operations pure. Raises `UnknownValueError`, half way, if the contents of a value are not known."""
        for node in list(self.graph.nodes):
            operands = node.all_input_nodes
            for operand in operands:
                value = self.current_value(operand, node)
                if value is not operand:
                    node.replace_input_with(operand, value)
            target = node.target
            self.follow_layout(node)
            if mutates(node):
                self.rewrite_in_place_op(node, operands)
            elif is_result_of_its_own(node):
                self.add_alias(node, [twin for twin in operands[0].users if twin.args == node.args and twin in self.aliases])
            elif node.op == "call_function" and may_alias_operand(node) and holds_tensors(node):
                self.add_alias(node, operands)
                if target in VIEWS:
                    self.view_base[node] = operands[0]
        for node in reversed(self.inserted):
            if not node.users:
                self.graph.erase_node(node)

    def current_value(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the node with the contents of `node` at the time `reader` reads it; a stale view is computed again there."""
        if node in self.write_target:
            return self.current_value(self.write_target[node], reader)
        value = self.current.get(node, node)
        if value is None:
            if node not in self.view_base:
                raise UnknownValueError
            base = self.current_value(self.view_base[node], reader)
            with self.graph.inserting_before(reader):
                value = self.graph.call_function(node.target, (base, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
            value.meta = dict(node.meta)
            self.inserted.append(value)
            self.follow_layout(value)
            self.current[node] = value
        return value

    def follow_layout(self, node: fx.Node) -> None:
        """Make `node` compute the same on values in another memory layout. Raises `UnknownValueError` if it cannot."""
        if self.relaid.isdisjoint(node.all_input_nodes):
            return
        if node.target in BY_STRIDES:
            for operand in self.relaid.intersection(node.all_input_nodes):
                if not fills_memory_in_order(operand.meta["val"]) or reaches_beyond(node):
                    raise UnknownValueError
                with self.graph.inserting_before(node):
                    ordered = self.graph.call_function(aten.clone.default, (operand,), {"memory_format": torch.contiguous_format})
                ordered.meta = dict(operand.meta)
                node.replace_input_with(operand, ordered)
            return
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        if holds_tensors(node) and op(node) not in FIXED_LAYOUT:
            self.relaid.add(node)

    def add_alias(self, node: fx.Node, others: list[fx.Node]) -> None:
        """Record that `node` may share memory with the others, and with all that these may share memory with."""
        family = {node}.union(*(self.aliases.get(member, {member}) for member in others if holds_tensors(member)))
        for member in family:
            self.aliases[member] = family

    def rewrite_in_place_op(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """Make the operation pure: it returns the new contents of its target, whose aliases all become stale."""
        written, pure = operands[0], functional_overload(node)
        family = self.aliases.get(written, {written})
        if pure is None or any(view.op != "call_function" for view in family):
            raise UnknownValueError
        node.target = pure
        chain = self.view_chain(written, node)
        self.current |= dict.fromkeys(family, None)
        self.add_alias(node, [written])
        self.write_target[node] = written
        self.relaid.add(node)
        value = last = node
        for view, base in chain:
            self.current[view] = value
            if view in self.write_target or base is None:
                continue
            target, args = VIEW_INVERSES[view.target](base, value, *view.args[1:])
            with self.graph.inserting_after(last):
                value = last = self.graph.call_function(target, args)
            value.meta = dict(node.meta) | {"val": self.view_base[view].meta["val"]}
            self.inserted.append(value)
            self.relaid.add(value)

    def view_chain(self, written: fx.Node, reader: fx.Node) -> list[tuple[fx.Node, fx.Node | None]]:
        """Return `written`, its base, the base of that, and so on while views have inverses; each with its base's current node."""
        chain: list[tuple[fx.Node, fx.Node | None]] = []
        link = written
        while link in self.write_target or (link in self.view_base and link.target in VIEW_INVERSES and not link.kwargs):
            if link in self.write_target:
                chain.append((link, None))
                link = self.write_target[link]
                continue
            try:
                chain.append((link, self.current_value(self.view_base[link], reader)))
            except UnknownValueError:  # unknown since an earlier write: reading it will raise
                break
            link = self.view_base[link]
        return [*chain, (link, None)]


def fills_memory_in_order(value: Tensor) -> bool:
    """Return whether the value (dynamic sizes as captured) is contiguous from the start of its memory."""
    in_order = torch.empty([extent(size) for size in value.shape], device="meta").stride()
    return [extent(step) for step in value.stride()] == [*in_order] and extent(value.storage_offset()) == 0


def reaches_beyond(node: fx.Node) -> bool:
    """Return whether a value read by strides extends beyond the elements of the operand."""
    value, (whole, *_) = node.meta.get("val"), node.all_input_nodes
    if node.target is not aten.as_strided.default or not isinstance(value, Tensor):
        return False
    last = sum((extent(size) - 1) * extent(stride) for size, stride in zip(value.shape, value.stride(), strict=True))
    return extent(value.storage_offset()) + last >= extent(whole.meta["val"].numel())


def holds_tensors(node: fx.Node) -> bool:
    """Return whether the value is a tensor, or a list or tuple of them."""
    return isinstance(node.meta.get("val"), (Tensor, list, tuple))


def inverse_permutation(order: list[int]) -> list[int]:
    """Return the inverse of the permutation `order`."""
    return [[dim % len(order) for dim in order].index(place) for place in range(len(order))]


def replace_nondifferentiable_copies(graph: fx.Graph) -> None:
    """Replace every `aten.copy`, the pure form of `copy_`, by a cast with a clone, after an expansion if the shapes differ.

    `aten.copy` has no derivative. The clone gets the memory layout of the value that was written into; if it does not, views become
    reshapes.
    """
    for node in list(graph.nodes):
        if node.target is not aten.copy.default or not isinstance(node.args[1], fx.Node):
            continue
        source, result = node.args[1], node.meta["val"]
        value = source.meta["val"]
        if (value.dtype, value.device) != (result.dtype, result.device):
            with graph.inserting_before(node):
                source = graph.call_function(aten._to_copy.default, (source,), {"dtype": result.dtype, "device": result.device})
            value = source.meta["val"] = value.to(device=result.device, dtype=result.dtype)
        if [*map(str, value.shape)] != [*map(str, result.shape)]:
            with graph.inserting_before(node):
                source = graph.call_function(aten.expand_as.default, (source, node.args[0]))
            value = source.meta["val"] = value.expand_as(result)
        in_order = [extent(size) for size in value.stride()] == [extent(size) for size in result.stride()]
        node.target, node.args = aten.clone.default, (source,)
        node.kwargs = {} if in_order else {"memory_format": torch.contiguous_format}
        if not (in_order or fills_memory_in_order(result)):
            for view in graph.find_nodes(op="call_function", target=aten.view.default):
                view.target = aten.reshape.default


def may_alias_operand(node: fx.Node) -> bool:
    """Return whether the value may share memory with an operand: as a view of it, or as the operand itself.

    The schema of a composite operation does not say this (`type_as`, and dropout in evaluation).
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if op(node) in NON_ALIASING:
        return False
    is_composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite or any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in target._schema.arguments
    )


def is_result_of_its_own(node: fx.Node) -> bool:
    """Return whether the value is one of several results of an operation and shares memory with none of the others."""
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    returns = source.target._schema.returns if isinstance(source.target, torch._ops.OpOverload) else []
    return len(returns) > 1 and not may_alias_operand(source)


def functional_overload(node: fx.Node) -> Any:
    """Return the pure operation that returns what `node`, such as `x.add_(y)`, writes into its first operand; None without one."""
    target: Any = node.target
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    pure = getattr(packet, schema.overload_name or "default", None)
    if pure is None or written != [True, *[False] * (len(written) - 1)]:
        return None
    if [argument.name for argument in pure._schema.arguments] != [argument.name for argument in schema.arguments]:
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda argument: argument.meta["val"])
    value, expected = pure(*args, **kwargs), node.meta["val"]
    same = isinstance(value, Tensor) and value.dtype == expected.dtype and value.shape == expected.shape
    return pure if same else None
