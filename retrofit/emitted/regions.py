"""Regions of a program: nested intervals of its nodes, each of which can become a module.

A module call is an interval. If the code of one call contains a layer, an attention, a feed-forward, a look-up or a head of the
anatomy, that is an interval too, unless other operations are interleaved with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.anatomy import Anatomy
from retrofit.anatomy.attention_cores import Attention, find_attentions
from retrofit.anatomy.branches import region_of
from retrofit.anatomy.feed_forward_parsing import products_of
from retrofit.anatomy.parts import Branch, Stack
from retrofit.anatomy.weights import WeightProduct, nearest_products, weight_product
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, NORM, is_heavy, op, shape
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Program

MOMENTS = frozenset(("mean", "var", "var_mean", "std"))
CHILD_NAMES = {
    "self-attention": "attention",
    "cross-attention": "cross_attention",
    "ffn": "ffn",
    "moe": "moe",
    "other mixer": "mixer",
}


@dataclasses.dataclass(eq=False)
class Region:
    """The nodes from position `first` to `last`, and the regions inside it."""

    name: str  # within the enclosing region, dotted
    path: str  # of the module whose call it is, or whose code contains it
    first: int
    last: int
    inside: list[Region] = dataclasses.field(default_factory=list)
    in_code: bool = True  # part of the code of a larger module, not the call of a module

    def holds(self, other: Region) -> bool:
        """Return whether `other` lies inside this region or equals it."""
        return self.first <= other.first and other.last <= self.last

    def crosses(self, other: Region) -> bool:
        """Return whether the two overlap and neither contains the other."""
        apart = self.last < other.first or other.last < self.first
        return not (apart or self.holds(other) or other.holds(self))


def program_region(anatomy: Anatomy, flow: Dataflow) -> Region:
    """Return the whole program as a region with every module call, and every part of the anatomy that is no module, inside it."""
    whole = Region("", "", 0, len(flow.nodes) - 1)
    found = [*call_regions(flow), *anatomy_regions(anatomy, flow)]
    found.sort(key=lambda region: (region.first, -region.last))
    kept: list[Region] = []
    for region in found:
        if not any(region.crosses(other) for other in kept):
            kept.append(region)
    around = [whole]
    for region in kept:
        while not around[-1].holds(region):
            around.pop()
        around[-1].inside.append(region)
        around.append(region)
    make_names_relative(whole)
    return whole


def call_regions(flow: Dataflow) -> Iterator[Region]:
    """Yield the interval of every module call that computes something."""
    spans: dict[Call, tuple[int, int]] = {}
    for node in flow.nodes:
        if node.op != "call_function" or (node not in flow.depends and not isinstance(node.meta.get("val"), torch.Tensor)):
            continue
        position = flow.position[node]
        for call in flow.call_of(node).chain:
            first, last = spans.get(call, (position, position))
            spans[call] = min(first, position), max(last, position)
    for call, (first, last) in sorted(spans.items(), key=lambda item: item[0].number):
        if call.path:
            yield Region(call.path + (f"_{call.index}" if call.index else ""), call.path, first, last, in_code=False)


def anatomy_regions(anatomy: Anatomy, flow: Dataflow) -> Iterator[Region]:
    """Yield the parts of the anatomy that are code of a larger module."""
    cores = find_attentions(flow)
    several = len(anatomy.stacks) > 1
    for number, stack in enumerate(anatomy.stacks):
        prefix = f"{stack.kind}{number if [each.kind for each in anatomy.stacks].count(stack.kind) > 1 else ''}." if several else ""
        for depth, layer in enumerate(stack.layers):
            if not layer.name:
                yield layer_region(f"{prefix}layers.{depth}", stack, depth, flow)
        if (tail := tail_region(stack, anatomy, flow)) is not None:
            yield tail
        for layer in stack.layers:
            for branch in layer.branches:
                if (region := branch_region(branch, flow, cores)) is not None:
                    yield region
            for branch in layer.attentions:
                yield from projection_regions(branch, flow, cores)
    for part, name in [*((part, "embedding") for part in anatomy.embeddings), (anatomy.head, "head")]:
        if part is not None and not is_only_weight_of_its_module(flow.node(part.node), flow):
            node = flow.node(part.node)
            last = max((flow.position[user] for user in flow.uses[node] if is_bias(user, node, flow)), default=flow.position[node])
            yield Region(name, flow.call_of(node).path, flow.position[node], last)
    yield from stem_regions(anatomy, flow)


def stem_regions(anatomy: Anatomy, flow: Dataflow) -> Iterator[Region]:
    """Yield the steps in the model's own code between a look-up of tokens and the layers that depend on the width of the stream.

    These are norms, also decomposed ones, products with a weight, and position embeddings that are added to the tokens.
    """
    looked_up = [flow.node(part.node) for part in anatomy.embeddings]
    found: dict[tuple[fx.Node, fx.Node], str] = {}  # by the first node and the last
    for stack in anatomy.stacks:
        for look_up in looked_up:
            steps = flow.between(look_up, flow.node(stack.entry))
            for node in steps:
                if op(node) in NORM:
                    found[node, node] = "norm"
                elif op(node) == "add" and not flow.reaches_through_heavy_op(look_up, node):
                    found |= {(part, part): "addend" for part in node.all_input_nodes if not flow.reaches(look_up, part)}
            for stretch in split_where_one_value_is_live(look_up, steps):
                if op(stretch[-1]) == "linear" and weight_product(stretch[-1], flow) is not None:
                    found[stretch[-1], stretch[-1]] = "projection"
                elif any(op(node) in MOMENTS for node in stretch) and not any(map(is_heavy, stretch)):
                    found[stretch[0], stretch[-1]] = "norm"
    for (first, last), name in found.items():
        if last.op == "call_function" and last not in looked_up and shape(last) and not flow.call_of(last).path:
            yield Region(name, "", flow.position[first], flow.position[last])


def split_where_one_value_is_live(early: fx.Node, steps: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the steps from `early` to the last, split after each step whose output is the only value of a token read later."""
    place = {node: at for at, node in enumerate(steps)}
    tokens = (shape(early) or ())[:-1]
    first, reach = 0, max((place[user] for user in early.users if user in place), default=0)  # position of the last reader so far
    for at, node in enumerate(steps):
        if at >= reach and (shape(node) or ())[:-1] == tokens:
            yield steps[first : at + 1]
            first = at + 1
        reach = max([reach, *(place[user] for user in node.users if user in place)])


