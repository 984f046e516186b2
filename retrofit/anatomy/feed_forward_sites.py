"""The description of one feed-forward: its matrices, its element-wise part, and which module a pass replaces.

    z_i = x W_i + b_i        one matrix (`up`), two (`gate` and `up`), or both in one (`gate_up`)
    h   = hidden(z_1, …)     unit by unit: activation, gating, dropout
    y   = h W_out + b_out

`feed_forward_parsing.py` infers it from the graph, `feed_forward_blocks.py` puts a module there.
"""

from __future__ import annotations

import copy
import dataclasses

from torch import Tensor, fx, nn

from retrofit.anatomy.parts import Branch
from retrofit.anatomy.weight_matrices import Matrix
from retrofit.errors import DoesNotFitError
from retrofit.program.program import Key


@dataclasses.dataclass(frozen=True)
class Port:
    """Where the hidden units read one matrix's result: unit u at column `start + step·u`."""

    matrix: int
    start: int
    step: int

    def columns(self, units: Tensor) -> Tensor:
        return units if (self.start, self.step) == (0, 1) else self.start + self.step * units


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """One feed-forward of a model, and the module to replace it at."""

    name: str  # path of the module that owns it: the innermost in whose call all of it happens
    width: int  # d, of x and of y
    units: int  # d_ff
    into: tuple[Matrix, ...]
    ports: tuple[Port, ...]
    hidden: fx.GraphModule  # the ports' values, each (…, units or some of them), to h
    out: Matrix
    stream_in: Key  # the argument of the module at `path` that is x
    tail: fx.GraphModule | None  # what the module at `path` does to y before it returns it
    path: str  # the module to replace
    bypassed: tuple[str, ...] = ()  # modules before it, to be replaced by the identity: they pass x through
    dropout: float = 0.0  # applied to h by the model's own code, and to x once the feed-forward is replaced
    hidden_paths: tuple[tuple[str, str], ...] = ()  # children of `hidden` that are modules of the model: name, path in the model
    tail_paths: tuple[tuple[str, str], ...] = ()  # the same of `tail`

    @property
    def gated(self) -> bool:
        return len(self.ports) > 1

    @property
    def dropout_note(self) -> str:
        """For a report: the effect of replacing a feed-forward whose hidden units the model's own code drops."""
        return f"in training its layer drops {self.dropout:.0%} of what the feed-forward reads, no longer of its hidden units"

    def bound_to(self, model: nn.Module) -> FeedForward:
        """The same feed-forward in `model`, a copy of the one it was found in: its graph modules call modules of `model`."""
        hidden = bind(self.hidden, self.hidden_paths, model)
        tail = None if self.tail is None else bind(self.tail, self.tail_paths, model)
        return dataclasses.replace(self, hidden=hidden, tail=tail)


def bind(function: fx.GraphModule, paths: tuple[tuple[str, str], ...], model: nn.Module) -> fx.GraphModule:
    """A copy of `function` whose children named in `paths` are the modules of `model` there; the others are copies."""
    live = {name: model.get_submodule(path) for name, path in paths}
    children = {name: live[name] if name in live else copy.deepcopy(child) for name, child in function.named_children()}
    return fx.GraphModule(children, copy.deepcopy(function.graph), type(function).__name__)


def no_feed_forward(branch: Branch, why: str, remedy: str = "", *, in_any_form: bool = False) -> DoesNotFitError:
    """The error for a branch that is not of the form above."""
    what = f"the branch {branch.name or branch.output} is not parsed as a feed-forward"
    return DoesNotFitError(what, why=why, remedy=remedy, in_any_form=in_any_form)
