"""`inspect`: the anatomy of a model, found in the data flow of its captured graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.attention_cores import find_attentions
from retrofit.anatomy.branches import describe_branches, is_in_branch, is_mixer
from retrofit.anatomy.outside_stacks import find_head, modules_outside, tied_parameter_names, token_tables
from retrofit.anatomy.residual_streams import Residual, residual_chains
from retrofit.anatomy.stacks import describe_stack
from retrofit.anatomy.weight_products import nearest_products
from retrofit.errors import NoTransformerError
from retrofit.program.aten_ops import shape
from retrofit.program.capture import capture
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program
from retrofit.runtime.example_inputs import named_inputs


def inspect(model: nn.Module, example_inputs: Any = None) -> Anatomy:
    """The anatomy of `model`: its stacks, layers, branches, embedding and head; raises `NoTransformerError` where it has none."""
    return read_anatomy(model, capture(model, named_inputs(model, example_inputs)))


def read_anatomy(model: nn.Module, program: Program) -> Anatomy:
    flow = Dataflow(program)
    cores = find_attentions(flow)
    chains, latest = residual_chains(flow)
    notes: list[str] = []
    described = [(chain, describe_branches(chain, cores, flow)) for chain in chains]
    streams = [(chain, table) for chain, table in described if any(is_mixer(one) for branches in table for one in branches)]
    seen = any(features_axis(one, flow) == 1 for chain in chains for one in chain)
    pictures = [pair for pair in streams if seen and all(features_axis(one, flow) >= 0 for one in pair[0])]
    if pictures and len(pictures) == len(streams):
        size = "×".join(map(str, shape(pictures[0][0][0].add) or ()))
        raise NoTransformerError(
            f"{type(model).__name__} has residual streams, of pictures and not of tokens",
            why=f"what is added up is {size}, with the channels on its second axis",
            remedy="retrofit rewrites streams of tokens, whose last axis is what the layers work on",
        )
    if pictures:
        notes.append(f"{len(pictures)} residual stream(s) of pictures, with the channels on the second axis")
    streams = [pair for pair in streams if pair not in pictures]
    if not streams:
        raise NoTransformerError(
            f"{type(model).__name__} has no residual stream with an attention or another mixer in it",
            why=f"its graph has {len(flow.nodes)} nodes, {len(cores)} attentions and {len(chains)} chains of residual additions"
            + (f", the longest of {max(map(len, chains))}" if chains else ""),
            remedy="retrofit rewrites transformers: x + f(x) layers with attention and feed-forward branches",
        )
    stacks = tuple(describe_stack(chain, table, cores, flow, latest, notes) for chain, table in streams)
    outside = [core for core in cores if not any(is_in_branch(core, chain, flow) for chain, _ in streams)]
    if outside:
        notes.append(
            f"{len(outside)} attention(s) outside every residual stream: {', '.join(core.result.name for core in outside[:4])}"
        )
    head = find_head(flow)
    tables = token_tables(flow)
    entries = [next(node for node in flow.nodes if node.name == stack.entry) for stack in stacks]
    feeding = [part for part, node in tables if any(flow.reaches(node, entry) for entry in entries)]
    token = max(feeding, key=lambda part: part.shape[0], default=None)
    return Anatomy(
        stacks=stacks,
        embedding=token,
        embeddings=tuple(dict.fromkeys(part for part, _ in tables)),
        head=head,
        stem=modules_outside(flow, stacks, before=True),
        tail=modules_outside(flow, stacks, before=False),
        tied=tied_parameter_names(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=tuple(notes),
        flow=flow,
        model=model,
    )


def features_axis(residual: Residual, flow: Dataflow) -> int:
    """The axis with the features of what is added: −1, the last, or 1, as convolutions have it; 0 where it may be either."""
    size = shape(residual.add) or ()
    made = {product.out_features for product in nearest_products(list(residual.branches), flow)}
    if len(size) != 4 or size[1] not in made:
        return -1
    return 0 if size[-1] in made else 1
