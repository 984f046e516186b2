"""An `If` of an ONNX graph whose condition depends on sizes: both branches are kept, each run takes the one for its sizes.

Such an `If` holds two ways to compute the same: few tokens gather rows, many go through the whole matrix. A graph that is
captured for a rewrite has one branch only: the one that runs at every size that was tried, on both sides of the condition, and
computes what the other does wherever that runs too. Where there is none, only a condition on fixed sizes can be captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError
from retrofit.numerics.distances import distance
from retrofit.program.conditional import is_exporting

TOLERANCE = 1e-4  # how far two branches may differ, relative to the largest number
THEN, OTHERWISE = "then", "otherwise"


class SizeConditional(nn.Module):
    """`then` where the condition holds, else `otherwise`; `general` names the branch valid at all sizes, "" where none is."""

    def __init__(self, node: str, then: nn.Module, otherwise: nn.Module) -> None:
        super().__init__()
        self.node, self.then, self.otherwise = node, then, otherwise
        self.general = ""
        self.trials: list[BranchTrial] | None = None

    def forward(self, condition: Any, *operands: Any) -> Any:
        (condition,) = condition if isinstance(condition, tuple) else (condition,)
        if self.trials is not None:
            self.trials.append(BranchTrial.of(self, operands))
        if is_exporting() and self.general:
            return getattr(self, self.general)(*operands)
        if isinstance(condition, torch.SymBool):
            raise CaptureError(
                f"the node {self.node} selects by sizes between two branches that compute different things",
                why="a graph that is rewritten takes one branch for every size",
                remedy="export the model with these sizes fixed",
            )
        return (self.then if condition else self.otherwise)(*operands)

    def select_general(self) -> None:
        """`general` is the branch that every trial ran, if the branches agreed in every trial that ran both."""
        trials, self.trials = self.trials or [], None
        left = [way for way in (OTHERWISE, THEN) if all(way in trial.ran for trial in trials)]
        compared = [trial.agreed for trial in trials if len(trial.ran) == 2]
        self.general = left[0] if left and compared and all(compared) else ""


class BranchTrial:
    """Which branches of a conditional ran on some operands, and whether those that did compute the same."""

    def __init__(self, ran: frozenset[str], agreed: bool) -> None:
        self.ran, self.agreed = ran, agreed

    @staticmethod
    def of(conditional: SizeConditional, operands: Sequence[Any]) -> BranchTrial:
        results: dict[str, Any] = {}
        for way in (THEN, OTHERWISE):
            with contextlib.suppress(Exception):  # a branch need not run at the other's sizes
                results[way] = getattr(conditional, way)(*operands)
        agreed = len(results) == 2 and all(agree(a, b) for a, b in zip(results[THEN], results[OTHERWISE], strict=True))
        return BranchTrial(frozenset(results), agreed)


def agree(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and (a.numel() == 0 or distance(a, b) <= TOLERANCE)


def select_general_branches(module: fx.GraphModule, examples: Iterable[Mapping[str, Tensor]]) -> None:
    """Every conditional in the module has its `general` branch selected by running both on the examples."""
    conditionals = [part for part in module.modules() if isinstance(part, SizeConditional)]
    if not conditionals:
        return
    with record_trials(conditionals), torch.no_grad():
        for example in examples:
            with contextlib.suppress(RuntimeError, IndexError):  # a model need not run at every size
                module(**example)


@contextlib.contextmanager
def record_trials(conditionals: Sequence[SizeConditional]) -> Iterator[None]:
    """Within this context the conditionals record what their branches compute; after it they select the general one."""
    for conditional in conditionals:
        conditional.trials = []
    try:
        yield
    finally:
        for conditional in conditionals:
            conditional.select_general()
