"""Inputs of two sides, an encoder's and a decoder's, of different lengths: what follows one side's tokens shows in its extents."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from retrofit.runtime.probes import Inputs, is_numbering, is_per_token, is_token_ids, run
from retrofit.runtime.state_preservation import preserve_state


def sides_apart(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The inputs; of two sides as long as each other the second is one token longer, where the model runs on that.

    Which argument is of which side nobody says: the two that hold token ids, and what is named like the second of them. Inputs
    without values (on the meta device) are left as they are.
    """
    second = second_side(inputs)
    longer = {name: one_token_longer(value) if name in second else value for name, value in inputs.items()}
    try:
        if second:
            with preserve_state(model), torch.no_grad():
                run(model, longer)
    except Exception:  # whatever the model's own code raises: it takes them as long as each other only
        return dict(inputs)
    return longer


def second_side(inputs: Inputs) -> set[str]:
    """The arguments that may be of the second side; none where there are not two sides of one length."""
    ids = [name for name, one in inputs.items() if isinstance(one, torch.Tensor) and not one.is_meta and is_token_ids(one)]
    if len(ids) != 2 or inputs[ids[0]].shape != inputs[ids[1]].shape:
        return set()
    shape = inputs[ids[0]].shape
    named = [name for name, one in inputs.items() if isinstance(one, torch.Tensor) and one.shape[:2] == shape]
    return {name for name in named if likeness(name, ids[1]) > likeness(name, ids[0])}


def likeness(one: str, other: str) -> int:
    """How many letters two names begin with together."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def one_token_longer(value: torch.Tensor) -> torch.Tensor:
    """The values with the first token's once more at the end; a numbering goes on."""
    if is_per_token(value) and is_numbering(value):
        return torch.arange(value.shape[1] + 1).to(value).expand(len(value), -1).contiguous()
    return torch.cat([value, value[:, :1]], 1)
