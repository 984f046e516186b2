"""Build one graph module: the nodes of one region copied into a graph, the regions inside it as calls of modules.

The arguments of a region are the tensors that it reads, and the sizes that none of these tensors has. `EmissionContext` holds data
computed once for a program: weights, live nodes, symbolic sizes, dropouts, gradient stops.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.emitted.graph_parts import (
    AttentionWithDropout,
    GraphPart,
    attach_module,
    attention_dropouts,
    check_sizes,
    getitem,
    is_structurally_equal,
    stop_gradient_nodes,
)
from retrofit.emitted.regions import SELECTING, Region, WeightSlices
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, POINTWISE, op, shape
from retrofit.program.dataflow import Dataflow, backward_slice, forward_slice
from retrofit.program.program import Graph, Program, register_tensor

UNBOUNDED = sys.maxsize - 1  # torch uses this or infinity for a size without a bound


def is_size_value(node: fx.Node) -> bool:
    """Return whether the node's value is a number, such as a size, rather than tensors."""
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple))


def symbolic_sizes(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a tensor, or the single number that the node is: an int if static, else an expression."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,) if isinstance(value, (int, torch.SymInt)) else ()
    expressions = [size if isinstance(size, int) else size.node.expr for size in sizes]
    return tuple(size if isinstance(size, int) or not size.is_number else int(size) for size in expressions)


def largest_sizes(node: fx.Node) -> tuple[int | None, ...]:
    """Return the largest value of each dynamic size of a tensor; None if it has no bound, or the size is static."""
    value = node.meta.get("val")
    return tuple(map(largest_size, value.shape)) if isinstance(value, Tensor) else ()


def largest_size(size: int | torch.SymInt) -> int | None:
    """Return the largest value of a dynamic size; None if it has no bound, or is static."""
    if isinstance(size, int):
        return None
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound < UNBOUNDED else None


class EmissionContext:
    """A program that is being emitted, with the data that its module builders read."""

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        flow: Dataflow,
        slices: WeightSlices,
        sizes: dict[fx.Node, tuple[Any, ...]],
        width: int,
    ) -> None:
        self.model, self.program, self.flow = model, program, flow
        self.slices, self.sizes, self.width = slices, sizes, width
        self.results = {node for name, node in program.outputs.items() if not name.startswith("mutation ")}
        self.live = backward_slice(self.results)
        self.parametrised = forward_slice(program.parameters, flow.nodes)  # nodes that depend on a parameter
        self.dropouts = attention_dropouts(model, program)
        self.without_gradient = stop_gradient_nodes(program)
        self.weights: dict[fx.Node, bool] = {}  # the results of `is_weight`
        self.names: dict[int, list[str]] = {}  # of each parameter and buffer, by identity
        for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            self.names.setdefault(id(value), []).append(name)

    def is_added_mask(self, node: fx.Node) -> bool:
        """Return whether the node is a mask that was added for the capture: an optional argument."""
        examples, name = self.program.examples, self.program.inputs.get(node)
        return bool(examples) and name is not None and name not in examples

    def is_weight(self, node: fx.Node) -> bool:
        """Return whether the node is a parameter, buffer or constant, or a light function of these, copied to each reader."""
        if node not in self.weights:
            sources = node.all_input_nodes
            light = op(node) in LAYOUT | CAST | POINTWISE | SELECTING and bool(sources) and not is_size_value(node)
            derived = light and all(map(self.is_weight, sources))
            self.weights[node] = node not in self.program.inputs if node.op == "placeholder" else derived
        return self.weights[node]

    def shared_nodes(self, own: list[fx.Node]) -> set[fx.Node]:
        """Return the nodes of a part, such as a mask, that depend on no parameter and have other readers; computed before it."""
        inside = set(own)
        leaving = (node for node in own if any(user not in inside and user in self.live for user in node.users))
        found = backward_slice(node for node in leaving if node not in self.parametrised) & inside
        return found if not any(op(node) in DROPOUT for node in found) else set()

    def tensor_of(self, node: fx.Node, prefix: str) -> tuple[str, Tensor, bool]:
        """Return name, value and persistence of a placeholder that is no input; of several names, one with the prefix."""
        program, model = self.program, self.model
        if node in self.slices:
            return *self.slices[node], True
        if node in program.constants:
            name = program.constants[node]
            return f"constants.{name}", program.values[name], False
        name = program.parameters.get(node) or program.buffers[node]
        value = model.get_parameter(name) if node in program.parameters else model.get_buffer(name)
        name = next((alias for alias in self.names[id(value)] if alias.startswith(prefix)), name)
        owner, _, leaf = name.rpartition(".")
        return name, value, leaf not in model.get_submodule(owner)._non_persistent_buffers_set


