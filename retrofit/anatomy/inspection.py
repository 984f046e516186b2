"""`inspect`: the anatomy of a model from the data flow of its captured graph."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from retrofit.anatomy import Anatomy
from retrofit.anatomy.attention_cores import find_attentions
from retrofit.anatomy.branches import describe_branches, is_in_branch, is_mixer
from retrofit.anatomy.parts import Branch
from retrofit.anatomy.residual_streams import Residual, residual_chains
from retrofit.anatomy.stacks import describe_stack, find_head, modules_outside, tied_parameter_names, token_tables
from retrofit.anatomy.weights import nearest_products
from retrofit.errors import NoTransformerError, first_few
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import offloaded_module, without_weights
from retrofit.inputs.usable_models import require_module, transformer_inside, untrainable_tensor
from retrofit.process import serialized
from retrofit.program.aten_ops import shape
from retrofit.program.capture import capture
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Program


@serialized
def inspect(model: nn.Module, example_inputs: Any = None) -> Anatomy:
    """Return the anatomy of `model`: its stacks, layers, branches, embedding and head.

    Raises `NoTransformerError` if it has none.
    """
    require_module(model)
    if offloaded_module(model) is not None or untrainable_tensor(model) is not None:
        model = without_weights(model)
    model = transformer_inside(model, example_inputs)
    return read_anatomy(model, capture(model, named_inputs(model, example_inputs)))


def read_anatomy(model: nn.Module, program: Program) -> Anatomy:
    """Return the anatomy of `model` in the program that was captured from it."""
    flow = Dataflow(program)
    attentions = find_attentions(flow)
    chains, latest = residual_chains(flow)
    notes: list[str] = []
    described = [Stream(chain, describe_branches(chain, attentions, flow)) for chain in chains]
    streams = without_images([stream for stream in described if stream.mixes], chains, flow, model, notes)
    if not streams:
        raise NoTransformerError(
            f"{type(model).__name__} has no residual stream with an attention or another mixer in it",
            why=f"its graph has {len(flow.nodes)} nodes, {len(attentions)} attentions and {len(chains)} chains of residual"
            f" additions{f', the longest of {max(map(len, chains))}' if chains else ''}",
            remedy="retrofit rewrites transformers: x + f(x) layers with attention and feed-forward branches",
            code="no-stack",
        )
    stacks = tuple(describe_stack(stream.chain, stream.branches, attentions, flow, latest, notes) for stream in streams)
    outside = [core for core in attentions if not any(is_in_branch(core, stream.chain, flow) for stream in streams)]
    if outside:
        names = first_few((core.result.name for core in outside), 4)
        notes.append(f"{len(outside)} attention(s) outside every residual stream: {names}")
    tables = token_tables(flow)
    entries = [flow.node(stack.entry) for stack in stacks]
    feeding = [part for part, node in tables if any(flow.reaches(node, entry) for entry in entries)]
    return Anatomy(
        stacks=stacks,
        embedding=max(feeding, key=lambda part: part.shape[0], default=None),
        embeddings=tuple(dict.fromkeys(part for part, _ in tables)),
        head=find_head(flow),
        stem=modules_outside(flow, stacks, before=True),
        tail=modules_outside(flow, stacks, before=False),
        tied=tied_parameter_names(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=tuple(notes),
        flow=flow,
        model=model,
    )


@dataclasses.dataclass(frozen=True)
class Stream:
    """A chain of residual additions and the branches of each."""

    chain: list[Residual]
    branches: list[list[Branch]]

    @property
    def mixes(self) -> bool:
        """True if a branch of the stream mixes tokens."""
        return any(is_mixer(branch) for branches in self.branches for branch in branches)


def without_images(
    streams: list[Stream], chains: list[list[Residual]], flow: Dataflow, model: nn.Module, notes: list[str]
) -> list[Stream]:
    """Return the streams of tokens; raises `NoTransformerError` if all are image streams, with the channels on the second axis."""
    if not any(has_channels_second(residual, flow) for chain in chains for residual in chain):
        return streams
    images = [stream for stream in streams if all(has_channels_second(residual, flow) is not False for residual in stream.chain)]
    if images and len(images) == len(streams):
        size = "×".join(map(str, shape(images[0].chain[0].add) or ()))
        raise NoTransformerError(
            f"the residual streams of {type(model).__name__} have their channels on the second axis",
            why=f"the residual sums are {size}, as convolutions take them",
            remedy="retrofit rewrites token streams, with the channels on the last axis",
            code="other-layout",
        )
    if images:
        notes.append(f"{len(images)} residual stream(s) of images, with the channels on the second axis")
    return [stream for stream in streams if stream not in images]


def has_channels_second(residual: Residual, flow: Dataflow) -> bool | None:
    """Return whether the sum's channels are on the second axis, as in convolutions.

    None if they may be on the last as well.
    """
    size = shape(residual.add) or ()
    features = {product.out_features for product in nearest_products(list(residual.branches), flow)}
    if len(size) not in (3, 4) or size[1] not in features:
        return False
    return None if size[-1] in features else True
