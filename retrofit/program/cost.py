"""The cost of a model: its parameters, and the floating-point operations of its products, counted on its graph or in a run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from retrofit.inputs.model_memory import HollowGroupedProducts
from retrofit.inputs.probes import run
from retrofit.program.aten_ops import op_name
from retrofit.program.program import Program
from retrofit.program.tracing import as_if_traced

# A product costs 2 operations (multiply, add) per element and summand; of element-wise operations only multiply-adds count.


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one forward pass of a program."""

    parameters: int  # elements that the graph reads, shared ones once
    flops: int  # of the whole forward
    tokens: int  # batch × length positions, or the inputs of a batch if they are not only tokens
    by_module: dict[str, int]  # FLOPs in each module's own code
    read: frozenset[str] = frozenset()  # names of the parameters that the graph reads
    unit: str = "token"  # the unit of `tokens`

    @property
    def flops_per_token(self) -> int:
        return round(self.flops / self.tokens)


def cost_of(program: Program) -> Cost:
    """Return the cost of a program for the inputs of its capture."""
    read = {node: name for node, name in program.parameters.items() if node.users}
    by_module: dict[str, int] = {}
    for node in program.graph.nodes:
        if count := flops_of(node):
            path = (program.copies.get(node) or program.owner.get(node, program.root)).path
            by_module[path] = by_module.get(path, 0) + count
    elements = sum(value_of(node).numel() for node in read)
    return Cost(elements, sum(by_module.values()), tokens_of(program), by_module, frozenset(read.values()), unit_of(program))


def flops_per_token(program: Program) -> int:
    """Return the floating-point operations of one forward pass divided by its tokens, images or clips (`unit_of`)."""
    return cost_of(program).flops_per_token


def tokens_of(program: Program) -> int:
    """Return the number of units in the inputs: the positions of the longest input of integers, else the batch size."""
    inputs = inputs_of(program)
    if unit_of(program) == "token":
        return max(value.numel() for value in inputs if is_ids(value))
    return next((int(value.shape[0]) for value in inputs if value.dim()), 1)


def unit_of(program: Program) -> str:
    """Return the unit of the operation count: `token`, or a whole input without tokens, `image of 3×224×224`."""
    inputs = inputs_of(program)
    ids = max((int(value.shape[1]) for value in inputs if is_ids(value)), default=0)
    signals = [value for value in inputs if value.is_floating_point() and value.dim() >= 2 and not is_per_token(value, ids)]
    signals = [value for value in signals if [other.shape for other in signals].count(value.shape) == 1]  # keys and values are two
    if not signals:
        return "token" if ids else "input"
    largest = max(signals, key=lambda value: value.numel())
    kind = "image" if largest.dim() == 4 else "input"
    shape = "×".join(str(int(extent)) for extent in largest.shape[1:])
    return f"{kind} of {shape}" + (f" and {ids} tokens" if ids else "")


def inputs_of(program: Program) -> list[torch.Tensor]:
    """Return the tensors among the program's inputs."""
    return [value for node in program.inputs if isinstance(value := node.meta.get("val"), torch.Tensor)]


def is_per_token(value: torch.Tensor, tokens: int) -> bool:
    """Return whether an input of numbers has the token dimension, as masks and embeddings do."""
    return tokens in value.shape[1:] and (value.dim() < 4 or value.shape[1] == 1)


def is_ids(value: torch.Tensor) -> bool:
    """Return whether an input has one integer per token."""
    return value.dim() == 2 and not value.is_floating_point()