def part_arguments(own: list[fx.Node], context: EmissionContext) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments of a part that computes the nodes `own`, and those of the nodes that it computes itself.

    A size of one of its tensors is read from that tensor, not passed: a part whose tensors are shorter than at capture still
    computes with the right sizes.
    """
    inside = {node for node in own if not is_size_value(node)}
    tensors = dict.fromkeys(
        operand
        for node in own
        if node in inside
        for operand in non_weight_operands(node, context)
        if operand not in inside and not is_size_value(operand)
    )
    entering = list(tensors)
    computed_sizes: set[fx.Node] = set()
    sizes: dict[fx.Node, None] = {}
    pending = [
        operand for node in own if node in inside for operand in non_weight_operands(node, context) if is_size_value(operand)
    ]
    pending += [node for node in own if is_size_value(node) and any(user not in own for user in node.users)]
    while pending:
        size = pending.pop()
        if size in computed_sizes or size in sizes or is_computable_from(size, entering, context):
            continue
        if size not in own:
            sizes[size] = None
            continue
        computed_sizes.add(size)
        pending += [operand for operand in non_weight_operands(size, context) if is_size_value(operand)]
        tensors |= dict.fromkeys(
            operand for operand in non_weight_operands(size, context) if operand not in inside and not is_size_value(operand)
        )
    return [*tensors, *sizes], [node for node in own if node in inside or node in computed_sizes]


def is_computable_from(size: fx.Node, tensors: list[fx.Node], context: EmissionContext) -> bool:
    """Return whether the size is a dimension of one of the tensors, or computed only from such sizes."""
    if dimension_of_size(size, tensors, context) is not None:
        return True
    operands = non_weight_operands(size, context)
    return bool(operands) and all(is_size_value(operand) and is_computable_from(operand, tensors, context) for operand in operands)


def dimension_of_size(size: fx.Node, tensors: list[fx.Node], context: EmissionContext) -> tuple[fx.Node, int] | None:
    """Return the first of the tensors with a dynamic dimension of this size, and that dimension; None if there is none."""
    symbols = context.sizes.get(size, ())
    if not is_size_value(size) or len(symbols) != 1 or isinstance(symbols[0], int):
        return None
    for tensor in tensors:
        for dim, symbol in enumerate(context.sizes.get(tensor, ())):
            if not isinstance(symbol, int) and symbol == symbols[0]:
                return tensor, dim
    return None


def non_weight_operands(node: fx.Node, context: EmissionContext) -> list[fx.Node]:
    """Return the operands of the node that are not weights."""
    return [part for part in node.all_input_nodes if not context.is_weight(part)]


ASSERTIONS = ("_assert", "sym_constrain", "_guards")


KEPT_METADATA = ("val", "stack_trace")  # metadata that a node's copy keeps: shape and dtype of its value, and the line of code


def keeps_width(node: fx.Node, width: int) -> bool:
    """Return whether a change of layout has the stream's width as a literal last size, equal to its operand's.

    A pass may make its operand wider.
    """
    before, sizes = shape(node.args[0]) or (), node.args[1]
    written = sizes[-1] if isinstance(sizes, (list, tuple)) and sizes else None
    return len(before) > 1 and type(written) is int and written == before[-1] == width


def unchanged_leading_dims(node: fx.Node, sizes: dict[fx.Node, tuple[Any, ...]]) -> int:
    """Return how many leading dimensions, except the last, a change of layout keeps: a pass may shorten the token dimension."""
    pairs = zip(sizes[node.args[0]][:-1], sizes[node][:-1], strict=False)  # type: ignore[index]
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def kept_metadata(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that a copy of the node keeps."""
    return {key: node.meta[key] for key in KEPT_METADATA if key in node.meta}


