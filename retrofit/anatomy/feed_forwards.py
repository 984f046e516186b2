"""A feed-forward branch taken apart, and put together again as one module.

    z_i = x W_i + b_i        one matrix (`up`), two (`gate` and `up`), or both in one (`gate_up`)
    h   = hidden(z_1, …)     unit by unit: activation, gating, dropout
    y   = h W_out + b_out

A branch whose hidden units meet in anything but element-wise operations is not of this form, and `parse_feed_forward` says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.branch_roles import WeightProduct, nearest_products, weight_product
from retrofit.anatomy.inspection import owner_of
from retrofit.anatomy.parts import Branch
from retrofit.anatomy.sites import NearMiss
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, POINTWISE, is_number, op, shape
from retrofit.program.capture import Call, Key
from retrofit.program.dataflow import Dataflow
from retrofit.surgery.edit import Edit
from retrofit.surgery.wrappers import argument_place, find_argument

COMPARISON = frozenset("gt ge lt le eq ne logical_and logical_or logical_not".split())
ELEMENTWISE = POINTWISE | COMPARISON | frozenset("expm1 min max ones_like full_like".split())


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One weight of a feed-forward."""

    module: str  # path of the module that multiplies by it
    role: str  # gate, up, gate_up, down
    weight: str  # parameter names
    bias: str | None
    out_first: bool  # stored (out, in), as nn.Linear does, and not (in, out)


@dataclasses.dataclass(frozen=True)
class Port:
    """Where the hidden units read one matrix's result: unit u at column `start + step·u`."""

    matrix: int
    start: int
    step: int

    def columns(self, units: Tensor) -> Tensor:
        return units if (self.start, self.step) == (0, 1) else self.start + self.step * units


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """One feed-forward of a model, and where a module that takes its place goes."""

    name: str  # path of the module that owns it: the innermost in whose call all of it happens
    width: int  # d, of x and of y
    units: int  # d_ff
    into: tuple[Matrix, ...]
    ports: tuple[Port, ...]
    hidden: fx.GraphModule  # the ports' values, each (…, units or some of them), to h
    out: Matrix
    stream_in: Key  # the argument of the module at `path` that is x
    tail: fx.GraphModule | None  # what the module at `path` does to y before it returns it
    path: str  # the module to replace
    passing: tuple[str, ...] = ()  # modules before it that hand x on untouched from then on
    dropout: float = 0.0  # applied to h by the model's own code: from then on to x

    @property
    def gated(self) -> bool:
        return len(self.ports) > 1

    @property
    def dropped(self) -> str:
        """What becomes of the dropout in the model's own code."""
        return f"in training its layer drops {self.dropout:.0%} of what the feed-forward reads, no longer of its hidden units"


class FeedForwardBlock(nn.Module):
    """Stands where a feed-forward stood; subclasses say in `compute` what y is: (…, d) to (…, d)."""

    def __init__(self, site: FeedForward, old: nn.Module) -> None:
        super().__init__()
        self.width, self.units = site.width, site.units
        self.place = argument_place(old, site.stream_in if site.stream_in is not None else 0)
        self.tail = site.tail

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        container, key = find_argument(self.place, list(args), dict(kwargs))
        y = self.compute(container[key])
        return y if self.tail is None else self.tail(y)

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class RowMajor(Conv1D):
    """y = h W + b with W stored (d_ff, d): the row of a hidden unit is contiguous, and the bias may be missing."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.nx, self.nf = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """The product with these very parameters."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = weight
    made.bias = bias  # type: ignore[assignment]
    return made


