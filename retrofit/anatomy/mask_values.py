"""What the masks of an attention hide, by running the part of the graph that computes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from retrofit.anatomy.attention_cores import Attention, conjuncts, score_products
from retrofit.program.aten_ops import (
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
from retrofit.program.dataflow import Dataflow

ADDED_PRODUCTS = frozenset("addmm addbmm baddbmm".split())  # their first operand is added to the product of the others
HIDDEN = -1e4  # an additive mask below this hides
EMPTY: Mapping[fx.Node, torch.Tensor] = {}
LARGEST_MASK_INPUT = 1 << 20  # elements of a parameter that a mask may be computed from


def is_causal(core: Attention, stream: fx.Node, flow: Dataflow) -> bool:
    """Whether no query position can see a later key of the stream; masks are computed with every input position real."""
    if core.causal_flag:
        return True
    own = keys_of_stream(core, stream, flow)
    with torch.device("cpu"):  # also where the default device is another
        values = [value for mask in core.masks if (value := unpadded_value(mask, flow)) is not None]
        among_others = [value[..., own] for value in values if own is not None and value.dim() >= 2 and value.shape[-1] >= own.stop]
        square = [value for value in among_others or values if value.dim() >= 2 and value.shape[-1] == value.shape[-2] > 1]
        if not square:  # the keys that a query may see at all are laid out otherwise: what those of a mask are selected from
            lengths = (shape(stream) or ())[:-1]
            whole = [one for mask in core.masks for one in conjuncts(mask, lambda node: is_square(node, lengths))]
            square = [value for one in dict.fromkeys(whole) if (value := unpadded_value(one, flow)) is not None]
        visible = [unmasked_keys(value).flatten(0, -3).any(0) if value.dim() > 2 else unmasked_keys(value) for value in square]
        return bool(visible) and not bool(functools.reduce(torch.logical_and, visible).triu(1).any())


def is_square(node: fx.Node, lengths: tuple[int, ...]) -> bool:
    """Whether the node has a row and a column for each of so many tokens."""
    size = shape(node) or ()
    return len(size) >= 2 and size[-1] == size[-2] > 1 and size[-1] in lengths


def keys_of_stream(core: Attention, stream: fx.Node, flow: Dataflow) -> slice | None:
    """Which of the keys are computed from the stream, where others are joined to them in the dimension of the tokens."""
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
    """The keys that a mask leaves visible; a boolean mask that is false all along its diagonal marks the hidden ones."""
    if mask.dtype != torch.bool:
        return mask > HIDDEN
    return mask if mask.diagonal(dim1=-2, dim2=-1).any() else ~mask


def zeros_for(node: fx.Node) -> Any:
    """Zeros of the shape of `node`, for operations that read only its shape."""
    example = node.meta["val"]
    if not isinstance(example, torch.Tensor):
        return extent(example)
    size = shape(node) or ()
    if math.prod(size) > LARGEST_MASK_INPUT:
        raise ValueError(f"{node.name} is too large")
    return torch.zeros(size, dtype=example.dtype)


def unpadded_value(mask: fx.Node, flow: Dataflow) -> torch.Tensor | None:
    """The value of a mask for inputs without padding: of ones, or of zeros where ones hide every key."""
    value = mask_value(mask, flow)
    if value is None or not value.is_floating_point() or bool((value > HIDDEN).any()):
        return value
    return mask_value(mask, flow, inputs=0)


def shown_keys(core: Attention, node: fx.Node, fill: int, flow: Dataflow) -> int | None:
    """How many keys the attention shows, over all queries, where the mask at `node` is `fill` throughout; None where unknown."""
    products = score_products(core.softmax, flow)[0] if core.softmax is not None else []
    mask = core.softmax.args[0] if core.softmax is not None else next(iter(core.masks), None)
    if not isinstance(mask, fx.Node):
        return None
    given = {one: torch.zeros(shape(one) or (), dtype=one.meta["val"].dtype) for one in products}
    given[node] = torch.full(shape(node) or (), fill, dtype=node.meta["val"].dtype)
    value = mask_value(mask, flow, given)
    if value is None:
        return None
    return int((value if value.dtype == torch.bool else value > HIDDEN).sum())


def mask_value(
    mask: fx.Node, flow: Dataflow, given: Mapping[fx.Node, torch.Tensor] = EMPTY, inputs: int = 1
) -> torch.Tensor | None:
    """The value of a mask for inputs that are `inputs` throughout, ones where nothing is padding; `given` values are known.

    Parameters count as zeros. None where it depends on a large tensor. What lies above a product with a parameter is not run, so
    that the value is the same for a model without values.
    """
    with torch.device("cpu"):  # also where the default device is another, as while a model is being loaded
        program = flow.program
        values: dict[fx.Node, Any] = dict(given)
        for node in nodes_above(mask, flow, lambda one, flow: one in given or is_zero_without_weights(one, flow)):
            if node in given:
                continue
            example = node.meta.get("val")
            if is_zero_without_weights(node, flow) and isinstance(example, torch.Tensor):
                values[node] = torch.zeros(shape(node) or (), dtype=example.dtype)
                continue
            if node.op == "placeholder":
                if not isinstance(example, torch.Tensor):
                    values[node] = example
                    continue
                size = shape(node) or ()
                if math.prod(size) > LARGEST_MASK_INPUT:
                    return None
                stored = program.values.get(program.constants.get(node) or program.buffers.get(node, ""))
                if node in program.inputs:
                    values[node] = torch.full(size, inputs, dtype=example.dtype)
                elif stored is not None and not stored.is_meta:
                    values[node] = stored.detach().cpu()
                else:
                    values[node] = torch.zeros(size, dtype=example.dtype)
                continue
            if node.op != "call_function":
                return None
            try:
                values[node] = computed(node, values)
            except Exception:  # operations that do not run outside the graph
                return None
        result = values.get(mask)
        return result if isinstance(result, torch.Tensor) else None


def computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What the operation makes on the CPU of these values, and of zeros where an operand has none; None where it only asserts."""
    arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: values[part] if part in values else zeros_for(part))
    args, kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), arguments)
    return None if op(node).startswith("_assert") else node.target(*args, **kwargs)  # type: ignore[operator]


