"""Find the feed-forwards of a model: each ffn branch is parsed into matrices and an element-wise part between them.

A branch whose hidden units meet in anything but element-wise operations is not of this form; its near miss gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
)
from retrofit.anatomy.elementwise_outline import ElementwiseOutline
from retrofit.anatomy.feed_forward_blocks import FeedForwardBlock
from retrofit.anatomy.feed_forward_places import is_computed_by, place_in_owner, place_over_modules
from retrofit.anatomy.feed_forward_sites import FeedForward, no_feed_forward
from retrofit.anatomy.findings import Findings
from retrofit.anatomy.parts import Branch, Layer
from retrofit.anatomy.sites import NearMiss, collect_near_miss
from retrofit.anatomy.weight_matrices import matrix_of, operand_chain, product_result
from retrofit.anatomy.weight_products import WeightProduct, nearest_products, weight_product
from retrofit.errors import first_few
from retrofit.program.dataflow import Dataflow

REPLACED = "a feed-forward is replaced once; layers= divides the depths between passes"


def feed_forwards(anatomy: Findings, layers: Iterable[int] | None = None) -> tuple[list[FeedForward], list[NearMiss]]:
    """The feed-forwards of a model by depth, one for each set of weights, and a near miss for each ffn branch that is none.

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
    first_of_each: dict[str, NearMiss] = {}
    for near_miss in near_misses:
        first_of_each.setdefault(near_miss.name, near_miss)
    return list(sites.values()), list(first_of_each.values())


def hidden_feed_forwards(layer: Layer, anatomy: Findings) -> Iterator[NearMiss]:
    """A near miss for each branch of a layer without feed-forwards that has one in it."""
    for branch in () if layer.ffns else layer.branches:
        if is_on_two_streams(branch, anatomy.stacks, anatomy.flow):
            yield NearMiss(layer.name or branch.output, ON_TWO_STREAMS, BEFORE_TWO_STREAMS)
        elif branch.role == "self-attention" and holds_sums(branch, anatomy.flow):
            yield NearMiss(layer.name or branch.output, LAYER_WITHIN, BEFORE_THE_OUTER)


def parse_feed_forward(branch: Branch, model: nn.Module, flow: Dataflow) -> FeedForward:
    """The feed-forward that `branch` computes; raises `DoesNotFitError` with the reason where it is not of that form."""
    if branch.role != "ffn":
        raise no_feed_forward(branch, "it is a mixture of experts already", REPLACED, in_any_form=True)
    if branch.name and isinstance(model.get_submodule(branch.name), FeedForwardBlock):
        raise no_feed_forward(branch, "another pass has replaced it already", REPLACED)
    region = flow.between(flow.node(branch.source), flow.node(branch.output))
    out, into = products_of(branch, region, flow)
    chains = [operand_chain(product, flow) for product in into]
    if len({chain[-1] for chain in chains}) != 1:
        raise no_feed_forward(branch, "its matrices do not all read the same tensor")
    width, units = out.out_features, out.in_features
    if into[0].in_features != width:
        raise no_feed_forward(branch, f"it takes {into[0].in_features} columns in and gives {width}", in_any_form=True)
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
        owner.path,
        width,
        units,
        matrices,
        hidden.ports,
        hidden.module,
        down,
        place.stream_in,
        None if place.tail is None else place.tail.module,
        place.path,
        place.bypassed,
        dropout,
        hidden.paths,
        () if place.tail is None else place.tail.paths,
    )


def products_of(branch: Branch, region: list[fx.Node], flow: Dataflow) -> tuple[WeightProduct, list[WeightProduct]]:
    """The product that writes back to the stream, and the products that it depends on, in the order of the program."""
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
