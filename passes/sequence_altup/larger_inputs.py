"""A model's example inputs for a larger batch of longer sequences, where nobody says which extents are batch and which length.

What is certain: integers of two dimensions are one a token, and whatever is as long as they are grows with them. Everything else is
guessed, and the model decides by running or failing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retrofit.sdk import is_numbering, is_per_token

MORE = 8  # tokens


def length_of(inputs: Mapping[str, Any]) -> int:
    """The number of tokens of the longest input that has one integer for each; 0 where there is none."""
    return max((int(value.shape[1]) for value in inputs.values() if is_per_token(value)), default=0)


def larger_inputs(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Guesses at the inputs for twice the batch and more tokens, the likeliest first."""
    length = length_of(inputs)
    yield resize_inputs(
        inputs, lambda value: {1: value.shape[1] + MORE} if is_per_token(value) or is_as_long(value, length) else {}
    )
    if not length:
        return
    yield resize_inputs(inputs, lambda value: {1: value.shape[1] + MORE} if is_as_long(value, length) else {})
    rest = [one for one in pytree.tree_leaves(dict(inputs)) if isinstance(one, Tensor) and not is_as_long(one, length)]
    for dim in range(1, max((one.dim() for one in rest), default=0)):  # everything twice as long as it was
        yield resize_inputs(inputs, functools.partial(doubled_extents, length=length, dim=dim))


def doubled_extents(value: Tensor, length: int, dim: int) -> dict[int, int]:
    """Twice the tokens; for a tensor that is not as long as they are, twice the extent along `dim`."""
    along = 1 if is_as_long(value, length) else dim
    return {along: 2 * value.shape[along]} if along < value.dim() else {}


def is_as_long(value: Tensor, length: int) -> bool:
    return value.dim() > 1 and length > 0 and value.shape[1] == length


def resize_inputs(inputs: Mapping[str, Any], extents: Callable[[Tensor], Mapping[int, int]]) -> dict[str, Any]:
    """The inputs with each row twice and of the `extents` by dimension; numberings are continued, other values repeated."""
    leaves = [one for one in pytree.tree_leaves(dict(inputs)) if isinstance(one, Tensor) and one.dim()]
    rows = next((int(one.shape[0]) for one in leaves), 1)

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        numbers = is_per_token(value) and not value.is_meta and is_numbering(value)
        for dim, extent in extents(value).items():
            if dim < value.dim():
                value = value.index_select(dim, torch.arange(extent, device=value.device) % value.shape[dim])
        if numbers:
            value = torch.arange(value.shape[1], dtype=value.dtype, device=value.device).expand(value.shape)
        return torch.cat([value, value]) if value.shape[0] % rows == 0 else value

    return pytree.tree_map(change, dict(inputs))  # type: ignore[no-any-return]
