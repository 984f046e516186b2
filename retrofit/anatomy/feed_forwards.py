"""A feed-forward: its matrices, its element-wise part, the module to replace, and modules that replace it.

    z_i = x W_i + b_i        one matrix (`up`), two (`gate` and `up`), or both in one (`gate_up`)
    h   = hidden(z_1, …)     unit by unit: activation, gating, dropout
    y   = h W_out + b_out

`feed_forward_parsing.py` infers it from the graph.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.anatomy.parts import Branch
from retrofit.anatomy.weights import Matrix
from retrofit.errors import DoesNotFitError
from retrofit.inputs.packed_weights import unpacked
from retrofit.program.program import Key
from retrofit.surgery import Edit
from retrofit.surgery.wrappers import argument_at, argument_place


@dataclasses.dataclass(frozen=True)
class Port:
    """The columns of a matrix's result that the hidden units read: unit u at column `start + step·u`."""

    matrix: int
    start: int
    step: int

    def columns(self, units: Tensor) -> Tensor:
        return units if (self.start, self.step) == (0, 1) else self.start + self.step * units


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A feed-forward of a model and the module to replace."""

    name: str  # path of the innermost module that owns it
    width: int  # d, of x and of y
    units: int  # d_ff
    into: tuple[Matrix, ...]
    ports: tuple[Port, ...]
    hidden: fx.GraphModule  # from the ports' values, each (…, some or all units), to h
    out: Matrix
    stream_in: Key  # the argument of the module at `path` that is x
    tail: fx.GraphModule | None  # what the module at `path` applies to y before returning it
    path: str  # the module to replace
    bypassed: tuple[str, ...] = ()  # modules before it, to be replaced by the identity because they pass x through
    dropout: float = 0.0  # applied to h by the model's own code, and to x once the feed-forward is replaced
    hidden_paths: tuple[tuple[str, str], ...] = ()  # children of `hidden` from the model: name, path in the model
    tail_paths: tuple[tuple[str, str], ...] = ()  # children of `tail` from the model

    @property
    def entry_path(self) -> str:
        """The module that receives the feed-forward's input when the model runs."""
        return self.bypassed[0] if self.bypassed else self.path

    @property
    def gated(self) -> bool:
        return len(self.ports) > 1

    def bound_to(self, model: nn.Module) -> FeedForward:
        """Return the feed-forward in `model`, a copy of the model it was found in: its graph modules call modules of `model`."""
        hidden = bind(self.hidden, self.hidden_paths, model)
        tail = None if self.tail is None else bind(self.tail, self.tail_paths, model)
        return dataclasses.replace(self, hidden=hidden, tail=tail)


def dropout_notes(sites: Iterable[FeedForward]) -> tuple[str, ...]:
    """Return a note for each feed-forward whose hidden units have dropout in the model's own code."""
    where = "moves from the hidden units to the feed-forward's input"
    return tuple(f"{site.path}: in training, its layer's dropout of {site.dropout:.0%} {where}" for site in sites if site.dropout)


def bind(function: fx.GraphModule, paths: tuple[tuple[str, str], ...], model: nn.Module) -> fx.GraphModule:
    """Return a copy of `function` whose children named in `paths` are the modules of `model` there; the others are copies."""
    live = {name: model.get_submodule(path) for name, path in paths}
    children = {name: live[name] if name in live else copy.deepcopy(child) for name, child in function.named_children()}
    return fx.GraphModule(children, copy.deepcopy(function.graph), type(function).__name__)


def no_feed_forward(branch: Branch, why: str, remedy: str = "", *, in_any_form: bool = False) -> DoesNotFitError:
    """Return the error for a branch that has another form than the above."""
    what = f"the branch {branch.name or branch.output} is not parsed as a feed-forward"
    return DoesNotFitError(what, why=why, remedy=remedy, in_any_form=in_any_form, code="not-parsed")


