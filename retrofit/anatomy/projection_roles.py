"""What each weight matrix of a branch projects: queries, keys, values, gates, up, down, or the choice of an expert."""

from __future__ import annotations

from torch import fx

from retrofit.anatomy.attention_cores import Attention
from retrofit.anatomy.parts import Projection, Role
from retrofit.anatomy.weight_products import WeightProduct, nearest_products, weight_product
from retrofit.program.aten_ops import (
    ACTIVATION,
    CAST,
    DROPOUT,
    LAYOUT,
    MASKING,
    ROUTING,
    SELECTION,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow


def describe_projections(region: list[fx.Node], role: Role, cores: list[Attention], flow: Dataflow) -> tuple[Projection, ...]:
    """The weight matrices of a branch and what each projects, in order of use."""
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    if role == "cross-attention":  # keys and values come from outside the region
        products = [*key_value_products_outside(region, cores, flow), *products]
    names: dict[fx.Node, str] = {}
    if "attention" in role:
        names = attention_roles(products, region, cores, flow)
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
    """The products that make the keys and values of a branch outside of it."""
    inside = set(region)
    found = []
    for core in cores:
        if core.result in inside:
            found.extend(nearest_products([core.key, core.value], flow))
    return [product for product in dict.fromkeys(found) if product.node not in inside]


def attention_roles(
    products: list[WeightProduct], region: list[fx.Node], cores: list[Attention], flow: Dataflow
) -> dict[fx.Node, str]:
    """q, k, v, several of these or out, by product node."""
    inside = set(region)
    attentions = [core for core in cores if core.result in inside]
    uses: dict[fx.Node, str] = {}
    for core in attentions:
        for letter, operand in (("q", core.query), ("k", core.key), ("v", core.value)):
            for product in nearest_products([operand], flow):
                uses[product.node] = uses.get(product.node, "") + (letter if letter not in uses.get(product.node, "") else "")
    for product in products:
        if any(flow.reaches(core.result, product.node) for core in attentions):
            uses[product.node] = "out"
    return uses


def ffn_roles(products: list[WeightProduct], region: list[fx.Node], flow: Dataflow) -> dict[fx.Node, str]:
    """router, gate, up, gate_up or down, by product node."""
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
            and not feeds_another_product(product, later)
        ):
            names[product.node] = "router"
        elif product.node in last and len(products) > 1:
            names[product.node] = "down"
        else:
            names[product.node] = gate_role(product, flow)
    return names


def feeds_another_product(product: WeightProduct, later: list[WeightProduct]) -> bool:
    """Whether the product's result is itself multiplied by a weight (a router's only selects)."""
    return any(other.source is product.node for other in later)


def gate_role(product: WeightProduct, flow: Dataflow) -> str:
    """gate, up or gate_up for a matrix whose result meets a multiplication of two representations, up for any other."""
    pending, activated, split = [(product.node, False)], False, False
    seen = set()
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
                    both_halves = split or op(node) in SELECTION | {"getitem"}
                    if both_halves:
                        return "gate_up"
                    pending.append((user, True))  # x · sigmoid(x): an activation written out
                    continue
                return "gate" if through or activated else "up"
            if name in SELECTION | {"getitem"}:
                split = True
            if name in ACTIVATION:
                pending.append((user, True))
            elif name in LAYOUT | CAST | DROPOUT | SELECTION | MASKING | {"getitem", "mul", "add", "div", "pow", "neg"}:
                pending.append((user, through))
    return "up"
