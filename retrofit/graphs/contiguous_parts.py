"""Order a program so that a feed-forward is one stretch of it: what its code computes in between goes before it, or after it.

`x + attention(y) + down(act(up(y)))` adds the attention's result after `up` and before `down`: two branches in one expression.
"""

from __future__ import annotations

from torch import fx

from retrofit.anatomy.anatomy import Anatomy
from retrofit.graphs.regions import Region, feed_forward_span
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program


def make_feed_forwards_contiguous(program: Program, anatomy: Anatomy) -> bool:
    """Every feed-forward in code is one stretch where it can be; whether the order of the program changed."""
    flow, changed = anatomy.flow, False
    for branch in (branch for layer in anatomy.layers for branch in layer.ffns if branch.role == "ffn"):
        region = flow.between(flow.node(branch.source), flow.node(branch.output))
        span = feed_forward_span(branch, region, flow)
        if span is not None and move_interleaved_nodes(span, set(region), flow):
            flow, changed = Dataflow(program), True
    return changed


def move_interleaved_nodes(span: Region, inside: set[fx.Node], flow: Dataflow) -> bool:
    """What lies in the span and is not `inside` comes before it, or after it where it depends on the span; whether any does."""
    stretch = flow.nodes[span.first : span.last + 1]
    own = [node for node in stretch if node in inside]
    others = [node for node in stretch if node not in inside and node.op == "call_function"]
    if not any(node in flow.computations for node in others):
        return False
    mask = sum(flow.bit(node) for node in own)
    after = [node for node in others if flow.ancestors[node] & mask]
    before = [node for node in others if not flow.ancestors[node] & mask]
    early, late = {*flow.nodes[: span.first], *before}, {*flow.nodes[span.last + 1 :], *after}
    for call in {call for node in others for call in flow.call_of(node).chain}:
        computed = [node for node in flow.computations if call.encloses(flow.call_of(node))]
        if not (early.issuperset(computed) or late.issuperset(computed) or set(computed).issuperset(own)):
            return False  # the call would be in two pieces
    for node in before:
        own[0].prepend(node)
    for node in reversed(after):
        own[-1].append(node)
    return True
