"""What a model does without a mask: most hide nothing, some hide the padding, which they detect by its ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.runtime.example_inputs import device_of, special_ids, vocabulary_of
from retrofit.runtime.probes import Inputs, distance, named_outputs, tolerance_of
from retrofit.runtime.state_preservation import preserve_state


@torch.no_grad()
def agrees_without_masks(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Whether two modules agree on these inputs, of which none is a mask, with special ids at the end of every row.

    Models on the meta device count as agreeing.
    """
    if device_of(model).type == "meta":
        return True
    special = torch.tensor(sorted(one for one in special_ids(model) if 0 <= one < vocabulary_of(model)), dtype=torch.long)
    given = {name: end_with_special_ids(value, special) if name.endswith("input_ids") else value for name, value in inputs.items()}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with preserve_state(model), preserve_state(other):
        theirs, ours = named_outputs(model(**given)), named_outputs(other(**tensors))
    return all(distance(ours[name], value) <= tolerance_of(value) for name, value in theirs.items() if name in ours)


def end_with_special_ids(ids: Any, special: Tensor) -> Any:
    """The ids (batch, length) with the special ones at the end of every row."""
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return ids
    count = min(len(special), ids.shape[1] - 1)
    return torch.cat([ids[:, : ids.shape[1] - count], special[:count].to(ids).expand(len(ids), count)], 1)
