"""Causality, tested by running parts of the graph: the masks of attentions, and mixers without attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from retrofit.anatomy.attention_cores import Attention, conjuncts, score_products
from retrofit.program.aten_ops import (
    ADDED_PRODUCT,
    CAST,
    COMPARISON,
    CONVOLUTION,
    JOIN,
    LAYOUT,
    LIKE,
    PRODUCT,
    ROUTING,
    extent,
    is_float,
    is_heavy,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow, reachable

HIDDEN = -1e4  # an additive mask hides below this
EMPTY: Mapping[fx.Node, torch.Tensor] = {}
LARGEST_MASK_INPUT = 1 << 20  # elements of the largest parameter that a mask is computed from


def is_causal(core: Attention, stream: fx.Node, flow: Dataflow) -> bool:
    """Return whether no query position can see a later key of the stream; masks are computed with every input position real."""
    if core.causal_flag:
        return True
    own = keys_of_stream(core, stream, flow)
    with torch.device("cpu"):  # even if the default device is another
        values = [value for mask in core.masks if (value := unpadded_value(mask, flow)) is not None]
        among_others = [value[..., own] for value in values if own is not None and value.dim() >= 2 and value.shape[-1] >= own.stop]
        square = [value for value in among_others or values if value.dim() >= 2 and value.shape[-1] == value.shape[-2] > 1]
        if not square:  # the keys come in another layout, from which the mask's are selected
            lengths = (shape(stream) or ())[:-1]
            conditions = [condition for mask in core.masks for condition in conjuncts(mask, lambda node: is_square(node, lengths))]
            square = [value for condition in dict.fromkeys(conditions) if (value := unpadded_value(condition, flow)) is not None]
        visible = [unmasked_keys(value).flatten(0, -3).any(0) if value.dim() > 2 else unmasked_keys(value) for value in square]
        return bool(visible) and not bool(functools.reduce(torch.logical_and, visible).triu(1).any())


def is_square(node: fx.Node, lengths: tuple[int, ...]) -> bool:
    """Return whether the node has a row and a column for each of so many tokens."""
    size = shape(node) or ()
    return len(size) >= 2 and size[-1] == size[-2] > 1 and size[-1] in lengths


def keys_of_stream(core: Attention, stream: fx.Node, flow: Dataflow) -> slice | None:
    """Return the mask of keys computed from the stream, if others are joined to them along the tokens."""
    node = core.key
    while op(node) in CAST and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    size = shape(node) or ()
    if op(node) not in JOIN or len(node.args) < 2 or int(node.args[1]) % len(size) != len(size) - 2:  # type: ignore[arg-type]
        return None
    found, start = [], 0
    for part in node.all_input_nodes:
        count = (shape(part) or size)[-2]
        if flow.reaches(stream, part):
            found.append(slice(start, start + count))
        start += count
    return found[0] if len(found) == 1 and start == size[-2] else None


def unmasked_keys(mask: torch.Tensor) -> torch.Tensor:
    """Return the keys that a mask leaves visible; a boolean mask that is false along its diagonal marks the hidden ones."""
    if mask.dtype != torch.bool:
        return mask > HIDDEN
    return mask if mask.diagonal(dim1=-2, dim2=-1).any() else ~mask


def zeros_for(node: fx.Node) -> Any:
    """Return zeros of the shape of `node`, for operations that read only its shape."""
    example = node.meta["val"]
    if not isinstance(example, torch.Tensor):
        return extent(example)
    size = shape(node) or ()
    if math.prod(size) > LARGEST_MASK_INPUT:
        raise ValueError(f"{node.name} is too large")
    return torch.zeros(size, dtype=example.dtype)


def unpadded_value(mask: fx.Node, flow: Dataflow) -> torch.Tensor | None:
    """Return the value of a mask for inputs without padding: ones, or zeros if ones hide every key."""
    value = mask_value(mask, flow)
    if value is None or not value.is_floating_point() or bool((value > HIDDEN).any()):
        return value
    return mask_value(mask, flow, inputs=0)


def shown_keys(core: Attention, node: fx.Node, fill: int, flow: Dataflow) -> int | None:
    """Return the number of keys the attention shows, over all queries, if the mask at `node` is `fill` throughout.

    None if unknown.
    """
    products = score_products(core.softmax, flow)[0] if core.softmax is not None else []
    mask = core.softmax.args[0] if core.softmax is not None else next(iter(core.masks), None)
    if not isinstance(mask, fx.Node):
        return None
    given = {product: torch.zeros(shape(product) or (), dtype=product.meta["val"].dtype) for product in products}
    given[node] = torch.full(shape(node) or (), fill, dtype=node.meta["val"].dtype)
    value = mask_value(mask, flow, given)
    if value is None:
        return None
    return int((value if value.dtype == torch.bool else value > HIDDEN).sum())


def mask_value(
    mask: fx.Node, flow: Dataflow, given: Mapping[fx.Node, torch.Tensor] = EMPTY, inputs: int = 1
) -> torch.Tensor | None:
    """Return the value of a mask if all inputs are `inputs`, ones for no padding; `given` values are known.

    Parameters count as zeros. None if it depends on a large tensor. Ancestors of a product with a parameter are not run, so the
    value is the same for a model without values.
    """
    values: dict[fx.Node, Any] = dict(given)
    with torch.device("cpu"):  # even if the default device is another, as while a model loads
        try:
            for node in nodes_above(mask, flow, lambda above, flow: above in given or is_zero_without_weights(above, flow)):
                if node not in given:
                    values[node] = value_in_mask(node, values, flow, inputs)
        except Exception:  # a large tensor, or an operation that cannot run outside the graph
            return None
    result = values.get(mask)
    return result if isinstance(result, torch.Tensor) else None


def value_in_mask(node: fx.Node, values: Mapping[fx.Node, Any], flow: Dataflow, inputs: int) -> Any:
    """Return the value of a node that a mask is computed from, given the `values` of its operands; raises if it is too large."""
    example = node.meta.get("val")
    if isinstance(example, torch.Tensor) and is_zero_without_weights(node, flow):
        return torch.zeros(shape(node) or (), dtype=example.dtype)
    if node.op != "placeholder":
        return computed(node, values)
    if not isinstance(example, torch.Tensor):
        return example
    zeros, stored = zeros_for(node), stored_value(node, flow)
    if node in flow.program.inputs:
        return torch.full_like(zeros, inputs)
    return zeros if stored is None or stored.is_meta else stored.detach().cpu()


def stored_value(node: fx.Node, flow: Dataflow) -> Tensor | None:
    """Return the value of a constant or buffer; None if it has none, and for any other node."""
    program = flow.program
    return program.values.get(program.constants.get(node) or program.buffers.get(node, ""))


def computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the operation's result on the CPU, with zeros for unknown operands; None for an assertion."""
    arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: values[part] if part in values else zeros_for(part))
    args, kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), arguments)
    return None if op(node).startswith("_assert") else node.target(*args, **kwargs)  # type: ignore[operator]