# ── Finding ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def feed_forwards(anatomy: Anatomy, layers: Iterable[int] | None = None) -> tuple[list[FeedForward], list[NearMiss]]:
    """Every feed-forward that comes apart, one a set of weights, in order of depth, and the others with the reason.

    `layers` restricts them to those depths of each stack.
    """
    flow = anatomy.flow
    nodes = flow.named
    wanted = None if layers is None else set(layers)
    found: dict[str, FeedForward] = {}
    missed: dict[str, NearMiss] = {}
    for stack in anatomy.stacks:
        for depth, layer in enumerate(stack.layers):
            if wanted is not None and depth not in wanted:
                continue
            for branch in layer.ffns:
                name = branch.name or layer.name or branch.output
                try:
                    site = parse_feed_forward(branch, anatomy.model, flow, nodes)
                    found.setdefault(site.path, site)
                except DoesNotFitError as error:
                    missed.setdefault(name, NearMiss(name, error.why or error.what))
    return list(found.values()), list(missed.values())


def parse_feed_forward(branch: Branch, model: nn.Module, flow: Dataflow, nodes: dict[str, fx.Node]) -> FeedForward:
    """The feed-forward that `branch` computes; raises `DoesNotFitError` with the reason where it is not of that form."""
    if branch.role != "ffn":
        raise unfit(branch, "it is a mixture of experts already")
    if branch.name and isinstance(model.get_submodule(branch.name), FeedForwardBlock):
        raise unfit(branch, "another pass has taken its place already")
    region = flow.between(nodes[branch.source], nodes[branch.output])
    out, into = products_of(branch, region, flow)
    sources = [sources_of(product, flow) for product in into]
    if len({chain[-1] for chain in sources}) != 1:
        raise unfit(branch, "its matrices do not all read the same tensor")
    width, units = out.out_features, out.in_features
    if into[0].in_features != width:
        raise unfit(branch, f"it takes {into[0].in_features} columns in and gives {width}")
    inside = set(region)
    outline = Outline(branch, model, flow, [final(product, flow, inside) for product in into], units)
    hidden, ports, steps, _ = outline.run(out.source)
    columns = sum(product.out_features for product in into)
    if units * len(ports) != columns:
        raise unfit(branch, f"of {columns} columns only {units * len(ports)} become hidden units")
    owner = owner_of([product.node for product in (*into, out)], flow)
    matrices = tuple(matrix_of(product, flow, inside, branch) for product in into)
    names = [role_names(branch)[product.parameter] for product in into]
    matrices = tuple(dataclasses.replace(one, role=name) for one, name in zip(matrices, names, strict=True))
    parts: dict[str, Any] = {
        "name": owner.path,
        "width": width,
        "units": units,
        "into": matrices,
        "ports": ports,
        "hidden": hidden,
        "out": dataclasses.replace(matrix_of(out, flow, inside, branch), role="down"),
    }
    shared = [node for node in sources[0] if all(node in chain for chain in sources)]
    own = {node for node in region if owner.encloses(flow.call_of(node))}
    owned = owned_place(owner, shared, final(out, flow, own), outline, flow)
    if owned is not None:
        return FeedForward(**parts, stream_in=owned[0], tail=owned[1], path=owner.path)
    place = spread_place(branch, into, out, steps, flow)
    outside = {name: p for name, (node, p) in outline.dropouts.items() if not passed(node, place["passing"], flow)}
    for name in outside:  # the model's code goes on applying them, to x
        setattr(hidden, name, nn.Identity())
    return FeedForward(**parts, **place, tail=None, dropout=max(outside.values(), default=0.0))


def unfit(branch: Branch, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"the feed-forward {branch.name or branch.output} does not come apart", why=why, remedy="leave its layer out with layers="
    )


def products_of(branch: Branch, region: list[fx.Node], flow: Dataflow) -> tuple[WeightProduct, list[WeightProduct]]:
    """The matrix that writes back to the stream, and those that it depends on, in order."""
    inside = set(region)
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    last = [product for product in nearest_products([region[-1]], flow) if product.node in inside]
    if len(last) != 1:
        raise unfit(branch, f"{len(last)} matrices write to the stream, not one")
    out = last[0]
    into = [product for product in nearest_products([out.source], flow) if product.node in inside]
    into.sort(key=lambda product: flow.position[product.node])
    if not into:
        raise unfit(branch, "there is one matrix and no hidden layer")
    if extra := [product.parameter for product in products if product not in (*into, out)]:
        raise unfit(branch, f"beside two layers of matrices there are {', '.join(extra[:3])}")
    if any(product.batched for product in (*into, out)):
        raise unfit(branch, "its matrices are batched")
    return out, into


