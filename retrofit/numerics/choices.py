"""Discrete choices of a forward, recorded and forced: the largest of several numbers, an order, a side of a threshold.

Two runs that round differently may choose differently if two candidates are nearly tied, and then differ by far more than rounding.
A choice is any operation that returns integers or truth values for floating-point numbers, alone or with the selected numbers. A
record belongs to one sequence of operations, and fits only the same sequence, in any arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.numerics.distances import scale_of

aten = torch.ops.aten
PICKED = {  # operations that return numbers with their indices, and the position of their argument `dim`
    aten.topk.default: 2,
    aten.sort.default: 1,
    aten.sort.stable: 2,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.kthvalue.default: 2,
}
PLACES = {aten.argmax.default, aten.argmin.default}
COMPARED = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}


class OtherChoicesError(Exception):
    """The operations differ from the recorded ones."""


class Choices(TorchDispatchMode):
    """Within this context the choices are recorded in `made`; given recorded ones, these are forced, whatever the numbers are.

    Then `changed` is the number of choices that would have differed, and `margin` the largest distance of their candidates,
    relative to the largest of their numbers. `picks_only` ignores thresholds and roundings. Enter it after an arithmetic context,
    so that it sees the same values as the code.
    """

    def __init__(self, forced: list[Tensor] | None = None, *, picks_only: bool = False) -> None:
        super().__init__()
        self.picks_only = picks_only
        self.made: list[Tensor] = []
        self.sizes: list[tuple[int, int]] = []  # of each choice of the largest: how many of how many
        self.forced = forced
        self.changed, self.margin = 0, 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        if not given:
            return result
        if function in PICKED:
            dim, keeps = dim_of(function, args, kwargs or {}), result[1].dim() == args[0].dim()
            if function is aten.topk.default and args[0].dim():
                self.sizes.append((result[1].shape[dim], args[0].shape[dim]))
            places = self.choose(result[1])
            if places is result[1]:
                return result
            index = places if keeps else places.unsqueeze(dim)
            values = args[0].gather(dim, index) if args[0].dim() else args[0]
            values = values if keeps else values.squeeze(dim)
            self.compare(result[0], values, result[1] != places, scale_of(args[0]))
            return type(result)((values, places)) if isinstance(result, tuple) and type(result) is not tuple else (values, places)
        if isinstance(result, Tensor) and is_discrete(result) and (function in PLACES or not self.picks_only):
            places = self.choose(result)
            if places is not result:
                self.compare(*candidates(function, args, result, places), result != places, scale_of(given[0]))
            return places
        return result

    def choose(self, result: Tensor) -> Tensor:
        """Return the choice recorded at this place; `result` itself if it is the same, or nothing is recorded."""
        if self.forced is None:
            self.made.append(result.clone())
            return result
        place = len(self.made)
        self.made.append(result)
        if place >= len(self.forced) or self.forced[place].numel() != result.numel():
            raise OtherChoicesError("the operations are not those whose choices were recorded")
        forced = self.forced[place].reshape(result.shape).to(result)
        return result if torch.equal(forced, result) else forced

    def compare(self, ours: Tensor, theirs: Tensor, differs: Tensor, scale: float) -> None:
        self.changed += int(differs.sum())
        apart = (ours - theirs).abs()[differs] if ours.shape == differs.shape else (ours - theirs).abs()
        self.margin = max(self.margin, float(apart.max()) / scale if apart.numel() else 0.0)


def is_discrete(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def dim_of(function: Any, args: Any, kwargs: Any) -> int:
    """Return the dimension along which an operation selects."""
    place = PICKED[function]
    found = args[place] if len(args) > place else kwargs.get("dim", -1)
    return int(found)


def candidates(function: Any, args: Any, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers between which the choice was made, as far as they are known."""
    value = args[0]
    if function in PLACES:
        dim = args[1] if len(args) > 1 else None
        if dim is None:
            flat = value.reshape(-1)
            return flat[ours].reshape(()), flat[theirs].reshape(())
        keeps = ours.dim() == value.dim()
        picked = [value.gather(dim, places if keeps else places.unsqueeze(dim)) for places in (ours, theirs)]
        return (picked[0], picked[1]) if keeps else (picked[0].squeeze(dim), picked[1].squeeze(dim))
    if function.overloadpacket in COMPARED:
        left, right = torch.broadcast_tensors(value, torch.as_tensor(args[1], dtype=value.dtype, device=value.device))
        return left, right
    return value.new_zeros(()), value.new_zeros(())
