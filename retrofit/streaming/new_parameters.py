"""The parameters that edits put into a model, in the order in which they do.

The order is the same on a model without weights as on one with them, which is how the place of a parameter in the result's files is
known as soon as it is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from retrofit.errors import CheckpointError


class ParametersInOrder:
    """Numbers the parameters that were not in the model before, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {id(one): one for one in model.parameters()}
        self.met: dict[int, nn.Parameter] = {}

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """An edit put these into the model."""
        for _ in self.new_among(parameters):
            pass

    def new_among(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[int, nn.Parameter]]:
        """Those that are met for the first time, with their numbers."""
        for one in parameters:
            if id(one) not in self.before and id(one) not in self.met:
                self.met[id(one)] = one
                yield len(self.met) - 1, one


@dataclasses.dataclass(frozen=True)
class Expected:
    """A parameter as it was on the model without weights."""

    name: str  # in the result; "" where a later edit removed it
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require(self, parameter: nn.Parameter) -> None:
        """`parameter` is this one, else `CheckpointError`."""
        found = tuple(parameter.shape), parameter.dtype
        if found != (self.shape, self.dtype):
            raise CheckpointError(
                "the model cannot be rewritten in a stream",
                why=f"with weights {self.name or 'a parameter'} is {found}, without them {(self.shape, self.dtype)}",
                remedy="rewrite it without --stream, where it fits in memory",
            )


def expected_parameters(order: ParametersInOrder, model: nn.Module, saved: Mapping[str, object]) -> tuple[Expected, ...]:
    """What the edits put into the model without weights, and what became of it; `saved` has the names that are written."""
    names = {id(one): name for name, one in model.named_parameters(remove_duplicate=False) if name in saved}
    return tuple(Expected(names.get(id(one), ""), tuple(one.shape), one.dtype) for one in order.met.values())
