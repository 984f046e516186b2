"""What a residual branch is, from its operations: self-attention, cross-attention, FFN, mixture of experts, or another mixer."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from retrofit.anatomy.parts import Projection, Role
from retrofit.program.aten_ops import (
    ACTIVATION,
    ATTENTION,
    CAST,
    CONVOLUTION,
    DROPOUT,
    JOIN,
    LAYOUT,
    MASKING,
    PRODUCT,
    ROUTING,
    SELECTION,
    extent,
    is_heavy,
    mixes_tokens,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow

SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))
ARITHMETIC = frozenset("add sub mul div max maximum getitem".split())
SCALING = LAYOUT | CAST | DROPOUT | SELECTION | MASKING | JOIN | ACTIVATION | ARITHMETIC  # what scores pass before the softmax
LARGEST_MASK_INPUT = 1 << 20  # elements of a parameter that a mask may be computed from


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention in the graph: its operands and the node that holds its result."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    result: fx.Node
    masks: tuple[fx.Node, ...]
    causal_flag: bool

    @property
    def heads(self) -> int | None:
        size = shape(self.query)
        return size[1] if size is not None and len(size) == 4 else None


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """One product of a representation with a weight."""

    node: fx.Node
    source: fx.Node
    parameter: str
    in_features: int
    out_features: int
    batched: bool  # the weight has a leading dimension of its own, one matrix an expert


def attentions(flow: Dataflow) -> list[Attention]:
    """Every attention in the program, fused or written out."""
    found = []
    for node in flow.nodes:
        if op(node) in ATTENTION:
            query, key, value = (part for part in node.args[:3] if isinstance(part, fx.Node))
            mask = (
                node.args[3] if len(node.args) > 3 and op(node) == "scaled_dot_product_attention" else node.kwargs.get("attn_mask")
            )
            flag = bool(node.args[5]) if len(node.args) > 5 else bool(node.kwargs.get("is_causal", False))
            found.append(Attention(query, key, value, node, (mask,) if isinstance(mask, fx.Node) else (), flag))
        elif op(node) in SOFTMAX:
            written_out = softmax_attention(node, flow)
            if written_out is not None:
                found.append(written_out)
    return found


def softmax_attention(softmax: fx.Node, flow: Dataflow) -> Attention | None:
    """The attention around a softmax: scores are a product of two representations, and its result weighs a third."""
    scores, masks = score_product(softmax, flow)
    result = weighing_product(softmax, flow)
    if scores is None or result is None:
        return None
    query, key = (part for part in product_operands(scores) if part in flow.depends)
    values = [part for part in product_operands(result) if not flow.reaches(softmax, part)]
    return Attention(query, key, values[0], result, tuple(masks), False) if values else None


def product_operands(node: fx.Node) -> list[fx.Node]:
    """The factors of a product node, in order."""
    name = op(node)
    if name == "einsum":
        return list(node.all_input_nodes)
    first = 1 if name in ("baddbmm", "addmm", "addbmm") else 0
    return [part for part in node.args[first : first + 2] if isinstance(part, fx.Node)]


def score_product(softmax: fx.Node, flow: Dataflow) -> tuple[fx.Node | None, list[fx.Node]]:
    """The product of two input-dependent operands that the softmax normalises, and the masks and biases added on the way."""
    pending, seen, masks = [softmax.args[0]], set(), []
    while pending:
        node = pending.pop(0)
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if op(node) in PRODUCT and sum(part in flow.depends for part in product_operands(node)) == 2:
            if op(node) == "baddbmm" and isinstance(node.args[0], fx.Node):
                masks.append(node.args[0])
            return node, masks
        if op(node) in SCALING:
            for part in node.all_input_nodes:
                (pending if flow.heavy_ancestors[part] and part in flow.depends else masks).append(part)
    return None, masks


def weighing_product(softmax: fx.Node, flow: Dataflow) -> fx.Node | None:
    """The product in which the softmax's result weighs values that depend on the inputs."""
    pending, seen = [softmax], set()
    while pending:
        node = pending.pop(0)
        for user in flow.uses[node]:
            if user in seen:
                continue
            seen.add(user)
            if op(user) in PRODUCT and sum(part in flow.depends for part in product_operands(user)) == 2:
                return user
            if op(user) in LAYOUT | CAST | DROPOUT | SELECTION | MASKING | {"mul", "div", "add", "getitem"}:
                pending.append(user)
    return None


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
    whole = next((shape(part) for part, known in flow.program.parameters.items() if known == name), size) or size
    if op(node) in CONVOLUTION:
        return WeightProduct(node, sources[0], name, size[1], size[0], False)
    if op(node) == "linear":
        return WeightProduct(node, sources[0], name, size[1], size[0], len(whole) > 2)
    return WeightProduct(node, sources[0], name, before[-1], after[-1], len(whole) > 2)


