"""Which module a feed-forward is replaced at: the one that owns all of it, or the last of the several that it is spread over."""

from __future__ import annotations

import dataclasses

from torch import fx

from retrofit.anatomy.elementwise_outline import ElementwiseFunction, ElementwiseOutline, Step, times_called
from retrofit.anatomy.feed_forward_sites import no_feed_forward
from retrofit.anatomy.parts import Branch
from retrofit.anatomy.weight_matrices import operand_chain
from retrofit.anatomy.weight_products import WeightProduct
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, LAYOUT, op, shape
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key


@dataclasses.dataclass(frozen=True)
class Place:
    """The module at `path` takes x as `stream_in`, and applies `tail` to y; the modules `bypassed` run before it on the way."""

    stream_in: Key
    path: str
    tail: ElementwiseFunction | None = None
    bypassed: tuple[str, ...] = ()


def place_in_owner(owner: Call, candidates: list[fx.Node], y: fx.Node, hidden: ElementwiseOutline) -> Place | None:
    """The place where one call takes x, one of `candidates`, and returns an element-wise function of y; None if it does more."""
    flow = hidden.flow
    stream_in, x = next(((key, node) for key, node in owner.inputs.items() if node in candidates), (None, None))
    if not owner.path or x is None or list(owner.outputs) != [None]:
        return None
    result = owner.outputs[None]
    if not flow.reaches(y, result):
        return None
    own = nodes_of(owner, flow)
    if any(not flow.reaches(x, node) or not (flow.reaches(node, y) or flow.reaches(y, node)) for node in own):
        return None
    after = flow.between(y, result) if result is not y else []
    if set(after) != {node for node in own if flow.reaches(y, node) and node is not y}:
        return None
    try:
        tail = ElementwiseOutline(hidden.branch, hidden.model, flow, [y], (shape(y) or (0,))[-1]).build(result)
    except DoesNotFitError:
        return None
    return Place(stream_in, owner.path, tail if tail.steps or tail.dropout else None)


def place_over_modules(
    branch: Branch, into: list[WeightProduct], out: WeightProduct, steps: tuple[Step, ...], flow: Dataflow
) -> Place:
    """The place of a feed-forward in several modules: the last one computes all of it, those before it return x."""
    calls = [flow.call_of(product.node) for product in (*into, out)]
    if len(into) > 1:
        raise no_feed_forward(branch, "it is spread over several modules, and its gate is applied by code between them")
    passing = [calls[0]]
    for step in steps:
        call = enclosing_step(step, into[0], out, flow) if isinstance(step, fx.Node) else step
        if call is None:
            where = f"{op(step)} in {step.name}"  # type: ignore[union-attr,arg-type]
            raise no_feed_forward(branch, f"it is spread over several modules, with code between them: {where}")
        passing.append(call)
    for call, product in zip(calls, (*into, out), strict=True):
        others = nodes_of(call, flow)
        if not call.path or any(op(node) not in LAYOUT | CAST | {"add"} and node is not product.node for node in others):
            why = f"the matrix {product.parameter} is applied by the code of {call.path or 'the model'} itself"
            raise no_feed_forward(branch, why)
    outermost = [call for call in passing if not any(other.encloses(call) for other in passing if other is not call)]
    for call in outermost:
        if list(call.outputs) != [None]:
            raise no_feed_forward(branch, f"it is spread over several modules, and {call.path} returns more than one tensor")
        if list(call.inputs) != [0]:
            why = f"it is spread over several modules, and {call.path} takes more than one tensor, or one by name"
            raise no_feed_forward(branch, why)
    last = calls[-1]
    if list(last.outputs) != [None]:
        raise no_feed_forward(branch, f"it is spread over several modules, and {last.path} returns more than one tensor")
    for call in outermost:
        if times_called(call, flow) != times_called(last, flow):
            raise no_feed_forward(branch, f"it is spread over several modules, and {call.path} also runs outside of it")
    stream_in = next((key for key, node in last.inputs.items() if node in flow.depends), 0)
    return Place(stream_in, last.path, bypassed=tuple(dict.fromkeys(call.path for call in outermost)))


def enclosing_step(node: fx.Node, into: WeightProduct, out: WeightProduct, flow: Dataflow) -> Call | None:
    """The outermost call that computes `node` and nothing but steps of the feed-forward, from one tensor on its way to another."""
    outermost = None
    for call in flow.call_of(node).chain:
        entering = [part for part in call.inputs.values() if part in flow.depends]
        if not call.path or len(entering) != 1 or call.inputs.get(0) is not entering[0] or list(call.outputs) != [None]:
            continue
        result = call.outputs[None]
        own = set(nodes_of(call, flow))
        begins = entering[0] in operand_chain(into, flow) or flow.reaches(into.node, entering[0])
        if begins and flow.reaches(result, out.source) and out.node not in own and own <= set(flow.between(entering[0], result)):
            outermost = call
    return outermost


def is_computed_by(node: fx.Node, paths: tuple[str, ...], flow: Dataflow) -> bool:
    """Whether a node is computed within a call of one of the modules at `paths`."""
    return any(call.path in paths for call in flow.call_of(node).chain)


def nodes_of(call: Call, flow: Dataflow) -> list[fx.Node]:
    """The nodes that a call computes from its inputs; a tracer's assertions are none."""
    return [node for node in flow.computations if call.encloses(flow.call_of(node))]
