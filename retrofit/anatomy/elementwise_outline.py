"""The element-wise function between the matrices of a branch, cut out of the graph as a graph module of its own."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx, nn

from retrofit.anatomy.feed_forward_sites import Port, no_feed_forward
from retrofit.anatomy.parts import Branch
from retrofit.anatomy.weight_products import weight_product
from retrofit.program.aten_ops import COMPARISON, DROPOUT, LAYOUT, POINTWISE, is_number, op, shape
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call

ELEMENTWISE = POINTWISE | COMPARISON | frozenset("logical_and logical_or logical_not expm1 min max ones_like full_like".split())

Step = Call | fx.Node  # a module that the hidden units pass, or an operation of the model's own code


@dataclasses.dataclass(frozen=True)
class ElementwiseFunction:
    """A function of the results of matrices, unit by unit."""

    module: fx.GraphModule
    ports: tuple[Port, ...]  # of its arguments, in order
    steps: tuple[Step, ...]
    paths: tuple[tuple[str, str], ...]  # children of `module` that are modules of the model: name, path in the model
    dropout: float  # the largest that the model's own code applies


class ElementwiseOutline:
    """Builds the function of `ends`, which are results of matrices of the branch, that gives a later node with `columns` units.

    Modules of the model that are called on the way (activations, dropouts) stay the live modules; operations of the model's own
    code become nodes, and its dropout a module.
    """

    def __init__(self, branch: Branch, model: nn.Module, flow: Dataflow, ends: list[fx.Node], columns: int) -> None:
        self.branch, self.model, self.flow, self.ends, self.columns = branch, model, flow, ends, columns
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.ports: dict[Port, fx.Node] = {}
        self.steps: list[Step] = []
        self.paths: dict[str, str] = {}
        self.dropouts: dict[str, tuple[fx.Node, float]] = {}  # modules added for dropout in the model's own code: its node, its p

    def build(self, result: fx.Node) -> ElementwiseFunction:
        """The function that computes `result`; raises `DoesNotFitError` where it is not element-wise."""
        value = self.value(result)
        ports = sorted(self.ports, key=lambda port: (port.matrix, port.start))
        ordered = fx.Graph()  # the arguments in the order of the ports
        env: dict[fx.Node, fx.Node] = {self.ports[port]: ordered.placeholder(f"z{index}") for index, port in enumerate(ports)}
        for node in self.graph.nodes:
            if node not in env:
                env[node] = ordered.node_copy(node, env.__getitem__)
        ordered.output(env[value])
        module = fx.GraphModule(self.root, ordered, "Hidden")
        dropout = max((p for _, p in self.dropouts.values()), default=0.0)
        return ElementwiseFunction(module, tuple(ports), tuple(self.steps), tuple(self.paths.items()), dropout)

    def value(self, node: fx.Node) -> fx.Node:
        """The node of the new graph that computes `node`."""
        if node not in self.env:
            self.env[node] = self.emit(node)
        return self.env[node]

    def emit(self, node: fx.Node) -> fx.Node:
        if node in self.ends:
            return self.port(Port(self.ends.index(node), 0, 1), node)
        selected = self.selected_columns(node)
        if selected is not None:
            return self.port(selected, node)
        call = self.elementwise_call(node)
        if call is not None and not self.is_shared_dropout(call):
            return self.emit_call(call)
        name = op(node)
        source = node.args[0] if node.args else None
        if name == "getitem" and isinstance(source, fx.Node) and op(source) in DROPOUT:
            return self.value(source)
        if isinstance(source, fx.Node) and name in DROPOUT:
            return self.emit_dropout(node, source)
        if isinstance(source, fx.Node) and name in LAYOUT and (shape(source) or (0,))[-1] == (shape(node) or (0,))[-1]:
            return self.value(source)
        if name == "glu":
            return self.emit_glu(node)
        if is_number(node):  # on the CPU: such numbers combine with tensors on any device
            kwargs = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory")}
            return self.graph.call_function(node.target, node.args, kwargs)  # type: ignore[arg-type]
        if name not in ELEMENTWISE:
            raise no_feed_forward(self.branch, f"its hidden units meet in {node.name} (operation {name})")
        for operand in node.all_input_nodes:
            if operand not in self.flow.depends and (shape(operand) or ()) not in ((), (1,)):
                raise no_feed_forward(self.branch, f"its hidden units meet a tensor of weights in {node.name} (operation {name})")
            if operand not in self.flow.depends and not is_number(operand):
                raise no_feed_forward(self.branch, f"the model's own code uses a weight in {node.name} (operation {name})")
        self.steps.append(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.value)
        return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def port(self, port: Port, node: fx.Node) -> fx.Node:
        """The argument of the new graph for the columns of a port, which `node` holds."""
        if (shape(node) or (0,))[-1] != self.columns:
            raise no_feed_forward(self.branch, f"{(shape(node) or (0,))[-1]} columns enter where {self.columns} hidden units are")
        if port not in self.ports:
            self.ports[port] = self.graph.placeholder(f"p{len(self.ports)}")
        return self.ports[port]

    def selected_columns(self, node: fx.Node) -> Port | None:
        """The columns of a matrix's result that `node` selects, None where it selects none."""
        name = op(node)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            return None
        before = shape(source)
        if name == "slice" and source in self.ends and before:
            arguments = dict(enumerate(node.args))
            dim, start, step = arguments.get(1, 0), arguments.get(2, 0), arguments.get(4, 1)
            if int(dim or 0) % len(before) != len(before) - 1:  # type: ignore[arg-type]
                return None
            return Port(self.ends.index(source), int(start or 0) % before[-1], int(step or 1))  # type: ignore[arg-type]
        if name == "getitem" and op(source) in ("chunk", "split", "split_with_sizes") and source.args[0] in self.ends:
            end = source.args[0]
            before = shape(end) or (0,)
            dim = int(source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0))  # type: ignore[arg-type]
            if dim % len(before) != len(before) - 1:
                return None
            sizes = [int(value.shape[-1]) for value in source.meta["val"]]
            return Port(self.ends.index(end), sum(sizes[: int(node.args[1])]), 1)  # type: ignore[arg-type]
        return None

    def emit_glu(self, node: fx.Node) -> fx.Node:
        """a · sigmoid(b) for the halves a and b of one matrix's result."""
        end = node.args[0]
        if end not in self.ends:
            raise no_feed_forward(self.branch, f"a gate follows other operations in {node.name}")
        self.steps.append(node)
        halves = []
        for start in (0, self.columns):
            port = Port(self.ends.index(end), start, 1)  # type: ignore[arg-type]
            self.ports.setdefault(port, self.graph.placeholder(f"p{len(self.ports)}"))
            halves.append(self.ports[port])
        gate = self.graph.call_function(torch.ops.aten.sigmoid.default, (halves[1],))
        return self.graph.call_function(torch.ops.aten.mul.Tensor, (halves[0], gate))

    def emit_dropout(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Dropout of the model's own code becomes a module."""
        p = float(node.args[1])  # type: ignore[arg-type]
        value = self.value(source)
        if not p:
            return value
        name = f"dropout{len(list(self.root.children()))}"
        self.dropouts[name] = node, p
        self.root.add_module(name, nn.Dropout(p))
        return self.graph.call_module(name, (value,))

    def elementwise_call(self, node: fx.Node) -> Call | None:
        """The outermost call that returns `node` and is an element-wise function of one tensor; None where there is none."""
        outermost = None
        for call in self.flow.call_of(node).chain:
            entering = [part for part in call.inputs.values() if part in self.flow.depends]
            if not call.path or len(entering) != 1 or list(call.outputs.values()) != [node] or None not in call.outputs:
                continue
            within = self.flow.between(entering[0], node)
            if all(self.is_elementwise(one) for one in within) and not any(
                self.flow.reaches(one, entering[0]) and one is not entering[0] and end is one for one in within for end in self.ends
            ):
                products = any(one in self.ends or weight_product(one, self.flow) is not None for one in within)
                if not products:
                    outermost = call
        return outermost

    def is_shared_dropout(self, call: Call) -> bool:
        """Whether it is the dropout of a module that the model also calls elsewhere: that is left to the model's own code."""
        own = [node for node in self.flow.computations if call.encloses(self.flow.call_of(node))]
        shared = times_called(call, self.flow) != times_called(self.flow.call_of(self.ends[0]), self.flow)
        return shared and all(op(node) in DROPOUT for node in own)

    def is_elementwise(self, node: fx.Node) -> bool:
        """Whether a unit's result depends on no other unit, and on no weight of its own."""
        single = all(part in self.flow.depends or (shape(part) or ()) in ((), (1,)) for part in node.all_input_nodes)
        kept = op(node) in LAYOUT and (shape(node) or (0,))[-1] == self.columns
        return (op(node) in ELEMENTWISE or kept or op(node) == "getitem") and single

    def emit_call(self, call: Call) -> fx.Node:
        (entering,) = [part for part in call.inputs.values() if part in self.flow.depends]
        value = self.value(entering)
        self.steps.append(call)
        name = call.path.rpartition(".")[2]
        name = name if not hasattr(self.root, name) and name.isidentifier() else f"step{len(list(self.root.children()))}"
        self.root.add_module(name, self.model.get_submodule(call.path))
        self.paths[name] = call.path
        return self.graph.call_module(name, (value,))


def times_called(call: Call, flow: Dataflow) -> int:
    """How often the module of `call` is called and returns something."""
    calls = (other for other in flow.program.calls if other.path == call.path)
    return sum(any(node in flow.position for node in other.outputs.values()) for other in calls)