def nodes_above(result: fx.Node, flow: Dataflow, ends_at: Callable[[fx.Node, Dataflow], bool]) -> list[fx.Node]:
    """The nodes that `result` depends on, itself included, in order; nothing that only nodes at which the search ends depend on."""
    found: set[fx.Node] = set()
    pending = [result]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            ends = op(node) in LIKE or ends_at(node, flow)
            pending += [] if ends else [part for part in node.all_input_nodes if part in flow.position]
    return sorted(found, key=flow.position.__getitem__)


def is_zero_without_weights(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the value is a product with a parameter, or a row of one: zero where parameters are; its size is known."""
    name = op(node)
    if name not in PRODUCT | CONVOLUTION | {"embedding"} or name in ADDED_PRODUCTS or not all(shape(node) or (0,)):
        return False
    biased = name == "linear" or name in CONVOLUTION  # whose third operand is added
    factors, added = node.all_input_nodes[: 2 if biased else None], node.all_input_nodes[2:] if biased else []
    return any(is_parameter(one, flow) for one in factors) and all(is_parameter(one, flow) for one in added)


def is_parameter(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the value is a parameter, in whatever layout and type."""
    while op(node) in LAYOUT | CAST and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node in flow.program.parameters


def chooses_keys(core: Attention, flow: Dataflow) -> fx.Node | None:
    """What chooses the keys that a mask of the attention shows, by what tokens hold: a comparison or the largest of some scores.

    A bias that depends on what tokens hold chooses nothing. None where only places and the inputs themselves decide.
    """
    for mask in core.masks:
        for node in nodes_above(mask, flow, is_no_mask):
            if op(node) in ROUTING | COMPARISON and any(is_computed_by_weights(one, flow) for one in node.all_input_nodes):
                return node
    return None


def is_no_mask(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the value is what tokens hold, or a size and no tensor."""
    return is_heavy(node) or shape(node) is None


def is_computed_by_weights(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the value is a float that was computed from the inputs by weights of the model."""
    weights = (one for one in flow.program.parameters if one in flow.position)
    return is_float(node) and node in flow.depends and any(flow.reaches(one, node) for one in weights)
