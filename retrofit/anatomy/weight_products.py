"""Products of a representation with a weight: which matrix, from how many features to how many."""

from __future__ import annotations

import dataclasses

from torch import fx

from retrofit.program.aten_ops import (
    ATTENTION,
    CONVOLUTION,
    is_heavy,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """One product of a representation with a weight."""

    node: fx.Node
    source: fx.Node
    parameter: str
    in_features: int
    out_features: int
    batched: bool  # the weight has a leading dimension of its own, one matrix an expert


def weight_product(node: fx.Node, flow: Dataflow) -> WeightProduct | None:
    """`node` as a product with a weight, None where it is none."""
    if not is_heavy(node) or op(node) in ATTENTION:
        return None
    sources = [part for part in node.all_input_nodes if part in flow.depends]
    weights: dict[str, fx.Node] = {}
    for part in node.all_input_nodes:
        if part in flow.depends:
            continue
        if part in flow.program.parameters:
            weights[flow.program.parameters[part]] = part
        for name in flow.parameters_of([part]):
            weights.setdefault(name, part)
    matrices = {name: part for name, part in weights.items() if len(shape(part) or ()) >= 2}
    if not sources or not matrices:
        return None
    name, weight = next(iter(matrices.items()))
    before, after, size = shape(sources[0]), shape(node), shape(weight)
    if not before or not after or not size:
        return None
    whole = next((shape(part) for part, parameter in flow.program.parameters.items() if parameter == name), size) or size
    if op(node) in CONVOLUTION:
        return WeightProduct(node, sources[0], name, size[1], size[0], False)
    if op(node) == "linear":
        return WeightProduct(node, sources[0], name, size[1], size[0], len(whole) > 2)
    return WeightProduct(node, sources[0], name, before[-1], after[-1], len(whole) > 2)


def nearest_products(starts: list[fx.Node], flow: Dataflow) -> list[WeightProduct]:
    """The products with weights that the nodes are computed from with no other such product in between."""
    pending, seen, found = list(dict.fromkeys(starts)), set(starts), []
    while pending:
        node = pending.pop()
        product = weight_product(node, flow)
        if product is not None:
            found.append(product)
            continue
        for part in node.all_input_nodes:
            if part in flow.depends and part not in seen:
                seen.add(part)
                pending.append(part)
    return found
