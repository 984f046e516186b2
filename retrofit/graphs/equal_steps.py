"""Steps of a program that compute the same from the same become one, where the matrices of a feed-forward read their results.

`w1(norm(x)) * w3(norm(x))` is a gated feed-forward of one tensor.
"""

from __future__ import annotations

import torch
from torch import fx

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.feed_forward_parsing import products_of
from retrofit.anatomy.weight_matrices import operand_chain
from retrofit.errors import DoesNotFitError
from retrofit.program.autograd_annotations import NO_GRAD, annotation
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program


def merge_equal_steps(program: Program, anatomy: Anatomy) -> bool:
    """The matrices of a feed-forward read one tensor where they read equal ones; whether the program changed."""
    flow, changed = anatomy.flow, False
    for branch in (branch for layer in anatomy.layers for branch in layer.ffns if branch.role == "ffn"):
        source = flow.node(branch.source)
        try:
            _, into = products_of(branch, flow.between(source, flow.node(branch.output)), flow)
        except DoesNotFitError:
            continue
        read = {operand_chain(product, flow)[-1] for product in into}
        if len(read) > 1:
            changed |= merge_equal_nodes(program, nodes_above(read, source, flow))
    return changed


def nodes_above(read: set[fx.Node], source: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """The nodes that those `read` depend on and `source` does not, themselves included, in order."""
    mask = 0
    for node in read:
        mask |= flow.ancestors[node]
    mask &= ~flow.ancestors[source]
    return [node for node in flow.nodes if mask & flow.bit(node) and node.op == "call_function"]


def merge_equal_nodes(program: Program, nodes: list[fx.Node]) -> bool:
    """No two of the nodes, which come in order, compute the same from the same, unless they draw; whether two did."""
    first: dict[str, fx.Node] = {}
    merged = False
    for node in nodes:
        same = first.setdefault(str((node.target, node.args, node.kwargs, annotation(node, NO_GRAD))), node)
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if same is not node and not draws:
            program.replace_node(node, same)
            merged = True
    return merged
