"""What the masks of an attention hide, by running the part of the graph that computes them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from retrofit.anatomy.attention_cores import Attention
from retrofit.program.aten_ops import (
    CAST,
    JOIN,
    extent,
    op,
    shape,
)
from retrofit.program.dataflow import Dataflow

LARGEST_MASK_INPUT = 1 << 20  # elements of a parameter that a mask may be computed from


def is_causal(core: Attention, stream: fx.Node, flow: Dataflow) -> bool:
    """Whether no query position can see a later key of the stream; masks are computed with every input position real."""
    if core.causal_flag:
        return True
    own = keys_of_stream(core, stream, flow)
    with torch.device("cpu"):  # also where the default device is another
        values = [value for mask in core.masks if (value := mask_value(mask, flow)) is not None]
        among_others = [value[..., own] for value in values if own is not None and value.dim() >= 2 and value.shape[-1] >= own.stop]
        square = [value for value in among_others or values if value.dim() >= 2 and value.shape[-1] == value.shape[-2]]
        visible = [unmasked_keys(value) for value in square]
        return bool(visible) and not bool(functools.reduce(torch.logical_and, visible).triu(1).any())


def keys_of_stream(core: Attention, stream: fx.Node, flow: Dataflow) -> slice | None:
    """Which of the keys are computed from the stream, where others are joined to them in the dimension of the tokens."""
    node = core.key
    while op(node) in CAST and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    size = shape(node) or ()
    if op(node) not in JOIN or len(node.args) < 2 or int(node.args[1]) % len(size) != len(size) - 2:  # type: ignore[arg-type]
        return None
    found, start = [], 0
    for part in node.all_input_nodes:
        count = (shape(part) or size)[-2]
        if flow.reaches(stream, part):
            found.append(slice(start, start + count))
        start += count
    return found[0] if len(found) == 1 and start == size[-2] else None


def unmasked_keys(mask: torch.Tensor) -> torch.Tensor:
    """The keys that a mask leaves visible; a boolean mask that is false all along its diagonal marks the hidden ones."""
    if mask.dtype != torch.bool:
        return mask > -1e4
    return mask if mask.diagonal(dim1=-2, dim2=-1).any() else ~mask


def zeros_for(node: fx.Node) -> Any:
    """Zeros of the shape of `node`, for operations that read only its shape."""
    example = node.meta["val"]
    if not isinstance(example, torch.Tensor):
        return extent(example)
    size = shape(node) or ()
    if math.prod(size) > LARGEST_MASK_INPUT:
        raise ValueError(f"{node.name} is too large")
    return torch.zeros(size, dtype=example.dtype)


def mask_value(mask: fx.Node, flow: Dataflow) -> torch.Tensor | None:
    """The value of a mask for inputs without padding; parameters count as zeros, None where it depends on a large tensor."""
    program = flow.program
    ancestors = [node for node in flow.nodes if flow.ancestors[mask] & flow.bit(node)]
    values: dict[fx.Node, Any] = {}
    for node in ancestors:
        example = node.meta.get("val")
        if node.op == "placeholder":
            if not isinstance(example, torch.Tensor):
                values[node] = example
                continue
            size = shape(node) or ()
            if math.prod(size) > LARGEST_MASK_INPUT:
                return None
            stored = program.values.get(program.constants.get(node) or program.buffers.get(node, ""))
            if node in program.inputs:
                values[node] = torch.ones(size, dtype=example.dtype)
            elif stored is not None and not stored.is_meta:
                values[node] = stored.detach().cpu()
            else:
                values[node] = torch.zeros(size, dtype=example.dtype)
            continue
        if node.op != "call_function":
            return None
        try:
            arguments = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda part: values[part] if part in values else zeros_for(part)
            )
            args, kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), arguments)
            if op(node).startswith("_assert"):
                values[node] = None
                continue
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # operations that do not run outside the graph
            return None
    result = values.get(mask)
    return result if isinstance(result, torch.Tensor) else None