def flops_of_run(skeleton: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return the operations of one forward of a model without weights, by running it. Raises any error of its code.

    A run costs a tenth of a capture. It may differ from the graph if products of several operands are summed in another order, or
    code reads values that only a tracer has: compare the two for the dense model before using the number.
    """
    with contextlib.suppress(Exception):  # code that reads values fails here, and may run on fake tensors
        return counted_run(skeleton, inputs)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    given = {name: fake.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with fake:
        return counted_run(skeleton, given)


def counted_run(skeleton: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return the operations of the products in a run of the model, as a tracer would run it."""
    counted = CountedProducts()
    with as_if_traced(skeleton), counted:
        run(skeleton, inputs)
    return counted.flops


class CountedProducts(HollowGroupedProducts):
    """Within this context `flops` grows by the operations of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.flops += flops_of_call(function, args, kwargs or {}, out)
        return out


def flops_of(node: fx.Node) -> int:
    """Return the operations of one node; 0 if it is not a product."""
    if node.op != "call_function" or not is_counted(node.target):
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    return flops_of_call(node.target, args, kwargs, value_of(node))


def is_counted(target: Any) -> bool:
    """Return whether the function is a product."""
    return op_name(target) in FORMULAS or getattr(target, "_overloadpacket", target) in flop_registry


def flops_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the operations of one call of an operation with these values; 0 if it is not a product."""
    formula = FORMULAS.get(op_name(target))
    if formula is not None:
        return formula(args, out)
    packet = getattr(target, "_overloadpacket", target)
    if packet in flop_registry:
        count = flop_registry[packet](*args, **kwargs, out_val=out)
        return count if isinstance(count, int) else 0  # it depends on the data
    return 0


def value_of(node: Any) -> Any:
    return node.meta.get("val")


def size(value: Any) -> tuple[int, ...]:
    """Return the shape of a value, or of the first of several."""
    value = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(extent if isinstance(extent, int) else 0 for extent in value.shape)  # 0: it depends on the data


def matrix_product(args: Sequence[Any], out: Any) -> int:
    """Return the operations of a product that sums over the last dimension of its first operand."""
    return 2 * math.prod(size(out)) * size(args[0])[-1]


def vector_product(args: Sequence[Any], out: Any) -> int:
    """Return the operations of a product with a vector: each element of the first operand is read once."""
    return 2 * math.prod(size(args[0]))


def attention_flops(args: Sequence[Any], out: Any) -> int:
    """Return the operations of queries times keys, and of weights times values."""
    query, key, value = (size(args[position]) for position in range(3))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def einsum_flops(args: Sequence[Any], out: Any) -> int:
    """Return the FLOPs of each operand in turn times the product so far; a single operand is not a product."""
    terms = str(args[0]).replace(" ", "").split("->")[0].split(",")
    operands = args[1]
    assert isinstance(operands, (list, tuple))
    extents: dict[str, int] = {}
    total = 0
    for position, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        extents.update(zip(indices(term, len(size(operand))), size(operand), strict=True))
        total += 2 * math.prod(extents.values()) if position else 0
    return total


def indices(term: str, rank: int) -> list[str]:
    """Return the indices of one operand of an einsum; those of an ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f".{place}" for place in range(hidden, 0, -1)), *after]


def convolution_flops(args: Sequence[Any], out: Any) -> int:
    """Return the operations of a convolution: every output element sums over one filter."""
    return 2 * math.prod(size(out)) * math.prod(size(args[1])[1:])


def transposed_convolution_flops(args: Sequence[Any], out: Any) -> int:
    """Return the operations of a transposed convolution: every input element spreads over one filter."""
    return 2 * math.prod(size(args[0])) * math.prod(size(args[1])[1:])


FORMULAS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "addcmul": lambda args, out: 2 * math.prod(size(out)),
    "linear": matrix_product,
    "matmul": matrix_product,
    "mv": vector_product,
    "dot": vector_product,
    "_grouped_mm": matrix_product,
    "grouped_mm": matrix_product,
    "grouped_mm_fallback": matrix_product,
    "einsum": einsum_flops,
    "scaled_dot_product_attention": attention_flops,
    "conv1d": convolution_flops,
    "conv2d": convolution_flops,
    "conv3d": convolution_flops,
    "conv_transpose1d": transposed_convolution_flops,
    "conv_transpose2d": transposed_convolution_flops,
    "conv_transpose3d": transposed_convolution_flops,
}