def role_names(branch: Branch) -> dict[str, str]:
    return {projection.name: projection.role for projection in branch.projections}


def light(node: fx.Node, flow: Dataflow) -> fx.Node | None:
    """What a node is but another layout or dtype of, None where it is more."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    before, after = shape(source), shape(node)
    same = op(node) in LAYOUT | CAST and before and after and before[-1] == after[-1]
    return source if same and source in flow.depends else None


def sources_of(product: WeightProduct, flow: Dataflow) -> list[fx.Node]:
    """The tensor that the product reads, and those that it is but another layout or dtype of, the product's own first."""
    chain = [product.source]
    while (before := light(chain[-1], flow)) is not None:
        chain.append(before)
    return chain


def bias_add(node: fx.Node, flow: Dataflow) -> tuple[fx.Node, fx.Node] | None:
    """The addition of a bias to a product's result, and the bias, where there is one."""
    users = flow.uses[node]
    if len(users) != 1 or op(users[0]) != "add":
        return None
    (other,) = [part for part in users[0].all_input_nodes if part is not node] or [None]
    size = shape(node)
    if other in flow.program.parameters and shape(other) == (size or (0,))[-1:]:
        return users[0], other  # type: ignore[return-value]
    return None


def final(product: WeightProduct, flow: Dataflow, inside: set[fx.Node]) -> fx.Node:
    """The node that holds the product's result, its bias added, in the layout it goes on in."""
    node = product.node
    while True:
        if (added := bias_add(node, flow)) is not None:
            node = added[0]
            continue
        following = [user for user in flow.uses[node] if user in inside]
        if len(following) == 1 and op(following[0]) in LAYOUT and light(following[0], flow) is node:
            node = following[0]
            continue
        return node


def matrix_of(product: WeightProduct, flow: Dataflow, inside: set[fx.Node], branch: Branch) -> Matrix:
    """Where the weight and bias of a product are, and how they are stored."""
    names = flow.program.parameters
    weight = next(node for node, name in names.items() if name == product.parameter)
    out_first = op(product.node) == "linear"
    node = next(
        part
        for part in product.node.all_input_nodes
        if part is weight or (part not in flow.depends and product.parameter in flow.parameters_of([part]))
    )
    while node is not weight:
        if op(node) in ("t", "transpose", "permute", "mT", "numpy_T"):
            out_first = not out_first
        elif op(node) not in LAYOUT | CAST:
            raise unfit(branch, f"the weight {product.parameter} is computed (operation {op(node)})")
        node = next(part for part in node.all_input_nodes)
    if shape(weight) != ((product.out_features, product.in_features) if out_first else (product.in_features, product.out_features)):
        raise unfit(branch, f"the weight {product.parameter} is {shape(weight)}")
    bias: fx.Node | None = None
    others = [part for part in product.node.all_input_nodes if part in names and part is not weight]
    if others:
        bias = others[0]
    elif (added := bias_add(product.node, flow)) is not None:
        bias = added[1]
    else:
        following = [user for user in flow.uses[product.node] if user in inside and light(user, flow) is product.node]
        if following and (added := bias_add(following[0], flow)) is not None:
            bias = added[1]
    return Matrix(flow.call_of(product.node).path, "", product.parameter, names[bias] if bias is not None else None, out_first)


