"""One call of a layer whose branches can be recomputed one by one, bit for bit, with a graph for the gradient.

The code of a layer runs from start to end, so the run for one branch executes all its code, but the modules outside this branch are
not called. They return zeros of the shape of their first output, and the code between them computes results that are not used. No
gradient passes there, so a tensor that requires one belongs to this branch.

The sums that add branches to the stream are intercepted, and the caller determines the result of each:

    x = x + self.attention(self.norm(x))          the sum of x, the very tensor that is the stream, and the first branch
    x = x + self.mlp(self.other_norm(x))          the sum of the first sum, as the caller returned it, and the second branch

The stream is recognized by the identity of the tensor. The data flow shows how many sums add a branch (`x + f(x) + g(x)` takes
two).

In float16 some code clamps its stream between two sums, so that infinite numbers become finite. After a clamp that changes nothing
the stream is the same tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten

from retrofit.passes.reversible.repeated_call import (
    Placeholder,
    RandomState,
    RepeatedCall,
    Returned,
    Run,
    flattened,
    leaves_of,
    recorded_graph,
)
from retrofit.sdk import ArgumentPlace, RetrofitError

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

Following = Callable[[int, Tensor], Tensor]  # index and output of a branch → the next stream


class Branches:
    """The state of a layer's code while it runs: its stream, and the number of branches that have ended."""

    def __init__(
        self, sums: Sequence[int], stream: Tensor, following: Following, clamped: Callable[[Tensor], None] | None = None
    ) -> None:
        """`sums` has for each branch the number of sums that add it to the stream.

        `clamped` receives the stream after a clamp; without it a clamp that changes a number is an error.
        """
        self.sums, self.following, self.clamped = tuple(sums), following, clamped
        self.stream: Tensor | None = stream  # None within a branch of several sums
        self.carrier: Tensor | None = stream if self.sums else None  # the term that identifies the next sum of the stream
        self.ended = 0
        self.part: Tensor | None = None  # the terms of a branch so far
        self.terms = 0

    def add(self, term: Tensor) -> Tensor:
        """Return the sum of the stream and `term`: the next stream if the branch ends with it."""
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
        """Return the stream after the code clamps it to `result`. Raises `RetrofitError` if that cannot be inverted."""
        assert self.stream is not None
        if self.clamped is None:
            if not torch.equal(result, self.stream):
                raise RetrofitError(
                    "reversible: the code of a layer clamps a value of its stream, which cannot be inverted",
                    why=f"the value is out of range for {self.stream.dtype}, or NaN",
                    remedy="train in bfloat16 or float32",
                    code="clamped",
                )
            return self.stream
        self.clamped(result)
        if self.carrier is self.stream:
            self.carrier = result
        self.stream = result
        return result


