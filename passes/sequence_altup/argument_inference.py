"""How the arguments of one layer follow the tokens, and which of them are masks: inferred from captures, by no argument's name.

Masks are distinguished from positions and biases by the graph: the model's own mask enters them, and not by a running count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import fx

from retrofit.passes.sequence_altup.anchor_layer import MaskArgument
from retrofit.passes.sequence_altup.argument_paths import ArgumentPath
from retrofit.passes.sequence_altup.layer_requirements import Candidate, unfit
from retrofit.passes.sequence_altup.padding_flow import is_mask_of_inputs, shows_padding
from retrofit.passes.sequence_altup.token_dims import Shapes, TokenDims, infer_token_dims
from retrofit.sdk import shape

Dims = dict[ArgumentPath, TokenDims]


def infer_arguments(one: Candidate) -> Dims:
    """The token dimensions of every argument but the stream; raises `DoesNotFitError` where they cannot be strided."""
    shapes = one.captures.first.shapes(one.layer), one.captured.shapes(one.layer)
    found = infer_token_dims(*shapes, one.stream, one.tokens_first)
    del found[one.stream]
    nodes = one.argument_nodes
    require_entries_for_single_tokens(one, shapes, found)
    for path, dims in found.items():
        if len(dims.positions) > 2:
            raise unfit(f"{path[0]} follows the tokens along {len(dims.positions)} dimensions")
        if dims.positions and is_mask(one, path, dims, nodes.get(path)):
            found[path] = dataclasses.replace(dims, shows_padding=True)
    found = with_inverted_masks(one, without_query_masks(found), nodes)
    require_readable_masks(one, found, nodes)
    return found


def require_entries_for_single_tokens(one: Candidate, shapes: tuple[Shapes, Shapes], paths: Iterable[ArgumentPath]) -> None:
    """Of a model whose inputs all follow the same tokens, no argument has one entry for several of them, or several for one.

    With another side's tokens, an encoder's, it is theirs that the entries may be of.
    """
    if has_other_tokens(one):
        return
    for path in paths:
        extents = zip(shapes[0][path], shapes[1][path], strict=False)
        if any(is_other_count(one, *pair) for pair in extents):
            raise unfit(f"it receives {path[0]}, which has no single entry for each token", "leave its depth out with layers=…")


def has_other_tokens(one: Candidate) -> bool:
    """Whether some input of the model is of other tokens than the stream."""
    first, second = (
        {name: shape(node) for node, name in each.program.inputs.items()} for each in (one.captures.first, one.captured)
    )
    pairs = (zip(first.get(name) or (), after or (), strict=False) for name, after in second.items())
    return any(is_other_count(one, *pair) for extents in pairs for pair in extents)


def is_other_count(one: Candidate, before: int, after: int) -> bool:
    """Whether an extent in the two captures follows the inputs, and neither the stream's tokens nor the batch."""
    batches = one.captures.first.batch, one.captured.batch
    return before != after and (before, after) != one.lengths and before * batches[1] != after * batches[0]


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
