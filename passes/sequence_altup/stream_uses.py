"""What becomes of a layer's stream after the layer: whether anything can be learnt from it, and whether all its tokens are read."""

from __future__ import annotations

import torch
from torch import fx

from retrofit.sdk import Dataflow, op, shape


def has_gradient(flow: Dataflow, stream: fx.Node) -> bool:
    """Whether an output depends on the stream through real numbers all the way, and not by choices only."""
    outputs, pending, seen = set(flow.program.outputs.values()), [stream], {stream}
    while pending:
        value = pending.pop()
        if value in outputs:
            return True
        for user in flow.uses[value]:
            example = user.meta.get("val")
            parts = example if isinstance(example, (tuple, list)) else (example,)
            if user not in seen and any(isinstance(part, torch.Tensor) and part.is_floating_point() for part in parts):
                seen.add(user)
                pending.append(user)
    return False


def is_read_at_fixed_tokens_only(flow: Dataflow, stream: fx.Node) -> bool:
    """Whether only tokens at fixed indices of the stream (batch, tokens, width) are read, before anything joins the tokens."""
    length = (shape(stream) or (0, 0))[1]
    pending, seen, selects = [stream], {stream}, False
    while pending:
        for user in flow.uses[pending.pop()]:
            size = shape(user)
            if user in seen:
                continue
            seen.add(user)
            if op(user) == "getitem" or (size is not None and len(size) == 3 and size[1] == length):
                pending.append(user)
            elif op(user) == "select":
                selects = True
            elif op(user) != "sym_size":
                return False
    return selects
