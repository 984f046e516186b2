"""What a captured program costs: its parameters, and the floating-point operations of its products, counted on the graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from retrofit.program.aten_ops import op
from retrofit.program.program import Program

# A product costs 2 operations (multiply, add) an element and summand; of element-wise operations only multiply-adds are counted.


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one forward pass of a program costs."""

    parameters: int  # elements that the graph reads, shared ones once
    flops: int  # of the whole pass
    tokens: int  # positions the pass works on: batch × length, or batch
    by_module: dict[str, int]  # FLOPs in each module's own code
    read: frozenset[str] = frozenset()  # names of the parameters that the graph reads

    @property
    def flops_per_token(self) -> int:
        return round(self.flops / self.tokens)


def cost_of(program: Program) -> Cost:
    """The cost of a program on the inputs it was captured with."""
    read = {node: name for node, name in program.parameters.items() if node.users}
    by_module: dict[str, int] = {}
    for node in program.graph.nodes:
        if count := flops_of(node):
            path = program.owner[node].path if node in program.owner else ""
            by_module[path] = by_module.get(path, 0) + count
    elements = sum(value_of(node).numel() for node in read)
    return Cost(elements, sum(by_module.values()), tokens_of(program), by_module, frozenset(read.values()))


def flops_per_token(program: Program) -> int:
    """The floating-point operations of one forward pass, divided by the positions it works on."""
    return cost_of(program).flops_per_token


def tokens_of(program: Program) -> int:
    """How many positions the program works on: those of its longest input of integers, else its batch."""
    inputs = [value for node in program.inputs if isinstance(value := node.meta.get("val"), torch.Tensor)]
    per_token = [value.numel() for value in inputs if value.dim() == 2 and not value.is_floating_point()]
    return max(per_token, default=0) or next((int(value.shape[0]) for value in inputs if value.dim()), 1)


def flops_of(node: fx.Node) -> int:
    """The operations of one node; 0 where it is no product."""
    if node.op != "call_function":
        return 0
    formula = FORMULAS.get(op(node))
    if formula is not None:
        return formula(node)
    packet = getattr(node.target, "_overloadpacket", node.target)
    if packet in flop_registry:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
        count = flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val"))
        return count if isinstance(count, int) else 0  # it depends on the data
    return 0


def value_of(node: Any) -> Any:
    return node.meta.get("val")


def size(node: Any) -> tuple[int, ...]:
    """The shape of a node's (first) value."""
    value = value_of(node)
    value = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(extent if isinstance(extent, int) else 0 for extent in value.shape)  # 0: it depends on the data


def matrix_product(node: fx.Node, operand: int) -> int:
    """A product that sums over the last dimension of one operand."""
    return 2 * math.prod(size(node)) * size(node.args[operand])[-1]


def attention_flops(node: fx.Node) -> int:
    """Queries times keys, weights times values."""
    query, key, value = (size(node.args[position]) for position in range(3))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def einsum_flops(node: fx.Node) -> int:
    """Each operand in turn times the product so far, over all the indices that the two have; one operand alone is no product."""
    terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    operands = node.args[1]
    assert isinstance(operands, (list, tuple))
    extents: dict[str, int] = {}
    total = 0
    for position, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        extents.update(zip(indices(term, len(size(operand))), size(operand), strict=True))
        total += 2 * math.prod(extents.values()) if position else 0
    return total


def indices(term: str, rank: int) -> list[str]:
    """The indices of one operand of an einsum, those of an ellipsis numbered from the right."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f".{place}" for place in range(hidden, 0, -1)), *after]


def convolution_flops(node: fx.Node) -> int:
    """Every output element sums over one filter."""
    return 2 * math.prod(size(node)) * math.prod(size(node.args[1])[1:])


def transposed_convolution_flops(node: fx.Node) -> int:
    """Every input element spreads over one filter."""
    return 2 * math.prod(size(node.args[0])) * math.prod(size(node.args[1])[1:])


FORMULAS: dict[str, Callable[[fx.Node], int]] = {
    "addcmul": lambda node: 2 * math.prod(size(node)),
    "linear": lambda node: matrix_product(node, 0),
    "matmul": lambda node: matrix_product(node, 0),
    "mv": lambda node: 2 * math.prod(size(node.args[0])),
    "dot": lambda node: 2 * math.prod(size(node.args[0])),
    "_grouped_mm": lambda node: matrix_product(node, 0),
    "grouped_mm": lambda node: matrix_product(node, 0),
    "grouped_mm_fallback": lambda node: matrix_product(node, 0),
    "einsum": einsum_flops,
    "scaled_dot_product_attention": attention_flops,
    "conv1d": convolution_flops,
    "conv2d": convolution_flops,
    "conv3d": convolution_flops,
    "conv_transpose1d": transposed_convolution_flops,
    "conv_transpose2d": transposed_convolution_flops,
    "conv_transpose3d": transposed_convolution_flops,
}