class InterceptedSums(TorchFunctionMode):
    """A context in which `branches` computes the sums of the stream."""

    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches = branches

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in SUMS and len(args) == 2 and not kwargs and self.branches.carrier is not None:
            term, other = args
            if term is self.branches.carrier and isinstance(other, Tensor):
                return self.branches.add(other)
            if other is self.branches.carrier and isinstance(term, Tensor):
                return self.branches.add(term)
        if function in CLAMPS and args and args[0] is self.branches.stream:
            return self.branches.clamp(function(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def call_intercepted(call: Callable[[], Any], branches: Branches) -> Any:
    """Return the output of a layer's call with intercepted sums. Raises `RetrofitError` unless every branch was added."""
    with InterceptedSums(branches):
        output = call()
    if branches.ended != len(branches.sums):
        raise RetrofitError(
            f"reversible: {branches.ended} of the {len(branches.sums)} branches of a layer were added to its stream",
            why="its code takes another path than when it was rewritten",
            remedy="call it with the same arguments and precision, or exclude it with layers=",
            code="other-path",
        )
    return output


RUN = "run_of_branches"  # the attribute of a part while its layer runs


class BranchCall(RepeatedCall):
    """A call of `layer`. `sums` has the number of sums of each branch; each of the modules at `parts` belongs to one branch."""

    def __init__(
        self,
        layer: nn.Module,
        stream_in: ArgumentPlace,
        stream_out: int | str | None,
        args: Any,
        kwargs: dict[str, Any],
        sums: Sequence[int],
        parts: Sequence[str],
    ) -> None:
        super().__init__(layer, stream_in, stream_out, args, kwargs)
        self.sums, self.parts = tuple(sums), tuple(parts)
        self.answers: list[Answer] = []  # of the parts, in the order of their calls
        self.states: list[RandomState | None] = []  # before each branch; None if it draws no random numbers
        self.counts: list[int] = []  # number of losses recorded up to the end of each branch
        self.recorded = 0  # number of losses in all

    def first_of_branches(self, x: Tensor, following: Following) -> Returned:
        """Return the layer's output for the stream x, without a graph; `following` returns the next streams."""
        before = [RandomState(self.device)]
        recorded: list[list[Tensor]] = []

        def ended(number: int, value: Tensor) -> Tensor:
            self.counts.append(len(recorded[0]))
            self.states.append(None if before[-1].is_current() else before[-1])
            before[:] = [RandomState(self.device)] if self.states[-1] is not None else before
            with torch.no_grad():
                stream = following(number, value.detach())
            return stream.detach().requires_grad_()

        with parts_of(self, Recording(self.answers)):
            returned = self.without_graph(x, lambda x, values: self.run_branches(x, values, ended, recorded))
        self.recorded = returned.losses
        return returned

    def branch(self, number: int, x: Tensor, with_graph: bool = True) -> tuple[Tensor, Returned, list[Tensor]]:
        """Run one branch again, with a graph from its stream x. Return its term, the layer's output, and the layer's arguments.

        The losses, and the tensors of the output that require a gradient, are those of this branch.
        """
        self.require_unchanged()
        values = leaves_of(self.values)
        blank = torch.zeros_like(x, requires_grad=False)
        found: list[Tensor] = []
        recorded: list[list[Tensor]] = []
        span: list[int] = [0]  # the losses of this branch
        state = self.states[number]

        def ended(index: int, value: Tensor) -> Tensor:
            if index == number:
                found.append(value)
                span.append(len(recorded[0]))
                torch.set_grad_enabled(False)
            if index == number - 1:
                span[0] = len(recorded[0])
                if state is not None:
                    state.put(state.states)
                skipping.active = True
                torch.set_grad_enabled(True)
                return x
            skipping.active = False
            return blank.detach()

        skipping = Skipping(self.answers, active=number == 0)
        random: Any = contextlib.nullcontext()
        if any(state is not None for state in self.states):  # code may draw random numbers outside the branch too
            random = state.restored() if state is not None else RandomState(self.device).kept()
        with recorded_graph(with_graph), torch.set_grad_enabled(number == 0), random, parts_of(self, skipping):
            output, known, losses = self.run_branches(x if number == 0 else blank, values, ended, recorded)
        own = losses[span[0] : span[1]]
        return found[0], Returned(output, self.stream_out, known | {id(value): value for value in values}, own), values

    def run_branches(self, x: Tensor, values: list[Tensor], ended: Following, recorded: list[list[Tensor]]) -> Run:
        """Return the results of `run`, with the sums of the stream intercepted; `recorded` receives the list of the losses."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return call_intercepted(lambda: self.layer(*args, **kwargs), Branches(self.sums, x, ended))

        return self.run(x, values, called, recorded)


# ── The parts of a layer ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output of a part: its tensors by shape, dtype and device, or by their index among the part's arguments."""

    leaves: tuple[Any, ...]
    structure: Any

    @staticmethod
    def of(output: Any, arguments: Any) -> Answer:
        leaves, structure = flattened(output)
        numbers = {id(tensor): number for number, tensor in enumerate(flattened(arguments)[0]) if isinstance(tensor, Tensor)}

        def kept(leaf: Any) -> Any:
            if id(leaf) in numbers:
                return Placeholder(numbers[id(leaf)])
            return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf

        return Answer(tuple((kept(leaf), isinstance(leaf, Tensor)) for leaf in leaves), structure)

    def again(self, arguments: Any) -> Any:
        """Return the output with zeros as tensors, or with the `arguments` that it contains."""
        given = flattened(arguments)[0]

        def filled(leaf: Any, is_tensor: bool) -> Any:
            if not is_tensor:
                return leaf
            if isinstance(leaf, Placeholder):
                return given[leaf.number]
            shape, dtype, device = leaf
            return torch.zeros(shape, dtype=dtype, device=device)

        return tree_unflatten([filled(*leaf) for leaf in self.leaves], self.structure)


class Recording:
    """The first run: every part is called, and its output is stored."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers, self.depth = answers, 0

    def call(self, part: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a call of a part; a part inside another part is called as usual."""
        self.depth += 1
        try:
            output = part(*args, **kwargs)
        finally:
            self.depth -= 1
        if not self.depth:
            self.answers.append(Answer.of(output, (args, kwargs)))
        return output


class Skipping:
    """A run for one branch: parts are called while it is `active`, and otherwise return zeros in the form of their first output."""

    def __init__(self, answers: Sequence[Answer], active: bool) -> None:
        self.answers, self.active, self.depth, self.number = answers, active, 0, 0

    def call(self, part: Any, args: Any, kwargs: Any) -> Any:
        if not self.depth:
            self.number += 1
            if not self.active:
                return self.answers[self.number - 1].again((args, kwargs))
        self.depth += 1
        try:
            return part(*args, **kwargs)
        finally:
            self.depth -= 1


@functools.cache
def skippable(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose calls go through the run that an instance has as an attribute."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self.__dict__.get(RUN)
        called = functools.partial(kind.__call__, self)
        return called(*args, **kwargs) if run is None else run.call(called, args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


@contextlib.contextmanager
def parts_of(call: BranchCall, run: Recording | Skipping) -> Iterator[None]:
    """Within this context calls of the layer's parts go through `run`.

    The parts, and shallow copies of them, have a subclass of their class, so that they pass type checks in the layer's code.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for path in call.parts:
            with contextlib.suppress(AttributeError, TypeError):  # another pass has replaced the part: it is always called
                part = call.layer.get_submodule(path)
                if RUN not in part.__dict__:
                    kind = type(part)
                    part.__class__ = skippable(kind)  # type: ignore[arg-type]
                    part.__dict__[RUN] = run
                    changed.append((part, kind))
        yield
    finally:
        for part, kind in changed:
            del part.__dict__[RUN]
            part.__class__ = kind