def nodes_above(result: fx.Node, flow: Dataflow, ends_at: Callable[[fx.Node, Dataflow], bool]) -> list[fx.Node]:
    """Return the backward slice of `result`, including itself, in order, up to the nodes at which the search ends."""

    def above(node: fx.Node) -> list[fx.Node]:
        ends = op(node) in LIKE or ends_at(node, flow)
        return [] if ends else [part for part in node.all_input_nodes if part in flow.position]

    return sorted(reachable([result], above), key=flow.position.__getitem__)


def is_zero_without_weights(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the value is a product with a parameter, or a row of one: zero if parameters are, and its size is known."""
    name = op(node)
    if name not in PRODUCT | CONVOLUTION | {"embedding"} or name in ADDED_PRODUCT or not all(shape(node) or (0,)):
        return False
    biased = name == "linear" or name in CONVOLUTION  # the third operand is added
    factors, added = node.all_input_nodes[: 2 if biased else None], node.all_input_nodes[2:] if biased else []
    return any(is_parameter(factor, flow) for factor in factors) and all(is_parameter(factor, flow) for factor in added)


def is_parameter(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the value is a parameter in any layout and dtype."""
    while op(node) in LAYOUT | CAST and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node in flow.program.parameters


def chooses_keys(core: Attention, flow: Dataflow) -> fx.Node | None:
    """Return the node by which the tokens' contents choose the keys that a mask shows: a comparison or the largest of some scores.

    A bias computed from the contents chooses nothing. None if only positions and the inputs themselves decide.
    """
    for mask in core.masks:
        for node in nodes_above(mask, flow, is_no_mask):
            if op(node) in ROUTING | COMPARISON and any(is_computed_by_weights(operand, flow) for operand in node.all_input_nodes):
                return node
    return None


def is_no_mask(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the value consists of token contents, or is a size and no tensor."""
    return is_heavy(node) or shape(node) is None


def is_computed_by_weights(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the value is a float computed from the inputs with weights of the model."""
    weights = (weight for weight in flow.program.parameters if weight in flow.position)
    return is_float(node) and node in flow.depends and any(flow.reaches(weight, node) for weight in weights)


CHANGED = 1e-3  # of the largest output; rounding alone may change one by less


def reads_ahead(output: fx.Node, stream: fx.Node, flow: Dataflow) -> bool:
    """Return whether earlier positions of `output` change with later ones of `stream`; False if that cannot be computed.

    Weights and values from outside the stream are random numbers, the same for both.
    """
    if shape(output) != shape(stream):
        return False
    try:
        with torch.device("cpu"), torch.no_grad():
            return changes_earlier_ones(output, stream, flow)
    except Exception:  # operations that cannot run outside the graph
        return False


def changes_earlier_ones(output: fx.Node, stream: fx.Node, flow: Dataflow) -> bool:
    """Return the result of `reads_ahead` for operations that all run, from the last position and another."""
    size, draw = shape(stream) or (), torch.Generator().manual_seed(0)

    def random(node: fx.Node, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape(node) or (), generator=draw) * scale).to(node.meta["val"].dtype)

    before, other = random(stream), random(stream)
    steps = nodes_above(output, flow, lambda step, flow: is_known(step, stream, flow))
    given = {step: known_value(step, flow, random) for step in steps if is_known(step, stream, flow) and step is not stream}
    plain = run(steps, given | {stream: before})[output]

    def changes(dim: int, place: int) -> bool:
        after = before.clone()
        after.select(dim, place).copy_(other.select(dim, place))
        apart = (run(steps, given | {stream: after})[output] - plain).float().abs().narrow(dim, 0, place)
        return bool(apart.max() > CHANGED * plain.float().abs().max())

    places = ((dim, place) for dim in token_dims(size, flow) for place in {size[dim] - 1, 2 * size[dim] // 3} if place)
    return any(changes(dim, place) for dim, place in places)


def token_dims(size: tuple[int, ...], flow: Dataflow) -> list[int]:
    """Return the dimensions of a stream that may be the tokens'.

    Those as long as the model's integer inputs, if it has any.
    """
    lengths = {length for given in flow.program.inputs if not is_float(given) for length in (shape(given) or ())[1:]}
    return [dim for dim in range(len(size) - 1) if size[dim] in lengths] or list(range(len(size) - 1))


def is_known(node: fx.Node, stream: fx.Node, flow: Dataflow) -> bool:
    """Return whether the value is not computed here: the stream, an input of the graph, a float from elsewhere in the model."""
    elsewhere = is_float(node) and node in flow.depends and not flow.reaches(stream, node)
    return node is stream or node.op == "placeholder" or elsewhere


def known_value(node: fx.Node, flow: Dataflow, random: Any) -> Any:
    """Return the value of a buffer or constant, ones for integers, random floats; matrices are scaled by their fan-in."""
    program, example, size = flow.program, node.meta["val"], shape(node) or ()
    stored = stored_value(node, flow)
    if not isinstance(example, Tensor):
        return int(example)
    if stored is not None and not (stored.is_meta and node in program.buffers and is_float(node)):
        return stored.detach().cpu()  # raises on the meta device: what a constant hides is unknown
    if not is_float(node):
        return torch.ones(size, dtype=example.dtype)
    return random(node, max(size[1:], default=1) ** -0.5 if node in program.parameters else 1.0)


def run(steps: list[fx.Node], values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Return the values of these nodes, in order, given the known ones."""
    for node in steps:
        if node not in values:
            values[node] = computed(node, values)
    return values
