"""One call of a layer whose branches can be made again one by one, to the same result bit for bit, with a graph for the gradient.

The code of a layer runs from its beginning to its end, so in the run for one branch all its code runs, but not its parts: the
modules outside this branch are not called. They answer with zeros of the shape that they returned at first, on which the code
between them computes what nobody reads. No gradient passes there, so that a tensor which requires one is of this branch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from retrofit.passes.reversible.intercepted_sums import Branches, Following, call_intercepted
from retrofit.passes.reversible.repeated_call import (
    Placeholder,
    RandomState,
    RepeatedCall,
    Returned,
    flattened,
    leaves_of,
    recorded_graph,
)
from retrofit.sdk import ArgumentPlace

RUN = "run_of_branches"  # the attribute of a part while its layer runs
SKIPPABLE: dict[type[nn.Module], type[nn.Module]] = {}  # by class


class BranchCall(RepeatedCall):
    """A call of `layer`, whose branches are added in `sums` sums each, and whose modules at `parts` lie in one branch each."""

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
        self.states: list[RandomState | None] = []  # before each branch, None where it draws nothing
        self.counts: list[int] = []  # losses recorded until each branch has ended
        self.recorded = 0  # losses in all

    def first_of_branches(self, x: Tensor, following: Following) -> Returned:
        """What the layer returns for the stream x, without a graph; `following` makes the streams after it."""
        self.values = [one.detach() for one in self.given]
        self.versions += [one._version for one in self.values]
        before = [RandomState(self.device)]
        recorded: list[list[Tensor]] = []

        def ended(number: int, value: Tensor) -> Tensor:
            self.counts.append(len(recorded[0]))
            self.states.append(None if before[-1].is_current() else before[-1])
            before[:] = [RandomState(self.device)] if self.states[-1] is not None else before
            with torch.no_grad():
                stream = following(number, value.detach())
            return stream.detach().requires_grad_()

        values = leaves_of(self.values)
        with recorded_graph(kept=False), parts_of(self, Recording(self.answers)):
            output, known, losses = self.run_branches(x.detach().requires_grad_(), values, ended, recorded)
        known |= {id(value): original for value, original in zip(values, self.given, strict=True)}
        self.given, self.recorded = [], len(losses)
        returned = Returned(output, self.stream_out, known, losses)
        returned.tensors = [one.detach() for one in returned.tensors]
        return returned

    def branch(self, number: int, x: Tensor, with_graph: bool = True) -> tuple[Tensor, Returned, list[Tensor]]:
        """One branch once more, with a graph from its stream x: what it adds, what the layer returns, the tensors it was given.

        Of what is returned only the tensors that require a gradient are of this branch, and the losses are its own alone.
        """
        self.require_unchanged()
        values = leaves_of(self.values)
        blank = torch.zeros_like(x, requires_grad=False)
        found: list[Tensor] = []
        recorded: list[list[Tensor]] = []
        span: list[int] = [0]  # the losses of this branch
        state = self.states[number]

        def ended(one: int, value: Tensor) -> Tensor:
            if one == number:
                found.append(value)
                span.append(len(recorded[0]))
                torch.set_grad_enabled(False)
            if one == number - 1:
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
        if any(one is not None for one in self.states):  # what is computed of zeros may draw too
            random = state.restored() if state is not None else RandomState(self.device).kept()
        with recorded_graph(with_graph), torch.set_grad_enabled(number == 0), random, parts_of(self, skipping):
            output, known, losses = self.run_branches(x if number == 0 else blank, values, ended, recorded)
        own = losses[span[0] : span[1]]
        return found[0], Returned(output, self.stream_out, known | {id(value): value for value in values}, own), values

    def run_branches(self, x: Tensor, values: list[Tensor], ended: Following, recorded: list[list[Tensor]]) -> Any:
        """As `run`, with the sums of the stream intercepted; `recorded` receives the list in which losses are recorded."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return call_intercepted(lambda: self.layer(*args, **kwargs), Branches(self.sums, x, ended))

        return self.run(x, values, called, recorded)


# ── Parts of a layer, which are called or not ────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a part returned: its tensors by shape and dtype, those that were among its arguments by their number there."""

    leaves: tuple[Any, ...]
    structure: Any

    @staticmethod
    def of(output: Any, arguments: Any) -> Answer:
        leaves, structure = flattened(output)
        numbers = {id(one): number for number, one in enumerate(flattened(arguments)[0]) if isinstance(one, Tensor)}

        def kept(leaf: Any) -> Any:
            if id(leaf) in numbers:
                return Placeholder(numbers[id(leaf)])
            return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf

        return Answer(tuple((kept(leaf), isinstance(leaf, Tensor)) for leaf in leaves), structure)

    def again(self, arguments: Any) -> Any:
        """The same, its tensors zero."""
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
    """The first run: every part is called, and what it returns is kept."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers, self.depth = answers, 0

    def call(self, part: Any, args: Any, kwargs: Any) -> Any:
        """What a call of a part returns; one inside another part is an ordinary one."""
        self.depth += 1
        try:
            output = part(*args, **kwargs)
        finally:
            self.depth -= 1
        if not self.depth:
            self.answers.append(Answer.of(output, (args, kwargs)))
        return output


class Skipping:
    """A run for one branch: while it is `active` parts are called, otherwise they answer as they did in the first run."""

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


def skippable(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of a class whose calls are made, or not, by the run that they have as an attribute."""
    if kind in SKIPPABLE:
        return SKIPPABLE[kind]

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self.__dict__.get(RUN)
        called = functools.partial(kind.__call__, self)
        return called(*args, **kwargs) if run is None else run.call(called, args, kwargs)

    SKIPPABLE[kind] = type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})
    return SKIPPABLE[kind]


@contextlib.contextmanager
def parts_of(call: BranchCall, run: Recording | Skipping) -> Iterator[None]:
    """Within this context the run decides about the calls of the parts of the layer.

    A module of a subclass of its class is what its code takes it for, and so are shallow copies of it.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for path in call.parts:
            with contextlib.suppress(AttributeError, TypeError):  # another pass put something else there: it is always called
                part = call.layer.get_submodule(path)
                if RUN not in part.__dict__:
                    kind = type(part)
                    part.__class__ = skippable(kind)
                    part.__dict__[RUN] = run
                    changed.append((part, kind))
        yield
    finally:
        for part, kind in changed:
            del part.__dict__[RUN]
            part.__class__ = kind
