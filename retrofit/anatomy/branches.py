"""The branches of a residual stream: their roles, their projections, and the modules that compute them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from torch import fx

from retrofit.anatomy.attention_cores import Attention, find_attentions, product_operands
from retrofit.anatomy.parts import Branch, Layer, Projection, Role, Stack
from retrofit.anatomy.residual_streams import Residual, every_chain, is_addition, residual_at
from retrofit.anatomy.weights import WeightProduct, nearest_products, weight_product
from retrofit.program.aten_ops import (
    ACTIVATION,
    CAST,
    DROPOUT,
    LAYOUT,
    MASKING,
    PRODUCT,
    ROUTING,
    SELECTION,
    is_heavy,
    mixes_tokens,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call


def role_of(region: list[fx.Node], cores: list[Attention], origin: fx.Node, flow: Dataflow) -> Role:
    """Return the role of the branch computed by `region`, with the attentions `cores`, in the stream that began at `origin`."""
    if cores:
        own = any(reads_own_keys(core, origin, flow) or has_earlier_keys(core, origin, flow) for core in cores)
        return "self-attention" if own else "cross-attention"
    routed = any(op(node) in ROUTING for node in region)
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    if any(found.batched for found in products) or (routed and products):
        return "moe"
    positions = set((shape(origin) or ())[:-1])
    if any(mixes_tokens(node) or reads_other_positions(node, positions, flow) for node in region):
        return "other mixer"
    if any(op(node) in PRODUCT and sum(part in flow.depends for part in product_operands(node)) == 2 for node in region):
        return "other mixer"
    return "ffn" if products else "other mixer"


def reads_own_keys(core: Attention, origin: fx.Node, flow: Dataflow) -> bool:
    """Return whether any keys are computed from the stream at `origin`, or are projections of its normalization or masking."""
    if any(flow.reaches(origin, key) for key in core.keys):
        return True
    above = set(flow.carried_chain(origin))
    products = nearest_products(list(core.keys), flow)
    read = [part for product in products for part in product_operands(product.node) if part in flow.depends]
    return any(not above.isdisjoint(flow.carried_chain(part)) for part in read)


def has_earlier_keys(core: Attention, origin: fx.Node, flow: Dataflow) -> bool:
    """Return whether the keys come from an earlier layer that the stream at `origin` also depends on."""
    return any(flow.reaches(product.node, origin) for product in nearest_products([core.key], flow))


def reads_other_positions(node: fx.Node, positions: set[int], flow: Dataflow) -> bool:
    """Return whether the operation selects, shifts or projects along a dimension with the extent of one of the `positions`."""
    name, size = op(node), shape(node)
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    before = shape(source)
    if size is None or not size or (source is not None and source not in flow.depends):
        return False
    if name == "flip" and before:
        return any(dim % len(before) != len(before) - 1 and before[dim] in positions for dim in node.args[1])  # type: ignore[union-attr,operator,index]
    if name in ("slice", "select", "narrow", "index_select") and before:
        along = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        return before != size and along % len(before) != len(before) - 1 and before[along] in positions
    if name in ("pad", "constant_pad_nd"):  # padding before and slicing off behind shifts and keeps the extent
        padded = [len(size) - 1 - place // 2 for place, count in enumerate(node.args[1]) if count]  # type: ignore[arg-type]
        return before is not None and any(dim != len(size) - 1 and before[dim] in positions for dim in padded)
    if name in ("transpose", "permute", "swapaxes", "movedim", "mT", "t") and before:
        products = [user for user in node.users if op(user) in PRODUCT and user.args[0] is node]
        return bool(products) and before[-1] != size[-1] and size[-1] in positions
    return False


def describe_projections(region: list[fx.Node], role: Role, cores: list[Attention], flow: Dataflow) -> tuple[Projection, ...]:
    """Return the weight matrices of a branch with the attentions `cores`, and their roles, in order of use."""
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    if role == "cross-attention":  # keys and values come from outside the region
        products = [*key_value_products_outside(region, cores, flow), *products]
    names: dict[fx.Node, str] = {}
    if "attention" in role:
        names = attention_roles(products, cores, flow)
    elif role != "other mixer":
        names = ffn_roles(products, region, flow)
    projections: dict[tuple[str, str], Projection] = {}
    for product in products:
        label = names.get(product.node, "projection")
        projections.setdefault(
            (product.parameter, label), Projection(product.parameter, label, product.in_features, product.out_features)
        )
    return tuple(projections.values())


def key_value_products_outside(region: list[fx.Node], cores: list[Attention], flow: Dataflow) -> list[WeightProduct]:
    """Return the products outside of a branch that compute its keys and values."""
    inside = set(region)
    found = [product for core in cores for product in nearest_products([core.key, core.value], flow)]
    return [product for product in dict.fromkeys(found) if product.node not in inside]


def attention_roles(products: list[WeightProduct], cores: list[Attention], flow: Dataflow) -> dict[fx.Node, str]:
    """Return the role of each product node: q, k, v, several of these, or out."""
    uses: dict[fx.Node, str] = {}
    for core in cores:
        for letter, operand in (("q", core.query), ("k", core.key), ("v", core.value)):
            for product in nearest_products([operand], flow):
                uses[product.node] = uses.get(product.node, "") + (letter if letter not in uses.get(product.node, "") else "")
    for product in products:
        if any(flow.reaches(core.result, product.node) for core in cores):
            uses[product.node] = "out"
    return uses


def ffn_roles(products: list[WeightProduct], region: list[fx.Node], flow: Dataflow) -> dict[fx.Node, str]:
    """Return the role of each product node: router, gate, up, gate_up or down."""
    if not products:
        return {}
    names: dict[fx.Node, str] = {}
    last = {product.node for product in nearest_products([region[-1]], flow)}
    routing = [node for node in region if op(node) in ROUTING]
    for product in products:
        later = [other for other in products if other is not product and flow.reaches(product.node, other.node)]
        if (
            routing
            and not product.batched
            and any(flow.reaches(product.node, node) for node in routing)
            and not any(other.source is product.node for other in later)  # a router's result is only used for selection
        ):
            names[product.node] = "router"
        elif product.node in last and len(products) > 1:
            names[product.node] = "down"
        else:
            names[product.node] = gate_role(product, flow)
    return names


def gate_role(product: WeightProduct, flow: Dataflow) -> str:
    """Return gate, up or gate_up for a matrix whose result is multiplied by another representation, else up."""
    pending, seen, split = [(product.node, False)], set(), False
    while pending:
        node, through = pending.pop(0)
        for user in flow.uses[node]:
            if (user, through) in seen:
                continue
            seen.add((user, through))
            name = op(user)
            parts = [part for part in user.all_input_nodes if part in flow.depends]
            if name == "glu":
                return "gate_up"
            if name == "mul" and len(parts) == 2 and shape(parts[0]) == shape(parts[1]):
                if all(flow.reaches(product.node, part) for part in parts):
                    if split or op(node) in SELECTION | {"getitem"}:  # both halves of its result
                        return "gate_up"
                    pending.append((user, True))  # x · sigmoid(x): an activation written out
                    continue
                return "gate" if through else "up"
            if name in SELECTION | {"getitem"}:
                split = True
            if name in ACTIVATION:
                pending.append((user, True))
            elif name in LAYOUT | CAST | DROPOUT | SELECTION | MASKING | {"getitem", "mul", "add", "div", "pow", "neg"}:
                pending.append((user, through))
    return "up"


def is_mixer(branch: Branch) -> bool:
    """Return whether the branch mixes tokens: an attention or another mixer."""
    return branch.role not in ("ffn", "moe")


def region_of(branch: Branch, flow: Dataflow) -> list[fx.Node]:
    """Return the nodes that compute a branch, in order."""
    return flow.between(flow.node(branch.source), flow.node(branch.output))


def is_in_branch(core: Attention, chain: list[Residual], flow: Dataflow) -> bool:
    """Return whether the attention is in a branch of the chain."""
    return any(flow.reaches(core.result, branch) for residual in chain for branch in residual.branches)


def cores_in(region: list[fx.Node], cores: list[Attention]) -> list[Attention]:
    """Return the attentions whose result is in the region."""
    inside = set(region)
    return [core for core in cores if core.result in inside]


def describe_branches(chain: list[Residual], cores: list[Attention], flow: Dataflow) -> list[list[Branch]]:
    """Return the branches of each residual addition of a stream."""
    origin = chain[0].base
    table = []
    for residual in chain:
        branches = []
        for output in residual.branches:
            region = flow.between(residual.base, output)
            inner = cores_in(region, cores)
            role = role_of(region, inner, origin, flow)
            weights = describe_projections(region, role, inner, flow)
            sizes = flow.parameters_of(region)
            sizes.update({item.name: item.in_features * item.out_features for item in weights if item.name not in sizes})
            branches.append(
                Branch(
                    role=role,
                    name=owner_of([node for node in region if is_heavy(node)] or region, flow).path,
                    projections=weights,
                    parameters=sum(sizes.values()),
                    source=residual.base.name,
                    output=output.name,
                    add=residual.add.name,
                    heads=inner[0].heads if inner else None,
                    gated=any(item.role in ("gate", "gate_up") for item in weights) and role in ("ffn", "moe"),
                )
            )
        table.append(branches)
    return table


ON_TWO_STREAMS = "it reads the stream after another branch, and is added to the stream before that branch: these are two streams"
BEFORE_TWO_STREAMS = "apply passes that make two streams last"


def is_on_two_streams(branch: Branch, stacks: Iterable[Stack], flow: Dataflow) -> bool:
    """Return whether sums of other branches lie within the branch.

    Then it reads the newer of two streams, and is added to the older one.
    """
    sums = {other.add for stack in stacks for layer in stack.layers for other in layer.branches} - {branch.add}
    return any(node.name in sums for node in region_of(branch, flow))


LAYER_WITHIN = "it is a nested layer: a branch with branches of its own"
BEFORE_THE_OUTER = "rewrite the feed-forwards before their layers are wrapped"


def holds_sums(branch: Branch, flow: Dataflow) -> bool:
    """Return whether the branch adds branches of its own to its input: a layer within a layer."""
    region = set(region_of(branch, flow))
    sums = (residual_at(node, flow, {}) for node in region if is_addition(node, flow))
    return any(residual is not None and residual.base in region and region.issuperset(residual.branches) for residual in sums)


@dataclasses.dataclass(frozen=True)
class InnerLayers:
    """Layers within layers of a program: a layer that computes some of the tokens, for example, is one branch of the stream."""

    flow: Dataflow

    @functools.cached_property
    def chains(self) -> list[list[Residual]]:
        return every_chain(self.flow)[0]

    @functools.cached_property
    def cores(self) -> list[Attention]:
        return find_attentions(self.flow)

    def inside(self, layer: Layer) -> Layer:
        """Return the layer with the branches that its only branch adds to its input; the layer itself if there are none."""
        if layer.ffns or len(layer.branches) != 1 or not holds_sums(layer.branches[0], self.flow):
            return layer
        (around,) = layer.branches
        region = set(region_of(around, self.flow))
        inner = [
            chain
            for chain in self.chains
            if all(region.issuperset((residual.base, residual.add, *residual.branches)) for residual in chain)
        ]
        parts = describe_branches(max(inner, key=len), self.cores, self.flow) if inner else []
        found = tuple(branch for part in parts for branch in part)
        return dataclasses.replace(layer, branches=found) if any(not is_mixer(branch) for branch in found) else layer


def owner_of(nodes: list[fx.Node], flow: Dataflow) -> Call:
    """Return the innermost module call in which all of `nodes` were computed."""
    common = flow.call_of(nodes[0])
    for node in nodes[1:]:
        call = flow.call_of(node)
        common = next(outer for outer in common.chain if outer.encloses(call))
    return common
