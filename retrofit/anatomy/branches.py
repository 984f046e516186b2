"""The branches of a residual stream: what each computes, with which weights, in which module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from torch import fx

from retrofit.anatomy.attention_cores import Attention, find_attentions
from retrofit.anatomy.branch_roles import role_of
from retrofit.anatomy.parts import Branch, Layer, Stack
from retrofit.anatomy.projection_roles import describe_projections
from retrofit.anatomy.residual_streams import Residual, every_chain, is_addition, residual_at
from retrofit.program.aten_ops import is_heavy
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call


def is_mixer(branch: Branch) -> bool:
    """Whether the branch mixes tokens: an attention or another mixer."""
    return branch.role not in ("ffn", "moe")


def is_in_branch(core: Attention, chain: list[Residual], flow: Dataflow) -> bool:
    """Whether the attention is in a branch of the chain."""
    return any(flow.reaches(core.result, branch) for one in chain for branch in one.branches)


def describe_branches(chain: list[Residual], cores: list[Attention], flow: Dataflow) -> list[list[Branch]]:
    """The branches of each residual addition of a stream."""
    origin = chain[0].base
    table = []
    for one in chain:
        branches = []
        for output in one.branches:
            region = flow.between(one.base, output)
            role = role_of(region, cores, origin, flow)
            inner = [core for core in cores if core.result in set(region)]
            weights = describe_projections(region, role, cores, flow)
            sizes = flow.parameters_of(region)
            sizes.update({item.name: item.in_features * item.out_features for item in weights if item.name not in sizes})
            branches.append(
                Branch(
                    role=role,
                    name=owner_of([node for node in region if is_heavy(node)] or region, flow).path,
                    projections=weights,
                    parameters=sum(sizes.values()),
                    source=one.base.name,
                    output=output.name,
                    add=one.add.name,
                    heads=inner[0].heads if inner else None,
                    gated=any(item.role in ("gate", "gate_up") for item in weights) and role in ("ffn", "moe"),
                )
            )
        table.append(branches)
    return table


ON_TWO_STREAMS = "it reads the stream behind another branch, and is added to the stream before that one: these are two streams"
BEFORE_TWO_STREAMS = "a pass that puts a model on two streams goes last"


def is_on_two_streams(branch: Branch, stacks: Iterable[Stack], flow: Dataflow) -> bool:
    """Whether sums of other branches lie within the branch: it reads the newer of two streams, and is added to the older one."""
    sums = {other.add for stack in stacks for layer in stack.layers for other in layer.branches} - {branch.add}
    return any(node.name in sums for node in flow.between(flow.node(branch.source), flow.node(branch.output)))


LAYER_WITHIN = "it is a layer within a layer: one branch of the stream adds branches of its own"
BEFORE_THE_OUTER = "rewrite the feed-forwards before what wraps their layers"


def holds_sums(branch: Branch, flow: Dataflow) -> bool:
    """Whether the branch adds branches of its own to what it reads: a layer within a layer."""
    region = set(flow.between(flow.node(branch.source), flow.node(branch.output)))
    sums = (residual_at(node, flow, {}) for node in region if is_addition(node, flow))
    return any(one is not None and one.base in region and region.issuperset(one.branches) for one in sums)


@dataclasses.dataclass(frozen=True)
class InnerLayers:
    """The layers within layers of one program: a layer that computes some of the tokens, say, is one branch of the stream."""

    flow: Dataflow

    @functools.cached_property
    def chains(self) -> list[list[Residual]]:
        return every_chain(self.flow)[0]

    @functools.cached_property
    def cores(self) -> list[Attention]:
        return find_attentions(self.flow)

    def inside(self, layer: Layer) -> Layer:
        """The layer with the branches that its only branch adds to what it reads; the layer itself where that adds none."""
        if layer.ffns or len(layer.branches) != 1 or not holds_sums(layer.branches[0], self.flow):
            return layer
        (around,) = layer.branches
        region = set(self.flow.between(self.flow.node(around.source), self.flow.node(around.output)))
        inner = [chain for chain in self.chains if all(region.issuperset((one.base, one.add, *one.branches)) for one in chain)]
        found = [one for part in describe_branches(max(inner, key=len), self.cores, self.flow) for one in part] if inner else []
        return dataclasses.replace(layer, branches=tuple(found)) if any(not is_mixer(one) for one in found) else layer


def owner_of(nodes: list[fx.Node], flow: Dataflow) -> Call:
    """The innermost module call in which all of `nodes` were computed."""
    common = flow.call_of(nodes[0])
    for node in nodes[1:]:
        call = flow.call_of(node)
        common = next(outer for outer in common.chain if outer.encloses(call))
    return common
