"""A branch of an ONNX graph that is chosen by sizes: both ways are there, and each run takes the one that its sizes ask for.

Such an `If` is how a file keeps two ways to compute the same: few tokens gather rows, many go through the whole matrix. A graph
that is captured for a rewrite has one way only: the branch that runs at every size that was tried, on both sides of the choice, and
computes what the other does wherever that runs too. Where there is none, only a choice between fixed sizes can be captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError
from retrofit.runtime.probes import distance

TOLERANCE = 1e-4  # how far two ways may lie apart, relative to the largest number
THEN, OTHERWISE = "then", "otherwise"


class SizeConditional(nn.Module):
    """`then` where the condition holds, else `otherwise`; `general` names the one that does for all sizes, "" where none does."""

    def __init__(self, node: str, then: nn.Module, otherwise: nn.Module) -> None:
        super().__init__()
        self.node, self.then, self.otherwise = node, then, otherwise
        self.general = ""
        self.trials: list[BranchTrial] | None = None

    def forward(self, condition: Any, *operands: Any) -> Any:
        (condition,) = condition if isinstance(condition, tuple) else (condition,)
        if self.trials is not None:
            self.trials.append(BranchTrial.of(self, operands))
        if torch.compiler.is_exporting() and self.general:
            return getattr(self, self.general)(*operands)
        if isinstance(condition, torch.SymBool):
            raise CaptureError(
                f"the node {self.node} chooses by sizes between two ways that compute different things",
                why="a graph that is rewritten takes one way for every size",
                remedy="export the model with these sizes fixed",
            )
        return (self.then if condition else self.otherwise)(*operands)

    def decide(self) -> None:
        """`general` is what the trials leave of the two branches."""
        trials, self.trials = self.trials or [], None
        left = [way for way in (OTHERWISE, THEN) if all(way in trial.ran for trial in trials)]
        compared = [trial.alike for trial in trials if len(trial.ran) == 2]
        self.general = left[0] if left and compared and all(compared) else ""


class BranchTrial:
    """Which of a choice's branches ran on some operands, and whether those that did compute the same."""

    def __init__(self, ran: frozenset[str], alike: bool) -> None:
        self.ran, self.alike = ran, alike

    @staticmethod
    def of(choice: SizeConditional, operands: Sequence[Any]) -> BranchTrial:
        made: dict[str, Any] = {}
        for way in (THEN, OTHERWISE):
            with contextlib.suppress(Exception):  # a branch need not run at the other's sizes
                made[way] = getattr(choice, way)(*operands)
        alike = len(made) == 2 and all(agree(one, other) for one, other in zip(made[THEN], made[OTHERWISE], strict=True))
        return BranchTrial(frozenset(made), alike)


def agree(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    return one.shape == other.shape and one.dtype == other.dtype and (one.numel() == 0 or distance(one, other) <= TOLERANCE)


def select_general_branches(module: fx.GraphModule, examples: Iterable[Mapping[str, Tensor]]) -> None:
    """Every choice in the module knows which of its branches does for all sizes, by running both on the examples."""
    choices = [one for one in module.modules() if isinstance(one, SizeConditional)]
    if not choices:
        return
    with record_trials(choices), torch.no_grad():
        for example in examples:
            with contextlib.suppress(RuntimeError, IndexError):  # a model need not run at every size
                module(**example)


@contextlib.contextmanager
def record_trials(choices: Sequence[SizeConditional]) -> Iterator[None]:
    """Within this context the choices write down what their branches do, and after it they decide."""
    for one in choices:
        one.trials = []
    try:
        yield
    finally:
        for one in choices:
            one.decide()
