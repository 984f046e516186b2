"""The sums in a layer's own code by which its branches are added to the stream, intercepted: the caller says what comes of each.

    x = x + self.attention(self.norm(x))          the sum of x, the very tensor that is the stream, and the first branch
    x = x + self.mlp(self.other_norm(x))          that of what the caller made of the first, and the second branch

The stream is known by identity, so that no name of a module or a variable plays a part. How many sums a branch takes to be added
(`x + f(x) + g(x)` takes two) is known from the data flow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrofit.sdk import RetrofitError

SUMS = (
    torch.add,
    Tensor.add,
    Tensor.add_,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__iadd__,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor,
)

Following = Callable[[int, Tensor], Tensor]  # the number of a branch and what it adds, to the stream that the layer goes on with


class Branches:
    """How far the code of a layer has come: the stream as it has it, and which of its branches have ended."""

    def __init__(self, sums: Sequence[int], stream: Tensor, following: Following) -> None:
        """`sums`: of each branch, in how many sums it is added to the stream."""
        self.sums, self.following = tuple(sums), following
        self.carrier: Tensor | None = stream if self.sums else None  # the tensor that the next sum of the stream has as a term
        self.ended = 0
        self.part: Tensor | None = None  # the terms of a branch so far
        self.terms = 0

    def add(self, term: Tensor) -> Tensor:
        """What the sum of the stream and this term is: another stream, where the branch ends with it."""
        self.part = term if self.part is None else self.part + term
        self.terms += 1
        self.carrier = self.part
        if self.terms == self.sums[self.ended]:
            stream = self.following(self.ended, self.part)
            self.ended += 1
            self.part, self.terms = None, 0
            self.carrier = stream if self.ended < len(self.sums) else None
            return stream
        return self.part


class InterceptedSums(TorchFunctionMode):
    """Within this context the sums of the stream are those of `branches`."""

    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches = branches

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in SUMS and len(args) == 2 and not kwargs and self.branches.carrier is not None:
            one, other = args
            if one is self.branches.carrier and isinstance(other, Tensor):
                return self.branches.add(other)
            if other is self.branches.carrier and isinstance(one, Tensor):
                return self.branches.add(one)
        return function(*args, **(kwargs or {}))


def call_intercepted(call: Callable[[], Any], branches: Branches) -> Any:
    """What the call of a layer returns, its sums intercepted; raises `RetrofitError` unless every branch was added."""
    with InterceptedSums(branches):
        output = call()
    if branches.ended != len(branches.sums):
        raise RetrofitError(
            f"reversible: {branches.ended} of the {len(branches.sums)} branches of a layer were added to its stream",
            why="its code takes another way than when it was rewritten (in half precision some layers clamp their stream)",
            remedy="float32 or bfloat16, and the arguments it had then; layers= leaves it out",
        )
    return output
