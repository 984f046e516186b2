"""Whether a mixer without attention reads later tokens, by running its part of the graph on random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from retrofit.anatomy.mask_values import computed, nodes_above
from retrofit.program.aten_ops import is_float, shape
from retrofit.program.dataflow import Dataflow

CHANGED = 1e-3  # of the largest output: by less, rounding alone may move one


def reads_ahead(output: fx.Node, stream: fx.Node, flow: Dataflow) -> bool:
    """Whether earlier positions of `output` change with later ones of `stream`; False where that cannot be computed.

    Weights, and what does not come from the stream, are random numbers, the same for both.
    """
    if shape(output) != shape(stream):
        return False
    try:
        with torch.device("cpu"), torch.no_grad():
            return changes_earlier_ones(output, stream, flow)
    except Exception:  # operations that do not run outside the graph
        return False


def changes_earlier_ones(output: fx.Node, stream: fx.Node, flow: Dataflow) -> bool:
    """The same, of operations that all run; of the last position and another."""
    size, draw = shape(stream) or (), torch.Generator().manual_seed(0)

    def random(node: fx.Node, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape(node) or (), generator=draw) * scale).to(node.meta["val"].dtype)

    before, other = random(stream), random(stream)
    steps = nodes_above(output, flow, lambda one, flow: is_known(one, stream, flow))
    given = {one: known_value(one, flow, random) for one in steps if is_known(one, stream, flow) and one is not stream}
    plain = run(steps, given | {stream: before})[output]

    def changes(dim: int, place: int) -> bool:
        after = before.clone()
        after.select(dim, place).copy_(other.select(dim, place))
        apart = (run(steps, given | {stream: after})[output] - plain).float().abs().narrow(dim, 0, place)
        return bool(apart.max() > CHANGED * plain.float().abs().max())

    places = ((dim, place) for dim in token_dims(size, flow) for place in {size[dim] - 1, 2 * size[dim] // 3} if place)
    return any(changes(dim, place) for dim, place in places)


def token_dims(size: tuple[int, ...], flow: Dataflow) -> list[int]:
    """The dimensions of a stream that may number tokens: those as long as the integers that the model takes, if there are such."""
    lengths = {length for one in flow.program.inputs if not is_float(one) for length in (shape(one) or ())[1:]}
    return [dim for dim in range(len(size) - 1) if size[dim] in lengths] or list(range(len(size) - 1))


def is_known(node: fx.Node, stream: fx.Node, flow: Dataflow) -> bool:
    """Whether the value is not computed here: the stream, what the graph is given, floats from elsewhere in the model."""
    elsewhere = is_float(node) and node in flow.depends and not flow.reaches(stream, node)
    return node is stream or node.op == "placeholder" or elsewhere


def known_value(node: fx.Node, flow: Dataflow, random: Any) -> Any:
    """Of a buffer or constant its value, of integers ones, of floats random numbers; a matrix is scaled by what it sums over."""
    program, example, size = flow.program, node.meta["val"], shape(node) or ()
    stored = program.values.get(program.constants.get(node) or program.buffers.get(node, ""))
    if not isinstance(example, Tensor):
        return int(example)
    if stored is not None and not (stored.is_meta and node in program.buffers and is_float(node)):
        return stored.detach().cpu()  # raises on the meta device: what a constant hides is unknown
    if not is_float(node):
        return torch.ones(size, dtype=example.dtype)
    return random(node, max(size[1:], default=1) ** -0.5 if node in program.parameters else 1.0)


def run(steps: list[fx.Node], values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The values of these nodes, in order, of those that are known."""
    for node in steps:
        if node not in values:
            values[node] = computed(node, values)
    return values