class Outline:
    """The element-wise part of a branch as a graph module of its own.

    Modules of the model that are called on the way (activations, dropouts) stay the live modules; what the model's own code does
    becomes nodes.
    """

    def __init__(self, branch: Branch, model: nn.Module, flow: Dataflow, ends: list[fx.Node], columns: int) -> None:
        self.branch, self.model, self.flow, self.ends, self.columns = branch, model, flow, ends, columns
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.ports: dict[Port, fx.Node] = {}
        self.steps: list[Call | fx.Node] = []  # what the hidden units pass, modules and operations
        self.dropout = 0.0
        self.dropouts: dict[str, tuple[fx.Node, float]] = {}  # modules of the outline that stand for the model's own code

    def run(self, result: fx.Node) -> tuple[fx.GraphModule, tuple[Port, ...], list[Call | fx.Node], float]:
        """The module, what its arguments are, the modules and operations passed, and the dropout that no module holds."""
        value = self.value(result)
        ordered = sorted(self.ports, key=lambda port: (port.matrix, port.start))
        moved = fx.Graph()
        env: dict[fx.Node, fx.Node] = {self.ports[port]: moved.placeholder(f"z{index}") for index, port in enumerate(ordered)}
        for node in self.graph.nodes:
            if node not in env:
                env[node] = moved.node_copy(node, env.__getitem__)
        moved.output(env[value])
        return fx.GraphModule(self.root, moved, "Hidden"), tuple(ordered), self.steps, self.dropout

    def value(self, node: fx.Node) -> fx.Node:
        """The outlined value of a node."""
        if node not in self.env:
            self.env[node] = self.outlined(node)
        return self.env[node]

    def outlined(self, node: fx.Node) -> fx.Node:
        if node in self.ends:
            return self.port(Port(self.ends.index(node), 0, 1), node)
        part = self.part(node)
        if part is not None:
            return self.port(*part)
        call = self.module_call(node)
        if call is not None:
            return self.call(call)
        name = op(node)
        source = node.args[0] if node.args else None
        if name == "getitem" and isinstance(source, fx.Node) and op(source) in DROPOUT:
            return self.value(source)
        if isinstance(source, fx.Node) and name in DROPOUT:
            return self.drop(node, source)
        if isinstance(source, fx.Node) and name in LAYOUT and (shape(source) or (0,))[-1] == (shape(node) or (0,))[-1]:
            return self.value(source)
        if name == "glu":
            return self.glu(node)
        if is_number(node):  # on the CPU: such numbers go with tensors on any device
            kwargs = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory")}
            return self.graph.call_function(node.target, node.args, kwargs)  # type: ignore[arg-type]
        if name not in ELEMENTWISE:
            raise unfit(self.branch, f"its hidden units meet in {node.name} (operation {name})")
        for part_of in node.all_input_nodes:
            if part_of not in self.flow.depends and (shape(part_of) or ()) not in ((), (1,)):
                raise unfit(self.branch, f"its hidden units meet a tensor of weights in {node.name} (operation {name})")
            if part_of not in self.flow.depends and not is_number(part_of):
                raise unfit(self.branch, f"the model's own code uses a weight in {node.name} (operation {name})")
        self.steps.append(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.value)
        return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def port(self, port: Port, node: fx.Node) -> fx.Node:
        if (shape(node) or (0,))[-1] != self.columns:
            raise unfit(self.branch, f"{(shape(node) or (0,))[-1]} columns enter where {self.columns} hidden units are")
        if port not in self.ports:
            self.ports[port] = self.graph.placeholder(f"p{len(self.ports)}")
        return self.ports[port]

    def part(self, node: fx.Node) -> tuple[Port, fx.Node] | None:
        """The columns of a matrix's result that `node` selects, None where it selects none."""
        place = self.selected(node)
        if place is None:
            return None
        end, start, step = place
        return Port(self.ends.index(end), start, step), node

    def selected(self, node: fx.Node) -> tuple[fx.Node, int, int] | None:
        """The result that `node` is a selection of columns of, with first column and step."""
        name = op(node)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            return None
        before = shape(source)
        if name == "slice" and source in self.ends and before:
            given = dict(enumerate(node.args))
            dim, start, step = given.get(1, 0), given.get(2, 0), given.get(4, 1)
            if int(dim or 0) % len(before) != len(before) - 1:  # type: ignore[arg-type]
                return None
            return source, int(start or 0) % before[-1], int(step or 1)  # type: ignore[arg-type]
        if name == "getitem" and op(source) in ("chunk", "split", "split_with_sizes") and source.args[0] in self.ends:
            end = source.args[0]
            before = shape(end) or (0,)
            dim = int(source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0))  # type: ignore[arg-type]
            if dim % len(before) != len(before) - 1:
                return None
            sizes = [int(value.shape[-1]) for value in source.meta["val"]]
            return end, sum(sizes[: int(node.args[1])]), 1  # type: ignore[arg-type,return-value]
        return None

    def glu(self, node: fx.Node) -> fx.Node:
        """a · sigmoid(b) for the halves a and b of one matrix's result."""
        end = node.args[0]
        if end not in self.ends:
            raise unfit(self.branch, f"a gate stands behind other operations in {node.name}")
        self.steps.append(node)
        halves = []
        for start in (0, self.columns):
            port = Port(self.ends.index(end), start, 1)  # type: ignore[arg-type]
            self.ports.setdefault(port, self.graph.placeholder(f"p{len(self.ports)}"))
            halves.append(self.ports[port])
        gate = self.graph.call_function(torch.ops.aten.sigmoid.default, (halves[1],))
        return self.graph.call_function(torch.ops.aten.mul.Tensor, (halves[0], gate))

    def drop(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Dropout by the model's own code, as a module."""
        p = float(node.args[1])  # type: ignore[arg-type]
        value = self.value(source)
        if not p:
            return value
        self.dropout = max(p, self.dropout)
        name = f"dropout{len(list(self.root.children()))}"
        self.dropouts[name] = node, p
        self.root.add_module(name, nn.Dropout(p))
        return self.graph.call_module(name, (value,))

    def module_call(self, node: fx.Node) -> Call | None:
        """The outermost element-wise call of one tensor that returns `node`, None where there is none."""
        found = None
        for call in self.flow.call_of(node).chain:
            entered = [part for part in call.inputs.values() if part in self.flow.depends]
            if not call.path or len(entered) != 1 or list(call.outputs.values()) != [node] or None not in call.outputs:
                continue
            within = self.flow.between(entered[0], node)
            if all(self.elementwise(one) for one in within) and not any(
                self.flow.reaches(one, entered[0]) and one is not entered[0] and end is one for one in within for end in self.ends
            ):
                products = any(one in self.ends or weight_product(one, self.flow) is not None for one in within)
                if not products:
                    found = call
        return found

    def elementwise(self, node: fx.Node) -> bool:
        """Whether a unit's result depends on no other unit, and on no weight of its own."""
        single = all(part in self.flow.depends or (shape(part) or ()) in ((), (1,)) for part in node.all_input_nodes)
        kept = op(node) in LAYOUT and (shape(node) or (0,))[-1] == self.columns
        return (op(node) in ELEMENTWISE or kept or op(node) == "getitem") and single

    def call(self, call: Call) -> fx.Node:
        (entered,) = [part for part in call.inputs.values() if part in self.flow.depends]
        value = self.value(entered)
        self.steps.append(call)
        name = call.path.rpartition(".")[2]
        name = name if not hasattr(self.root, name) and name.isidentifier() else f"step{len(list(self.root.children()))}"
        self.root.add_module(name, self.model.get_submodule(call.path))
        return self.graph.call_module(name, (value,))


# ── Where the new module goes ────────────────────────────────────────────────────────────────────────────────────────────────────


def computed_in(call: Call, flow: Dataflow) -> list[fx.Node]:
    """What a call makes of its inputs; what a tracer asserts of them is nothing."""
    return [node for node in flow.computed if call.encloses(flow.call_of(node))]


def owned_place(
    owner: Call, sources: list[fx.Node], y: fx.Node, hidden: Outline, flow: Dataflow
) -> tuple[Key, fx.GraphModule | None] | None:
    """By which argument `owner` takes x, one of `sources`, and what it does to y before it returns it; None where it does more."""
    entered, x = next(((key, node) for key, node in owner.inputs.items() if node in sources), (None, None))
    if not owner.path or x is None or list(owner.outputs) != [None]:
        return None
    result = owner.outputs[None]
    if not flow.reaches(y, result):
        return None
    own = computed_in(owner, flow)
    if any(not flow.reaches(x, node) or not (flow.reaches(node, y) or flow.reaches(y, node)) for node in own):
        return None
    after = flow.between(y, result) if result is not y else []
    if set(after) != {node for node in own if flow.reaches(y, node) and node is not y}:
        return None
    tail = Outline(hidden.branch, hidden.model, flow, [y], (shape(y) or (0,))[-1])
    try:
        module, _, steps, dropped = tail.run(result)
    except DoesNotFitError:
        return None
    return entered, module if steps or dropped else None


def spread_place(
    branch: Branch, into: list[WeightProduct], out: WeightProduct, steps: list[Call | fx.Node], flow: Dataflow
) -> dict[str, Any]:
    """How a feed-forward of several modules becomes one: the last computes it all, those before hand x on."""
    single = [flow.call_of(product.node) for product in (*into, out)]
    if len(into) > 1:
        raise unfit(branch, "it is spread over several modules, and its gate is applied by code between them")
    passing = [single[0]]
    for step in steps:
        call = around(step, into[0], out, flow) if isinstance(step, fx.Node) else step
        if call is None:
            raise unfit(branch, f"it is spread over several modules, with code between them: {op(step)} in {step.name}")  # type: ignore[union-attr,arg-type]
        passing.append(call)
    for call, product in zip(single, (*into, out), strict=True):
        others = computed_in(call, flow)
        if not call.path or any(op(node) not in LAYOUT | CAST | {"add"} and node is not product.node for node in others):
            raise unfit(branch, f"the matrix {product.parameter} is applied by the code of {call.path or 'the model'} itself")
    key = next((key for key, node in single[-1].inputs.items() if node in flow.depends), 0)
    outermost = [call for call in passing if not any(other.encloses(call) for other in passing if other is not call)]
    for call in outermost:
        if list(call.outputs) != [None]:
            raise unfit(branch, f"it is spread over several modules, and {call.path} hands on more than one tensor")
        if list(call.inputs) != [0]:
            raise unfit(branch, f"it is spread over several modules, and {call.path} takes more than one tensor, or one by name")
    if list(single[-1].outputs) != [None]:
        raise unfit(branch, f"it is spread over several modules, and {single[-1].path} returns more than one tensor")
    return {"stream_in": key, "path": single[-1].path, "passing": tuple(dict.fromkeys(call.path for call in outermost))}


def passed(node: fx.Node, passing: tuple[str, ...], flow: Dataflow) -> bool:
    """Whether a node is computed by one of the modules that hand x on from then on."""
    return any(call.path in passing for call in flow.call_of(node).chain)


def around(node: fx.Node, into: WeightProduct, out: WeightProduct, flow: Dataflow) -> Call | None:
    """The outermost call that computes `node` and nothing but steps of the feed-forward, from one tensor on its way to another."""
    found = None
    for call in flow.call_of(node).chain:
        entered = [part for part in call.inputs.values() if part in flow.depends]
        if not call.path or len(entered) != 1 or call.inputs.get(0) is not entered[0] or list(call.outputs) != [None]:
            continue
        left = call.outputs[None]
        own = set(computed_in(call, flow))
        begins = entered[0] in sources_of(into, flow) or flow.reaches(into.node, entered[0])
        if begins and flow.reaches(left, out.source) and out.node not in own and own <= set(flow.between(entered[0], left)):
            found = call
    return found


# ── Putting a module there ───────────────────────────────────────────────────────────────────────────────────────────────────────


def install(site: FeedForward, block: nn.Module, edit: Edit) -> None:
    """`block`, which takes x and returns y, stands where the feed-forward stood."""
    for path in site.passing:
        edit.replace_module(path, nn.Identity())
    edit.replace_module(site.path, block)


def parameters_of(matrix: Matrix, model: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    return model.get_parameter(matrix.weight), None if matrix.bias is None else model.get_parameter(matrix.bias)


def out_first(matrix: Matrix, model: nn.Module) -> Tensor:
    """The weight (out, in), whichever way it is stored."""
    weight = model.get_parameter(matrix.weight).detach()
    return weight if matrix.out_first else weight.t()