class FeedForwardBlock(nn.Module):
    """Module that replaces the feed-forward `site`, until then part of `old`; subclasses define `compute`.

    `keep_share(part, parts)`, where retrofit is installed, keeps one of `parts` equal shares of the hidden units: the outputs of
    all shares add up to y. It returns a `TensorShare` for each tensor that changes; None, and changes nothing, if the units do not
    divide.
    """

    keep_share: ClassVar[Callable[[Any, int, int], Any] | None] = None

    def __init__(self, site: FeedForward, old: nn.Module) -> None:
        super().__init__()
        self.width, self.units = site.width, site.units
        self.place = argument_place(old, site.stream_in if site.stream_in is not None else 0)
        self.tail = site.tail

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = self.compute(argument_at(self.place, args, kwargs))
        return y if self.tail is None else self.tail(y)

    def compute(self, x: Tensor) -> Tensor:
        """Return y: (…, d) to (…, d)."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TensorShare:
    """What one of several processes keeps of a module's tensor.

    These are `entries` of the dimension `dim`. Without entries the tensor is one that is added to a result: the first process keeps
    it, the others have zeros.
    """

    module: nn.Module
    name: str
    part: int
    dim: int = 0
    entries: Tensor | slice | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return what is kept of the whole tensor."""
        if self.entries is None:
            return torch.zeros_like(whole) if self.part else whole
        if isinstance(self.entries, Tensor):
            return whole.index_select(self.dim, self.entries.to(whole.device))
        return whole[(slice(None),) * self.dim + (self.entries,)].clone()

    def install(self) -> None:
        """Replace the module's tensor by what is kept of it."""
        old = getattr(self.module, self.name)
        new = self.of(old.detach())
        setattr(self.module, self.name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def shares_of_units(
    into: Sequence[nn.Module], ports: Sequence[Port], units: Tensor, part: int, dim: int
) -> tuple[list[TensorShare], tuple[Port, ...]]:
    """Return what is kept of the matrices `into` for some hidden units, and the ports of these units.

    `dim` is the dimension of a weight with the columns of its result; in a bias it is the same.
    """
    shares, kept = [], list(ports)
    for index, matrix in enumerate(into):
        places = [place for place, port in enumerate(ports) if port.matrix == index]
        columns = torch.cat([ports[place].columns(units) for place in places])
        shares += [TensorShare(matrix, name, part, dim, columns) for name, _ in matrix.named_parameters(recurse=False)]
        for number, place in enumerate(places):
            kept[place] = Port(index, number * len(units), 1)
    return shares, tuple(kept)


def is_by_unit(hidden: nn.Module) -> bool:
    """Return whether no tensor of a hidden function has an entry for each unit."""
    return all(tensor.numel() <= 1 for tensor in (*hidden.parameters(), *hidden.buffers()))


class PackableRows(nn.Linear):
    """y = h W + b with W stored (d_ff, d) as the weight of a linear layer, which quantizers pack in place, row by row.

    W is unpacked for the product; single rows are read with `retrofit.inputs.packed_weights`.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, unpacked(self.weight).to(x.dtype).t(), self.bias)


class GatheredFeedForward(nn.Module):
    """A feed-forward whose matrices several modules applied, as one module: `up`, `hidden`, `down`."""

    def __init__(self, site: FeedForward, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.hidden, self.down = up, site.hidden, down
        self.place = argument_place(down, site.stream_in if site.stream_in is not None else 0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.down(self.hidden(self.up(argument_at(self.place, args, kwargs))))  # type: ignore[no-any-return]


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """Return an `nn.Linear` with these parameters themselves."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    layer.bias = bias  # type: ignore[assignment]
    return layer


def install_feed_forward(site: FeedForward, block: nn.Module, edit: Edit) -> None:
    """Replace the feed-forward by `block`, which maps x to y."""
    for path in site.bypassed:
        edit.replace_module(path, nn.Identity())
    edit.replace_module(site.path, block)