class ModuleBuilder:
    """A graph module that is being built from a region; `env` maps nodes of the program to nodes of its graph."""

    def __init__(self, context: EmissionContext, region: Region, arguments: list[fx.Node]) -> None:
        self.context, self.region, self.arguments = context, region, arguments
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.elsewhere: set[fx.Node] = set()  # nodes of the region that are computed before it
        self.parts: dict[str, tuple[str, nn.Module]] = {}  # by name: the path of the module that it is a call of, and the part
        names = context.program.inputs
        for node in arguments:
            self.env[node] = self.graph.placeholder(names.get(node, node.name))
            self.env[node].meta |= kept_metadata(node)

    def size_check(self, node: fx.Node) -> fx.Node:
        """Return the argument after a check of the sizes that the model's code fixed at capture, and of its upper bounds."""
        fixed = tuple(size if isinstance(size, int) else None for size in self.context.sizes[node])
        largest = largest_sizes(node)
        if not any(size is not None for size in (*fixed, *largest)):
            return self.env[node]
        made = self.graph.call_function(check_sizes, (self.env[node], self.context.program.inputs[node], fixed, largest))
        made.meta |= kept_metadata(node) | {"is_wrapped": True}  # one call for torch.fx too, which traces when it unpickles
        return made

    def run(self) -> None:
        """Copy every node of the region into the graph; the regions inside it become calls of parts."""
        flow, position = self.context.flow, self.region.first
        starts = {part.first: part for part in self.region.inside}
        while position <= self.region.last:
            if position in starts:
                inner = starts[position]
                self.call_region(inner)
                position = inner.last + 1
                continue
            node = flow.nodes[position]
            computes = node.op == "call_function" and not is_size_value(node)  # sizes are computed where they are read
            if computes and node not in self.elsewhere and not self.context.is_weight(node) and not op(node).startswith(ASSERTIONS):
                self.env[node] = self.stop_gradient(node, self.copied(node))
            position += 1

    def stop_gradient(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """Return the value of `node` for its readers in this region: detached if the model's code stops gradients at them."""
        context, region = self.context, self.region
        if node not in context.without_gradient:
            return made
        here = (user for user in node.users if region.first <= context.flow.position.get(user, -1) <= region.last)
        if all(user in context.without_gradient for user in here):
            return made
        detached = self.graph.call_function(torch.ops.aten.detach.default, (made,))
        detached.meta |= kept_metadata(node)
        return detached

    def finished(self, name: str) -> fx.GraphModule:
        """Return the graph module, without dead code."""
        made = Graph(self.root, self.graph, name)
        made.graph.eliminate_dead_code()
        made.graph.lint()
        made.recompile()
        for path, module in self.root.named_modules():
            if module._non_persistent_buffers_set:
                made.get_submodule(path)._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
        return made

    def value(self, node: fx.Node) -> fx.Node:
        """Return the node of this graph with the value of a node of the program."""
        if node not in self.env:
            place = dimension_of_size(node, self.arguments, self.context)
            if place is not None:
                self.env[node] = self.graph.call_function(torch.ops.aten.sym_size.int, (self.env[place[0]], place[1]))
                self.env[node].meta |= kept_metadata(node)
            elif self.comes_from_before(node):
                self.env[node] = self.passed(node)
            else:
                self.env[node] = self.weight(node) if node.op == "placeholder" else self.copied(node)
        return self.env[node]

    def comes_from_before(self, node: fx.Node) -> bool:
        """Return whether the node is a size computed before this region that cannot be computed from the region's arguments."""
        context = self.context
        is_earlier = context.flow.position[node] < self.region.first and is_size_value(node) and not context.is_weight(node)
        return is_earlier and not is_computable_from(node, self.arguments, context)

    def passed(self, size: fx.Node) -> fx.Node:
        """Return the size as an additional argument: a region inside this one reads it."""
        last = self.env[self.arguments[-1]] if self.arguments else None
        with self.graph.inserting_after(last):
            made = self.graph.placeholder(size.name)
        made.meta |= kept_metadata(size)
        self.arguments.append(size)
        return made

    def weight(self, node: fx.Node) -> fx.Node:
        """Return a parameter, buffer or constant, registered in this module under its own name."""
        prefix = self.region.path + "." if self.region.path else ""
        name, value, saved = self.context.tensor_of(node, prefix)
        name = name.removeprefix(prefix)
        register_tensor(self.root, name, value, saved)
        return self.graph.get_attr(name)

    def copied(self, node: fx.Node) -> fx.Node:
        """Return a copy of the node with its metadata, for this graph."""
        made = self.translated(node)
        made.meta |= kept_metadata(node)
        return made

    def translated(self, node: fx.Node) -> fx.Node:
        """Return a copy of the node: dropout as a module, the device of the inputs, a view's sizes read from its operand."""
        name = op(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.value)
        if name in DROPOUT and isinstance(node.args[0], fx.Node):
            return self.dropout(float(node.args[1]), args)  # type: ignore[arg-type]
        if node in self.context.dropouts:
            return self.attention(self.context.dropouts[node], args, kwargs)
        if isinstance(kwargs.get("device"), torch.device) and (like := self.any_tensor()) is not None:
            kwargs = {**kwargs, "device": self.graph.call_function(getattr, (like, "device"))}
        target: Any = node.target
        if target is torch.ops.aten.view.default:  # the layout of attention's result depends on device and gradients
            target = torch.ops.aten.reshape.default
        if name in ("view", "reshape", "_unsafe_view"):
            args = args[0], self.view_sizes(node, args)  # type: ignore[arg-type]
        return self.graph.call_function(target, args, kwargs)

    def view_sizes(self, node: fx.Node, args: Any) -> list[Any]:
        """Return the sizes of a change of layout; literal ones that it keeps are read from its operand."""
        sizes = list(args[1])
        places = [dim for dim in range(unchanged_leading_dims(node, self.context.sizes)) if type(sizes[dim]) is int]
        if keeps_width(node, self.context.width):
            places.append(-1)
        for dim in places:
            sizes[dim] = self.graph.call_function(torch.ops.aten.sym_size.int, (args[0], dim))
        return sizes

    def any_tensor(self) -> fx.Node | None:
        """Return a tensor of this graph; None if there is none yet."""
        tensors = (copied for node, copied in self.env.items() if isinstance(node.meta.get("val"), Tensor))
        return next(tensors, None)

    def dropout(self, p: float, args: Any) -> fx.Node:
        """Return a call of a dropout module."""
        return self.graph.call_module(self.new_child("dropout", nn.Dropout(p)), args[:1])

    def attention(self, p: float, args: Any, kwargs: Any) -> fx.Node:
        """Return a call of a fused attention with dropout of its weights in training."""
        return self.graph.call_module(self.new_child("attend", AttentionWithDropout(p)), args, kwargs)

    def new_child(self, name: str, module: nn.Module) -> str:
        """Add `module` as a child under `name`, with a number if needed; return the name."""
        free, count = name, 0
        while hasattr(self.root, free):
            count += 1
            free = f"{name}_{count}"
        self.root.add_module(free, module)
        return free

    def call_region(self, region: Region) -> None:
        """Call the region here as a module: its arguments are the values that it reads, its outputs those that others read."""
        context, flow = self.context, self.context.flow
        own = [
            node
            for node in flow.nodes[region.first : region.last + 1]
            if not context.is_weight(node) and node.op == "call_function"
        ]
        shared = context.shared_nodes(own) if region.in_code else set()
        own = [node for node in own if node not in shared]
        if len(own) == 1 and op(own[0]) in DROPOUT:  # a module that is only dropout stays one
            name = self.register_part(region, nn.Dropout(float(own[0].args[1])))  # type: ignore[arg-type]
            self.env[own[0]] = self.graph.call_module(name, (self.value(own[0].args[0]),))  # type: ignore[arg-type]
            return
        arguments, own = part_arguments(own, context)
        within = set(own)
        builder = ModuleBuilder(context, region, arguments)
        builder.elsewhere = self.elsewhere | shared
        builder.run()
        returned = [
            node
            for node in own
            if node in context.results or any(user not in within and user in context.live for user in node.users)
        ]
        returned = [node for node in returned if node in builder.env or is_size_value(node)]
        if not returned:
            return
        values = [builder.value(node) for node in returned]
        builder.graph.output(values[0] if len(values) == 1 else tuple(values))
        name = self.register_part(region, GraphPart.of(builder.finished("Part")))
        operands = tuple(self.value(node) for node in arguments)
        leaf = region.name.rpartition(".")[2]
        result = self.graph.create_node("call_module", name, operands, {}, name=f"from_{leaf}")  # never `self`
        for index, node in enumerate(returned):
            made = result if len(returned) == 1 else self.graph.call_function(getitem, (result, index))
            made.meta |= kept_metadata(node)
            self.env[node] = self.stop_gradient(node, made)

    def register_part(self, region: Region, part: nn.Module) -> str:
        """Return the part's name in this module: its own, or that of an equal part with the same parameters, to be called again."""
        has_parameters = any(True for _ in part.parameters())
        for name, (path, earlier) in self.parts.items():
            if (has_parameters or path == region.path) and is_structurally_equal(part, earlier):
                return name
        attach_module(self.root, region.name, part)
        self.parts[region.name] = region.path, part
        return region.name
