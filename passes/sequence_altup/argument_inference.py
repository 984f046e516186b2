"""How the arguments of one layer follow the tokens, and which of them are masks: inferred from captures, by no argument's name.

Masks are distinguished from positions and biases by the graph: the model's own mask enters them, and not by a running count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from retrofit.passes.sequence_altup.anchor_layer import MaskArgument
from retrofit.passes.sequence_altup.argument_paths import ArgumentPath
from retrofit.passes.sequence_altup.layer_requirements import Candidate, unfit
from retrofit.passes.sequence_altup.padding_flow import is_mask_of_inputs, shows_padding
from retrofit.passes.sequence_altup.token_dims import TokenDims, infer_token_dims

Dims = dict[ArgumentPath, TokenDims]


def infer_arguments(one: Candidate) -> Dims:
    """The token dimensions of every argument but the stream; raises `DoesNotFitError` where they cannot be strided."""
    found = infer_token_dims(one.captures.first.shapes(one.layer), one.captured.shapes(one.layer), one.stream, one.tokens_first)
    del found[one.stream]
    nodes = one.argument_nodes
    for path, dims in found.items():
        if len(dims.positions) > 2:
            raise unfit(f"{path[0]} follows the tokens along {len(dims.positions)} dimensions")
        if dims.positions and is_mask(one, path, dims, nodes.get(path)):
            found[path] = dataclasses.replace(dims, shows_padding=True)
    found = with_inverted_masks(one, without_query_masks(found), nodes)
    require_readable_masks(one, found, nodes)
    return found


def is_mask(one: Candidate, path: ArgumentPath, dims: TokenDims, node: fx.Node | None) -> bool:
    """Whether an argument, of which `node` is the value in the graph, shows which tokens are padding."""
    if node is None:
        return one.captures.is_mask_in_container(one.layer, path, dims)
    flow = one.captured.flow
    return shows_padding(flow, node, one.captured.masks) or (len(dims.positions) == 2 and is_mask_of_inputs(flow, node))


def without_query_masks(found: Dims) -> Dims:
    """Next to a mask by queries and keys, one by queries alone says nothing about the keys: it shows no padding."""
    if not any(dims.shows_padding and len(dims.positions) == 2 for dims in found.values()):
        return found
    silent = {path for path, dims in found.items() if dims.rank == 4 and dims.positions == (2,)}
    return {path: dataclasses.replace(dims, shows_padding=False) if path in silent else dims for path, dims in found.items()}


def with_inverted_masks(one: Candidate, found: Dims, nodes: dict[ArgumentPath, fx.Node]) -> Dims:
    """A mask by tokens alone that reads as all padding, where there is none, is one in which zero stands for real tokens."""
    changed = {}
    for path, dims in found.items():
        inverted = dataclasses.replace(dims, zero_is_real=True)
        by_tokens = dims.shows_padding and len(dims.positions) == 1 and dims.rank == 2
        if by_tokens and not one.captures.reads_as_unpadded(nodes.get(path), dims):
            changed[path] = inverted if one.captures.reads_as_unpadded(nodes.get(path), inverted) else dims
    return found | changed


def require_readable_masks(one: Candidate, found: Dims, nodes: dict[ArgumentPath, fx.Node]) -> None:
    """Every mask says in the usual way which tokens are real: by one or True, or by zero where it is added."""
    captures = one.captures
    unclear = [path for path, dims in found.items() if dims.shows_padding and not captures.reads_as_unpadded(nodes.get(path), dims)]
    if unclear:
        captures.values_decided |= any(captures.tables_of(nodes.get(path)) for path in unclear)
        raise unfit(f"what it receives as {unclear[0][0]} says which tokens are padding in a way of its own")


def mask_argument(one: Candidate, found: Dims) -> MaskArgument | None:
    """The argument that is a mask by queries and keys, and its type; None where the layer takes none."""
    for path, dims in found.items():
        if dims.shows_padding and dims.rank == 4 and len(dims.positions) == 2 and len(path) == 1:
            return path, one.captures.first.dtype(one.layer, path)
    return None


def returned_arguments(one: Candidate) -> dict[int | str, ArgumentPath]:
    """The arguments that the layer returns as they are, by their key in its output."""
    arguments: dict[Any, ArgumentPath] = {node: path for path, node in one.argument_nodes.items()}
    outputs = one.call.outputs.items()
    return {key: arguments[node] for key, node in outputs if key is not None and key != one.layer.stream_out and node in arguments}
