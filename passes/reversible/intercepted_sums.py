"""The sums in a layer's own code by which its branches are added to the stream, intercepted: the caller says what comes of each.

    x = x + self.attention(self.norm(x))          the sum of x, the very tensor that is the stream, and the first branch
    x = x + self.mlp(self.other_norm(x))          that of what the caller made of the first, and the second branch

The stream is known by identity, so that no name of a module or a variable plays a part. How many sums a branch takes to be added
(`x + f(x) + g(x)` takes two) is known from the data flow.

In float16 some code clamps its stream between two sums, so that infinite numbers become finite. Where it changes nothing the stream
is the same tensor as before.
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

CLAMPS = (torch.clamp, torch.clip, Tensor.clamp, Tensor.clip, torch.ops.aten.clamp.default, torch.ops.aten.clamp.Tensor)

Following = Callable[[int, Tensor], Tensor]  # the number of a branch and what it adds, to the stream that the layer goes on with


class Branches:
    """How far the code of a layer has come: the stream as it has it, and which of its branches have ended."""

    def __init__(
        self, sums: Sequence[int], stream: Tensor, following: Following, clamped: Callable[[Tensor], None] | None = None
    ) -> None:
        """`sums`: of each branch, in how many sums it is added to the stream.

        `clamped` receives the stream where it is clamped; without it a clamp that changes a number is an error.
        """
        self.sums, self.following, self.clamped = tuple(sums), following, clamped
        self.stream: Tensor | None = stream  # None within a branch of several sums
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
            self.part, self.terms, self.stream = None, 0, stream
            self.carrier = stream if self.ended < len(self.sums) else None
            return stream
        self.stream = None
        return self.part

    def clamp(self, result: Tensor) -> Tensor:
        """The stream that the code goes on with where it clamps it to `result`; raises `RetrofitError` where that is not undone."""
        assert self.stream is not None
        if self.clamped is None:
            if not torch.equal(result, self.stream):
                raise RetrofitError(
                    "reversible: the code of a layer clamps a number of its stream, which cannot be computed backwards",
                    why=f"the number is beyond the range of {self.stream.dtype}, or none",
                    remedy="train in bfloat16 or float32",
                )
            return self.stream
        self.clamped(result)
        if self.carrier is self.stream:
            self.carrier = result
        self.stream = result
        return result


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
        if function in CLAMPS and args and args[0] is self.branches.stream:
            return self.branches.clamp(function(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def call_intercepted(call: Callable[[], Any], branches: Branches) -> Any:
    """What the call of a layer returns, its sums intercepted; raises `RetrofitError` unless every branch was added."""
    with InterceptedSums(branches):
        output = call()
    if branches.ended != len(branches.sums):
        raise RetrofitError(
            f"reversible: {branches.ended} of the {len(branches.sums)} branches of a layer were added to its stream",
            why="its code takes another way than when it was rewritten",
            remedy="call it with the arguments it had then, in that precision; layers= leaves it out",
        )
    return output
