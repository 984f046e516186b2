"""Find the feed-forwards of a model: each ffn branch is parsed into matrices and an element-wise part between them.

A branch with any other operation on its hidden units is not of this form; its near miss gives the reason. The element-wise part
becomes a graph module. A feed-forward is replaced at the module that owns all of it, or at the last of several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import fx, nn

from retrofit.anatomy.branches import (
    BEFORE_THE_OUTER,
    BEFORE_TWO_STREAMS,
    LAYER_WITHIN,
    ON_TWO_STREAMS,
    InnerLayers,
    holds_sums,
    is_on_two_streams,
    owner_of,
    region_of,
)
from retrofit.anatomy.feed_forwards import FeedForward, FeedForwardBlock, Port, no_feed_forward
from retrofit.anatomy.parts import Branch, Findings, Layer, NearMiss, collect_near_miss, first_of_each
from retrofit.anatomy.weights import (
    WeightProduct,
    matrix_of,
    nearest_products,
    operand_chain,
    product_result,
    weight_product,
    width_of,
)
from retrofit.errors import DoesNotFitError, first_few
from retrofit.program.aten_ops import CAST, COMPARISON, DROPOUT, LAYOUT, POINTWISE, is_number, op, shape
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key

ELEMENTWISE = POINTWISE | COMPARISON | frozenset("logical_and logical_or logical_not expm1 min max ones_like full_like".split())

Step = Call | fx.Node  # a module that the hidden units pass, or an operation of the model's own code


@dataclasses.dataclass(frozen=True)
class ElementwiseFunction:
    """A function of the results of matrices, unit by unit."""

    module: fx.GraphModule
    ports: tuple[Port, ...]  # of its arguments, in order
    steps: tuple[Step, ...]
    paths: tuple[tuple[str, str], ...]  # children of `module` from the model: name, path in the model
    dropout: float  # the highest rate that the model's own code applies


class ElementwiseOutline:
    """Builder of the function from `ends`, results of the branch's matrices, to a later node with `columns` units.

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
        self.dropouts: dict[str, tuple[fx.Node, float]] = {}  # added for dropout in the model's own code: node, p

    def build(self, result: fx.Node) -> ElementwiseFunction:
        """Return the function that computes `result`; raises `DoesNotFitError` if it is not element-wise."""
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
        """Return the node of the new graph that computes `node`."""
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
        if isinstance(source, fx.Node) and name in LAYOUT and width_of(source) == width_of(node):
            return self.value(source)
        if name == "glu":
            return self.emit_glu(node)
        if is_number(node):  # on the CPU, where it combines with tensors on any device
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
        """Return the argument of the new graph for a port whose columns `node` holds."""
        if (width := width_of(node)) != self.columns:
            raise no_feed_forward(self.branch, f"{width} columns enter where {self.columns} hidden units are")
        if port not in self.ports:
            self.ports[port] = self.graph.placeholder(f"p{len(self.ports)}")
        return self.ports[port]

    def selected_columns(self, node: fx.Node) -> Port | None:
        """Return the columns of a matrix's result that `node` selects, None if it selects none."""
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
        """Return a · sigmoid(b) for the halves a and b of one matrix's result."""
        end = node.args[0]
        if end not in self.ends:
            raise no_feed_forward(self.branch, f"a gate follows other operations in {node.name}")
        self.steps.append(node)
        index = self.ends.index(end)  # type: ignore[arg-type]
        a, b = (self.port(Port(index, start, 1), node) for start in (0, self.columns))
        gate = self.graph.call_function(torch.ops.aten.sigmoid.default, (b,))
        return self.graph.call_function(torch.ops.aten.mul.Tensor, (a, gate))

    def emit_dropout(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Return a dropout module's node for dropout in the model's own code."""
        p = float(node.args[1])  # type: ignore[arg-type]
        value = self.value(source)
        if not p:
            return value
        name = f"dropout{len(list(self.root.children()))}"
        self.dropouts[name] = node, p
        self.root.add_module(name, nn.Dropout(p))
        return self.graph.call_module(name, (value,))

    def elementwise_call(self, node: fx.Node) -> Call | None:
        """Return the outermost call that returns `node` and is an element-wise function of one tensor; None if there is none."""
        outermost = None
        for call in self.flow.call_of(node).chain:
            entering = [part for part in call.inputs.values() if part in self.flow.depends]
            if not call.path or len(entering) != 1 or list(call.outputs.values()) != [node] or None not in call.outputs:
                continue
            within = self.flow.between(entering[0], node)
            products = any(inner in self.ends or weight_product(inner, self.flow) is not None for inner in within)
            if not products and all(map(self.is_elementwise, within)):
                outermost = call
        return outermost

    def is_shared_dropout(self, call: Call) -> bool:
        """Return whether the dropout is that of a module with other calls in the model.

        Such a dropout is left to the model's own code.
        """
        shared = times_called(call, self.flow) != times_called(self.flow.call_of(self.ends[0]), self.flow)
        return shared and all(op(node) in DROPOUT for node in nodes_of(call, self.flow))

    def is_elementwise(self, node: fx.Node) -> bool:
        """Return whether a unit's result depends on no other unit and on no weight."""
        single = all(part in self.flow.depends or (shape(part) or ()) in ((), (1,)) for part in node.all_input_nodes)
        kept = op(node) in LAYOUT and width_of(node) == self.columns
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
    """Return how often the module of `call` is called and returns something."""
    calls = (other for other in flow.program.calls if other.path == call.path)
    return sum(any(node in flow.position for node in other.outputs.values()) for other in calls)


@dataclasses.dataclass(frozen=True)
class Place:
    """The module at `path` takes x as `stream_in` and applies `tail` to y; the modules `bypassed` run before it."""

    stream_in: Key
    path: str
    tail: ElementwiseFunction | None = None
    bypassed: tuple[str, ...] = ()


def place_in_owner(owner: Call, candidates: list[fx.Node], y: fx.Node, hidden: ElementwiseOutline) -> Place | None:
    """Return the place where one call takes x, one of `candidates`, and returns an element-wise function of y.

    None if it computes more.
    """
    flow = hidden.flow
    stream_in, x = next(((key, node) for key, node in owner.inputs.items() if node in candidates), (None, None))
    if not owner.path or x is None or list(owner.outputs) != [None]:
        return None
    result = owner.outputs[None]
    if not flow.reaches(y, result):
        return None
    own = nodes_of(owner, flow)
    if any(not flow.reaches(x, node) or not (flow.reaches(node, y) or flow.reaches(y, node)) for node in own):
        return None
    if set(flow.between(y, result)) != {node for node in own if flow.reaches(y, node) and node is not y}:
        return None
    try:
        tail = ElementwiseOutline(hidden.branch, hidden.model, flow, [y], width_of(y)).build(result)
    except DoesNotFitError:
        return None
    return Place(stream_in, owner.path, tail if tail.steps or tail.dropout else None)


def place_over_modules(
    branch: Branch, into: list[WeightProduct], out: WeightProduct, steps: tuple[Step, ...], flow: Dataflow
) -> Place:
    """Return the place of a feed-forward in several modules: the last one computes all of it, the others return x."""
    calls = [flow.call_of(product.node) for product in (*into, out)]
    if len(into) > 1:
        raise no_feed_forward(branch, "it is spread over several modules, and its gate is applied by code between them")
    passing = [calls[0]]
    for step in steps:
        call = enclosing_step(step, into[0], out, flow) if isinstance(step, fx.Node) else step
        if call is None:
            where = f"{op(step)} in {step.name}"  # type: ignore[union-attr,arg-type]
            raise no_feed_forward(branch, f"it is spread over several modules, with code between them: {where}")
        passing.append(call)
    for call, product in zip(calls, (*into, out), strict=True):
        others = nodes_of(call, flow)
        if not call.path or any(op(node) not in LAYOUT | CAST | {"add"} and node is not product.node for node in others):
            why = f"the matrix {product.parameter} is applied by the code of {call.path or 'the model'} itself"
            raise no_feed_forward(branch, why)
    outermost = [call for call in passing if not any(other.encloses(call) for other in passing if other is not call)]
    for call in outermost:
        if list(call.outputs) != [None]:
            raise no_feed_forward(branch, f"it is spread over several modules, and {call.path} returns more than one tensor")
        if list(call.inputs) != [0]:
            why = f"it is spread over several modules, and {call.path} takes more than one tensor, or one by name"
            raise no_feed_forward(branch, why)
    last = calls[-1]
    if list(last.outputs) != [None]:
        raise no_feed_forward(branch, f"it is spread over several modules, and {last.path} returns more than one tensor")
    for call in outermost:
        if times_called(call, flow) != times_called(last, flow):
            raise no_feed_forward(branch, f"it is spread over several modules, and {call.path} also runs outside of it")
    stream_in = next((key for key, node in last.inputs.items() if node in flow.depends), 0)
    return Place(stream_in, last.path, bypassed=tuple(dict.fromkeys(call.path for call in outermost)))


def enclosing_step(node: fx.Node, into: WeightProduct, out: WeightProduct, flow: Dataflow) -> Call | None:
    """Return the outermost call that computes `node` and nothing but steps of the feed-forward, from one tensor to another."""
    outermost = None
    for call in flow.call_of(node).chain:
        entering = [part for part in call.inputs.values() if part in flow.depends]
        if not call.path or len(entering) != 1 or call.inputs.get(0) is not entering[0] or list(call.outputs) != [None]:
            continue
        result = call.outputs[None]
        own = set(nodes_of(call, flow))
        begins = entering[0] in operand_chain(into, flow) or flow.reaches(into.node, entering[0])
        if begins and flow.reaches(result, out.source) and out.node not in own and own <= set(flow.between(entering[0], result)):
            outermost = call
    return outermost


def is_computed_by(node: fx.Node, paths: tuple[str, ...], flow: Dataflow) -> bool:
    """Return whether a call of one of the modules at `paths` computes the node."""
    return any(call.path in paths for call in flow.call_of(node).chain)


def nodes_of(call: Call, flow: Dataflow) -> list[fx.Node]:
    """Return the nodes that a call computes from its inputs, without a tracer's assertions."""
    return [node for node in flow.computations if call.encloses(flow.call_of(node))]


REPLACED = "a feed-forward can be replaced once; use layers= to give depths to different passes"


def feed_forwards(anatomy: Findings, layers: Iterable[int] | None = None) -> tuple[list[FeedForward], list[NearMiss]]:
    """Return the feed-forwards of a model by depth, one for each set of weights, and a near miss for every other ffn branch.

    `layers` restricts them to those depths of each stack.
    """
    depths = None if layers is None else set(layers)
    sites: dict[str, FeedForward] = {}
    within = InnerLayers(anatomy.flow)
    near_misses: list[NearMiss] = []
    for stack in anatomy.stacks:
        for depth, layer in enumerate(stack.layers):
            if depths is not None and depth not in depths:
                continue
            layer = within.inside(layer)
            near_misses.extend(hidden_feed_forwards(layer, anatomy))
            for branch in layer.ffns:
                with collect_near_miss(branch.name or layer.name or branch.output, near_misses):
                    site = parse_feed_forward(branch, anatomy.model, anatomy.flow)
                    sites.setdefault(site.path, site)
    return list(sites.values()), first_of_each(near_misses)


def hidden_feed_forwards(layer: Layer, anatomy: Findings) -> Iterator[NearMiss]:
    """Yield a near miss for each branch that contains a feed-forward, of layers that have none."""
    for branch in () if layer.ffns else layer.branches:
        if is_on_two_streams(branch, anatomy.stacks, anatomy.flow):
            yield NearMiss(layer.name or branch.output, ON_TWO_STREAMS, BEFORE_TWO_STREAMS, code="two-streams")
        elif branch.role == "self-attention" and holds_sums(branch, anatomy.flow):
            yield NearMiss(layer.name or branch.output, LAYER_WITHIN, BEFORE_THE_OUTER, code="nested-layer")


def parse_feed_forward(branch: Branch, model: nn.Module, flow: Dataflow) -> FeedForward:
    """Return the feed-forward that `branch` computes; raises `DoesNotFitError` with the reason if it has another form."""
    if branch.role != "ffn":
        raise no_feed_forward(branch, "it is already a mixture of experts", REPLACED, in_any_form=True)
    if branch.name and isinstance(model.get_submodule(branch.name), FeedForwardBlock):
        raise no_feed_forward(branch, "another pass has already replaced it", REPLACED)
    region = region_of(branch, flow)
    out, into = products_of(branch, region, flow)
    chains = [operand_chain(product, flow) for product in into]
    if len({chain[-1] for chain in chains}) != 1:
        raise no_feed_forward(branch, "its matrices do not all read the same tensor")
    width, units = out.out_features, out.in_features
    if into[0].in_features != width:
        raise no_feed_forward(branch, f"it has {into[0].in_features} columns in and {width} out", in_any_form=True)
    inside = set(region)
    outline = ElementwiseOutline(branch, model, flow, [product_result(product, flow, inside) for product in into], units)
    hidden = outline.build(out.source)
    columns = sum(product.out_features for product in into)
    if units * len(hidden.ports) != columns:
        raise no_feed_forward(branch, f"of {columns} columns only {units * len(hidden.ports)} become hidden units")
    roles = {projection.name: projection.role for projection in branch.projections}
    owner = owner_of([product.node for product in (*into, out)], flow)
    matrices = tuple(matrix_of(product, flow, inside, roles[product.parameter]) for product in into)
    down = matrix_of(out, flow, inside, "down")
    candidates = [node for node in chains[0] if all(node in chain for chain in chains)]  # for x
    own = {node for node in region if owner.encloses(flow.call_of(node))}
    place = place_in_owner(owner, candidates, product_result(out, flow, own), outline)
    dropout = 0.0
    if place is None:
        place = place_over_modules(branch, into, out, hidden.steps, flow)
        outside = {name: p for name, (node, p) in outline.dropouts.items() if not is_computed_by(node, place.bypassed, flow)}
        for name in outside:  # the model's own code still applies them, to x
            setattr(hidden.module, name, nn.Identity())
        dropout = max(outside.values(), default=0.0)
    return FeedForward(
        name=owner.path,
        width=width,
        units=units,
        into=matrices,
        ports=hidden.ports,
        hidden=hidden.module,
        out=down,
        stream_in=place.stream_in,
        tail=None if place.tail is None else place.tail.module,
        path=place.path,
        bypassed=place.bypassed,
        dropout=dropout,
        hidden_paths=hidden.paths,
        tail_paths=() if place.tail is None else place.tail.paths,
    )


def products_of(branch: Branch, region: list[fx.Node], flow: Dataflow) -> tuple[WeightProduct, list[WeightProduct]]:
    """Return the product that writes back to the stream, and the products that it depends on, in the order of the program."""
    inside = set(region)
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    last = [product for product in nearest_products([region[-1]], flow) if product.node in inside]
    if len(last) != 1:
        raise no_feed_forward(branch, f"{len(last)} matrices write to the stream, not one", in_any_form=True)
    out = last[0]
    into = [product for product in nearest_products([out.source], flow) if product.node in inside]
    into.sort(key=lambda product: flow.position[product.node])
    if not into:
        raise no_feed_forward(branch, "there is one matrix and no hidden layer", in_any_form=True)
    if extra := [product.parameter for product in products if product not in (*into, out)]:
        raise no_feed_forward(branch, f"besides two layers of matrices it has {first_few(extra, 3)}", in_any_form=True)
    if any(product.batched for product in (*into, out)):
        raise no_feed_forward(branch, "its matrices are batched")
    return out, into