def role_of(region: list[fx.Node], cores: list[Attention], origin: fx.Node, flow: Dataflow) -> Role:
    """The role of the branch computed by `region` in the stream that began at `origin`."""
    inside = set(region)
    own = [core for core in cores if core.result in inside]
    if own:
        crossing = [core for core in own if not flow.reaches(origin, core.key) and not made_before(core, origin, flow)]
        return "cross-attention" if len(crossing) == len(own) else "self-attention"
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


def made_before(core: Attention, origin: fx.Node, flow: Dataflow) -> bool:
    """Whether an attention's keys are those of an earlier layer, from which the stream at `origin` comes as well."""
    return any(flow.reaches(product.node, origin) for product in nearest_products([core.key], flow))


def reads_other_positions(node: fx.Node, positions: set[int], flow: Dataflow) -> bool:
    """Whether the operation picks, shifts or projects along a dimension whose extent is one of the stream's `positions`."""
    name, size = op(node), shape(node)
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    before = shape(source)
    if size is None or not size or (source is not None and source not in flow.depends):
        return False
    if name in ("slice", "select", "narrow", "index_select", "flip") and before:
        along = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        return before != size and along % len(before) != len(before) - 1 and before[along] in positions
    if name in ("pad", "constant_pad_nd"):
        return before is not None and any(old != new and old in positions for old, new in zip(before[:-1], size[:-1], strict=True))
    if name in ("transpose", "permute", "swapaxes", "movedim", "mT", "t") and before:
        products = [user for user in node.users if op(user) in PRODUCT and user.args[0] is node]
        return bool(products) and before[-1] != size[-1] and size[-1] in positions
    return False


def projections(region: list[fx.Node], role: Role, cores: list[Attention], flow: Dataflow) -> tuple[Projection, ...]:
    """The weight matrices of a branch and what each projects, in order of use."""
    products = [found for node in region if (found := weight_product(node, flow)) is not None]
    if role == "cross-attention":  # keys and values come from outside the region
        products = [*outside_products(region, cores, flow), *products]
    names: dict[fx.Node, str] = {}
    if "attention" in role:
        names = attention_names(products, region, cores, flow)
    elif role != "other mixer":
        names = ffn_names(products, region, flow)
    done: dict[tuple[str, str], Projection] = {}
    for product in products:
        label = names.get(product.node, "projection")
        done.setdefault((product.parameter, label), Projection(product.parameter, label, product.in_features, product.out_features))
    return tuple(done.values())


def outside_products(region: list[fx.Node], cores: list[Attention], flow: Dataflow) -> list[WeightProduct]:
    inside = set(region)
    found = []
    for core in cores:
        if core.result in inside:
            found.extend(nearest_products([core.key, core.value], flow))
    return [product for product in dict.fromkeys(found) if product.node not in inside]


def nearest_products(starts: list[fx.Node], flow: Dataflow) -> list[WeightProduct]:
    """The products with weights that the nodes are computed from with no other such product in between."""
    pending, seen, found = list(starts), set(starts), []
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


