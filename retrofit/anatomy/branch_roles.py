"""What a residual branch is, from its operations: self-attention, cross-attention, FFN, mixture of experts, or another mixer."""

from __future__ import annotations

from torch import fx

from retrofit.anatomy.attention_cores import Attention, product_operands
from retrofit.anatomy.parts import Role
from retrofit.anatomy.weight_products import nearest_products, weight_product
from retrofit.program.aten_ops import (
    PRODUCT,
    ROUTING,
    mixes_tokens,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow


def role_of(region: list[fx.Node], cores: list[Attention], origin: fx.Node, flow: Dataflow) -> Role:
    """The role of the branch computed by `region` in the stream that began at `origin`."""
    inside = set(region)
    attentions = [core for core in cores if core.result in inside]
    if attentions:
        crossing = [
            core for core in attentions if not reads_own_keys(core, origin, flow) and not has_earlier_keys(core, origin, flow)
        ]
        return "cross-attention" if len(crossing) == len(attentions) else "self-attention"
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
    """Whether any keys are computed from the stream at `origin`, or are projections of what that normalizes or masks."""
    if any(flow.reaches(origin, key) for key in core.keys):
        return True
    above = set(flow.carried_chain(origin))
    products = nearest_products(list(core.keys), flow)
    read = [part for product in products for part in product_operands(product.node) if part in flow.depends]
    return any(not above.isdisjoint(flow.carried_chain(part)) for part in read)


def has_earlier_keys(core: Attention, origin: fx.Node, flow: Dataflow) -> bool:
    """Whether the keys come from an earlier layer, whose result the stream at `origin` is computed from as well."""
    return any(flow.reaches(product.node, origin) for product in nearest_products([core.key], flow))


def reads_other_positions(node: fx.Node, positions: set[int], flow: Dataflow) -> bool:
    """Whether the operation selects, shifts or projects along a dimension whose extent is one of the stream's `positions`."""
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
    if name in ("pad", "constant_pad_nd"):  # what is put before and left out behind shifts, and keeps the extent
        padded = [len(size) - 1 - place // 2 for place, count in enumerate(node.args[1]) if count]  # type: ignore[arg-type]
        return before is not None and any(dim != len(size) - 1 and before[dim] in positions for dim in padded)
    if name in ("transpose", "permute", "swapaxes", "movedim", "mT", "t") and before:
        products = [user for user in node.users if op(user) in PRODUCT and user.args[0] is node]
        return bool(products) and before[-1] != size[-1] and size[-1] in positions
    return False
