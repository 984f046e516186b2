"""Stacks and their layers, each with the argument and the output that are the stream."""

from __future__ import annotations

import math

from torch import fx

from retrofit.anatomy.attention_cores import Attention
from retrofit.anatomy.branches import is_in_branch
from retrofit.anatomy.layer_groups import LayerGroup, layer_groups
from retrofit.anatomy.mask_values import is_causal
from retrofit.anatomy.mixer_causality import reads_ahead
from retrofit.anatomy.parts import NO_STREAM, Branch, Layer, NoStream, Stack
from retrofit.anatomy.residual_streams import Latest, Residual
from retrofit.program.aten_ops import NORM, is_heavy, op, shape
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key


def describe_stack(
    chain: list[Residual], table: list[list[Branch]], cores: list[Attention], flow: Dataflow, latest: Latest, notes: list[str]
) -> Stack:
    """The stack that a stream runs through; `table` holds the branches of each addition of the chain."""
    by_residual = dict(zip(chain, table, strict=True))
    call, groups = layer_groups(chain, by_residual, flow, notes)
    layers = tuple(describe_layer(group, by_residual, flow, latest) for group in groups)
    used = [one for group in groups for one in group.residuals]
    inside = [core for core in cores if is_in_branch(core, used, flow)]
    base = chain[0].base
    attending_itself = [core for core in inside if any(flow.reaches(base, key) for key in core.keys)]
    crossing = any(branch.role == "cross-attention" for one in used for branch in by_residual[one])
    if attending_itself:
        causal = all(is_causal(core, base, flow) for core in attending_itself)
    else:
        mixers = [branch for one in used for branch in by_residual[one] if branch.role == "other mixer"]
        causal = bool(mixers) and not crossing and flow.program.inputs != {}
        causal = causal and not reads_ahead(flow.node(mixers[0].output), flow.node(mixers[0].source), flow)
    size = shape(chain[-1].add) or (0,)
    return Stack(
        kind="decoder" if causal or crossing else "encoder",
        name=call.path,
        width=size[-1],
        layers=layers,
        causal=causal,
        entry=layers[0].entry,
        exit=layers[-1].exit,
    )


def describe_layer(group: LayerGroup, table: dict[Residual, list[Branch]], flow: Dataflow, latest: Latest) -> Layer:
    """The layer of one group of additions, with the places of its stream."""
    first, last = group.residuals[0], group.residuals[-1]
    branches = tuple(branch for one in group.residuals for branch in table[one])
    if group.call is None:
        sizes = flow.parameters_of(flow.between(first.base, last.add))
        return Layer("", 0, branches, (), sum(sizes.values()), NO_STREAM, NO_STREAM, first.base.name, last.add.name)
    call = group.call
    key_in, entry = stream_input(call, group.residuals, flow)
    key_out, end = stream_output(call, last, latest)
    weights = [node for node, name in flow.program.parameters.items() if name.startswith(call.path + ".")]
    return Layer(
        name=call.path,
        call=call.index,
        branches=branches,
        norms=norm_paths(call, flow),
        parameters=sum(math.prod(shape(node) or ()) for node in weights),
        stream_in=key_in,
        stream_out=key_out,
        entry=entry.name,
        exit=end.name,
    )


def stream_input(call: Call, residuals: list[Residual], flow: Dataflow) -> tuple[int | str | NoStream, fx.Node]:
    """The argument of `call` that is the stream, and its node."""
    base = residuals[0].base
    above = set(flow.carried_chain(base))
    arguments = [(key, node) for key, node in call.inputs.items() if key is not None]
    for key, node in arguments:
        if node in above:
            return key, node
    size = shape(base)
    previous = residuals[0].previous
    for key, node in arguments:  # a layer whose own code first blends the stream with something else
        if shape(node) == size and flow.reaches(node, base) and (previous is None or flow.reaches(previous.add, node)):
            return key, node
    return NO_STREAM, base


def stream_output(call: Call, last: Residual, latest: Latest) -> tuple[Key | NoStream, fx.Node]:
    """The output of `call` that is the stream after `last`, and its node."""
    for key, node in call.outputs.items():
        if latest.get(node) is last:
            return key, node
    return NO_STREAM, last.add


def norm_paths(call: Call, flow: Dataflow) -> tuple[str, ...]:
    """The normalisation modules called within `call`."""
    found: dict[str, None] = {}
    kinds: dict[Call, set[str]] = {}
    for node in flow.nodes:
        kinds.setdefault(flow.call_of(node), set()).add("heavy" if is_heavy(node) else op(node))
    for inner, names in kinds.items():
        if inner is not call and call.encloses(inner) and "heavy" not in names and names & (NORM | {"rsqrt"}):
            found[inner.path] = None
    return tuple(found)