def attention_names(
    products: list[WeightProduct], region: list[fx.Node], cores: list[Attention], flow: Dataflow
) -> dict[fx.Node, str]:
    inside = set(region)
    own = [core for core in cores if core.result in inside]
    uses: dict[fx.Node, str] = {}
    for core in own:
        for letter, operand in (("q", core.query), ("k", core.key), ("v", core.value)):
            for product in nearest_products([operand], flow):
                uses[product.node] = uses.get(product.node, "") + (letter if letter not in uses.get(product.node, "") else "")
    for product in products:
        if any(flow.reaches(core.result, product.node) for core in own):
            uses[product.node] = "out"
    return uses


def ffn_names(products: list[WeightProduct], region: list[fx.Node], flow: Dataflow) -> dict[fx.Node, str]:
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
            and not later_weights(product, later)
        ):
            names[product.node] = "router"
        elif product.node in last and len(products) > 1:
            names[product.node] = "down"
        else:
            names[product.node] = gate_name(product, flow)
    return names


def later_weights(product: WeightProduct, later: list[WeightProduct]) -> bool:
    """Whether the product's result is itself multiplied by a weight (a router's only selects)."""
    return any(other.source is product.node for other in later)


def gate_name(product: WeightProduct, flow: Dataflow) -> str:
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


def is_causal(core: Attention, flow: Dataflow) -> bool:
    """Whether no query position can see a later key; masks are computed with every input position real."""
    if core.causal_flag:
        return True
    with torch.device("cpu"):  # whatever device a skeleton is being built on
        values = [value for mask in core.masks if (value := mask_value(mask, flow)) is not None]
        square = [value for value in values if value.dim() >= 2 and value.shape[-1] == value.shape[-2]]
        visible = [what_is_visible(value) for value in square]
        return bool(visible) and not bool(functools.reduce(torch.logical_and, visible).triu(1).any())


def what_is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Which keys a mask shows: a boolean one that hides every position from itself says what is hidden."""
    if mask.dtype != torch.bool:
        return mask > -1e4
    return mask if mask.diagonal(dim1=-2, dim2=-1).any() else ~mask


def blank(node: fx.Node) -> Any:
    """A value of the shape of `node`, for operations that read nothing else of it."""
    example = node.meta["val"]
    if not isinstance(example, torch.Tensor):
        return extent(example)
    size = shape(node) or ()
    if math.prod(size) > LARGEST_MASK_INPUT:
        raise ValueError(f"{node.name} is too large")
    return torch.zeros(size, dtype=example.dtype)


def mask_value(mask: fx.Node, flow: Dataflow) -> torch.Tensor | None:
    """The value of a mask for inputs without padding; parameters count as zeros, None where it hangs on a large tensor."""
    program = flow.program
    wanted = [node for node in flow.nodes if flow.ancestors[mask] & flow.bit(node)]
    values: dict[fx.Node, Any] = {}
    for node in wanted:
        example = node.meta.get("val")
        if node.op == "placeholder":
            if not isinstance(example, torch.Tensor):
                values[node] = example
                continue
            size = shape(node) or ()
            if math.prod(size) > LARGEST_MASK_INPUT:
                return None
            held = program.values.get(program.constants.get(node) or program.buffers.get(node, ""))
            if node in program.inputs:
                values[node] = torch.ones(size, dtype=example.dtype)
            elif held is not None and not held.is_meta:
                values[node] = held.detach().cpu()
            else:
                values[node] = torch.zeros(size, dtype=example.dtype)
            continue
        if node.op != "call_function":
            return None
        try:
            arguments = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda part: values[part] if part in values else blank(part)
            )
            args, kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), arguments)
            if op(node).startswith("_assert"):
                values[node] = None
                continue
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # a mask whose operations do not run outside the graph says nothing
            return None
    result = values.get(mask)
    return result if isinstance(result, torch.Tensor) else None