def tail_region(stack: Stack, anatomy: Anatomy, flow: Dataflow) -> Region | None:
    """Return the code around the layers that processes each token between the last layer and the head, such as a norm."""
    if anatomy.head is None:
        return None
    leaves, head = last_node_of_layer(stack, len(stack.layers) - 1, flow), flow.node(anatomy.head.node)
    between = [node for node in flow.between(leaves, head) if node is not head and node.op == "call_function"]
    call = flow.call_of(head)
    products = [node for node in between if is_heavy(node)]
    if not between or any(flow.call_of(node) is not call for node in between) or shape(between[-1]) != shape(leaves):
        return None
    if any(weight_product(node, flow) is None for node in products):
        return None
    return Region("transform" if products else "norm", call.path, flow.position[between[0]], flow.position[between[-1]])


def is_only_weight_of_its_module(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the module whose code computes `node` has only the weight that `node` reads, and its bias."""
    call = flow.call_of(node)
    own = [
        other
        for other in flow.nodes
        if other in flow.depends and other.op == "call_function" and call.encloses(flow.call_of(other))
    ]
    others = [other for other in own if other is not node and not is_bias(other, node, flow)]
    return bool(call.path) and not flow.parameters_of(others)


def is_bias(user: fx.Node, node: fx.Node, flow: Dataflow) -> bool:
    """Return whether `user` is the only reader of `node`, directly after it, and adds a parameter."""
    others = [part for part in user.all_input_nodes if part is not node]
    alone = len(flow.uses[node]) == 1 and flow.position.get(user) == flow.position[node] + 1
    return op(user) == "add" and alone and len(others) == 1 and others[0] in flow.program.parameters


def layer_region(name: str, stack: Stack, depth: int, flow: Dataflow) -> Region:
    """Return the region from the node after the layer's input to the last before the next layer, including a norm after a sum."""
    inside = flow.between(flow.node(stack.layers[depth].entry), flow.node(stack.layers[depth].exit))
    last = last_node_of_layer(stack, depth, flow)
    return Region(name, stack.name, min(flow.position[node] for node in inside), flow.position[last])


def last_node_of_layer(stack: Stack, depth: int, flow: Dataflow) -> fx.Node:
    """Return the last step on the stream before the next layer; after the last layer, the same steps as after the previous one."""
    leaves = flow.node(stack.layers[depth].exit)
    if len(stack.layers) < 2:
        return leaves
    after = min(depth, len(stack.layers) - 2)
    steps = flow.between(flow.node(stack.layers[after].exit), flow.node(stack.layers[after + 1].entry))
    if any(map(is_heavy, steps)):
        return leaves
    if depth == after:
        return steps[-1] if steps else leaves
    last = leaves
    for step in steps:
        same = [user for user in flow.uses[last] if op(user) == op(step)]
        if len(same) != 1:
            return leaves
        (last,) = same
    return last


def branch_region(branch: Branch, flow: Dataflow, cores: list[Attention]) -> Region | None:
    """Return the span from a branch's first product to its last, if one module's code computes both; else None."""
    region = region_of(branch, flow)
    inside = set(region)
    if branch.role == "ffn":
        return feed_forward_region(branch, region, flow)
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    ends = [product for product in nearest_products([region[-1]], flow) if product.node in inside]
    if not any(core.result in inside for core in cores) or not products or len(ends) != 1:
        return None
    (last,) = ends
    if is_in_modules(products, last.node, inside, flow):
        return None
    first = min(flow.position[product.node] for product in products)
    return Region(CHILD_NAMES[branch.role], flow.call_of(last.node).path, first, position_with_bias(last.node, inside, flow))


def feed_forward_region(branch: Branch, region: list[fx.Node], flow: Dataflow) -> Region | None:
    """Return the span of a feed-forward, if no other computation is interleaved with it."""
    span = feed_forward_span(branch, region, flow)
    inside = set(region)
    if span is None or any(span.first <= flow.position[node] <= span.last and node not in inside for node in flow.computations):
        return None
    return span


def feed_forward_span(branch: Branch, region: list[fx.Node], flow: Dataflow) -> Region | None:
    """Return the span of a feed-forward from its first product to its last, with all between; None if it is already a module."""
    try:
        out, into = products_of(branch, region, flow)
    except DoesNotFitError:
        return None
    inside = set(region)
    if any(flow.call_of(product.node) is not flow.call_of(out.node) for product in into):
        return spread_span([flow.call_of(product.node) for product in (*into, out)], inside, flow)
    if is_in_modules([*into, out], out.node, inside, flow):
        return None
    first = min(flow.position[product.node] for product in (*into, out))
    return Region(CHILD_NAMES["ffn"], flow.call_of(out.node).path, first, position_with_bias(out.node, inside, flow))


def is_in_modules(products: list[WeightProduct], last: fx.Node, inside: set[fx.Node], flow: Dataflow) -> bool:
    """Return whether the products, or the branch, have modules of their own."""
    call = flow.call_of(last)
    own = [node for node in flow.computations if flow.call_of(node) is call]
    return any(flow.call_of(product.node) is not call for product in products) or set(own) <= inside


def position_with_bias(last: fx.Node, inside: set[fx.Node], flow: Dataflow) -> int:
    """Return the position of the product `last`, or of the bias that is added to it."""
    following = [user for user in flow.uses[last] if user in inside and is_bias(user, last, flow)]
    return flow.position[following[0] if following else last]


def spread_span(calls: list[Call], inside: set[fx.Node], flow: Dataflow) -> Region | None:
    """Return a feed-forward whose matrices are modules and whose other operations are code of the enclosing module."""
    around = next(call for call in calls[0].chain if all(call.encloses(inner) for inner in calls))
    places = [flow.position[node] for node in flow.computations if any(call.encloses(flow.call_of(node)) for call in calls)]
    first, last = min(places), max(places)
    within = [node for node in flow.computations if first <= flow.position[node] <= last and node in inside]
    code = [node for node in within if flow.call_of(node) is around and op(node) not in LAYOUT | CAST | DROPOUT]
    whole = all(node in inside for node in flow.computations if around.encloses(flow.call_of(node)))
    if not code or whole:
        return None
    return Region(CHILD_NAMES["ffn"], around.path, first, last)


def projection_regions(branch: Branch, flow: Dataflow, cores: list[Attention]) -> Iterator[Region]:
    """Yield the products in an attention's own code for queries, keys and values, and the one that reads its result."""
    region = region_of(branch, flow)
    held = [core for core in cores if core.result in set(region)]
    if len(held) != 1:
        return
    (core,) = held
    made = {id(found.node): found for operand in (core.query, core.key, core.value) for found in nearest_products([operand], flow)}
    after = [found for found in (weight_product(node, flow) for node in region) if found and flow.reaches(core.result, found.node)]
    for product in [*made.values(), *after]:
        node = product.node
        if is_only_weight_of_its_module(node, flow):
            continue
        operands = zip("qkv", (core.query, core.key, core.value), strict=True)
        letters = "".join(letter for letter, operand in operands if flow.reaches(node, operand))
        last = next((flow.position[user] for user in flow.uses[node] if is_bias(user, node, flow)), flow.position[node])
        yield Region(letters or "out", flow.call_of(node).path, flow.position[node], last)


def make_names_relative(region: Region) -> None:
    """Make names relative to the enclosing region, and different among siblings."""
    taken: set[str] = set()
    for part in region.inside:
        prefix = region.path + "." if region.path else ""
        name = part.name.removeprefix(prefix) if part.name.startswith(prefix) and part.name != region.path else part.name
        base, count = name, 0
        while name in taken or any(other.startswith(name + ".") for other in taken):
            count += 1
            name = f"{base}_{count}"
        taken.add(name)
        part.name = name
        make_names_relative(part)


# ── Weights that are read in parts ────────────────────────────────────────────────────────────────────────────────────────────────


SELECTING = frozenset("select slice split split_with_sizes chunk unbind getitem".split())
WeightSlices = dict[fx.Node, tuple[str, nn.Parameter]]


def weight_slices(model: nn.Module, flow: Dataflow, anatomy: Anatomy | None) -> WeightSlices:
    """Return the nodes that select parts of parameters, if nothing reads the whole and no two parts overlap.

    No layer may read two parts of a stack of matrices: otherwise it is the weight of one layer, such as its experts.
    """
    found: WeightSlices = {}
    for held, name in flow.program.parameters.items():
        whole = model.get_parameter(name)
        parts = selected_parts(held, whole.detach())
        if len(parts) < 2 or not all(isinstance(part, Tensor) for part in parts.values()):
            continue
        reads = torch.zeros(whole.shape, device="cpu")
        for part in selected_parts(held, reads).values():
            part += 1  # a view: counts how often each element is read
        if reads.max() > 1 or (whole.dim() > 2 and not are_read_by_distinct_layers(list(parts), flow, anatomy)):
            continue
        for number, (node, part) in enumerate(parts.items()):
            found[node] = f"{name}.{number}", nn.Parameter(part, requires_grad=whole.requires_grad)
    return found


def selected_parts(node: fx.Node, value: Any) -> dict[fx.Node, Any]:
    """Return the parts of a parameter that are read, by the nodes that select them; empty if anything else of it is read.

    `value` is that of `node`, and the parts are views of it. A part is the result of selections at constant positions, and is read
    only by other operations.
    """
    selections = [user for user in node.users if op(user) in SELECTING and user.all_input_nodes == [node]]
    if node.op != "placeholder" and len(selections) < len(node.users):
        return {} if selections else {node: value}
    if not selections or len(selections) < len(node.users):
        return {}
    parts: dict[fx.Node, Any] = {}
    for user in selections:
        inner = selected_parts(user, user.target(value, *user.args[1:], **user.kwargs))  # type: ignore[operator]
        if not inner:
            return {}
        parts |= inner
    return parts


def are_read_by_distinct_layers(parts: list[fx.Node], flow: Dataflow, anatomy: Anatomy | None) -> bool:
    """Return whether no layer reads two of the parts."""
    if anatomy is None:
        return False
    for layer in anatomy.layers:
        inside = flow.between(flow.node(layer.entry), flow.node(layer.exit))
        read = [
            part for part in parts if any(flow.reaches(part, operand) for node in inside for operand in weight_operands(node, flow))
        ]
        if len(read) > 1:
            return False
    return True


def weight_operands(node: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """Return the operands of a node that do not depend on the inputs."""
    return [operand for operand in node.all_input_nodes if operand not in flow.depends and operand in flow.position]


def replace_by_parameters(program: Program, slices: WeightSlices) -> WeightSlices:
    """Make each part a placeholder of the program and a parameter of its own; return the parts by these placeholders."""
    first = next(iter(program.graph.nodes))
    placeholders: WeightSlices = {}
    for node, (name, parameter) in slices.items():
        with program.graph.inserting_before(first):
            place = program.graph.placeholder(f"p_{name.replace('.', '_')}")
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place)
        program.parameters[place] = name
        placeholders[place] = name, parameter
        while not node.users and node.op != "placeholder":
            (source,) = node.all_input_nodes
            program.graph.erase_node(node)
            program.owner.pop(node, None)
            node = source
        program.parameters.pop(node, None)
    return placeholders
