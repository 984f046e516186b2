"""References of a pass's modules: independent implementations of their formulas, for verification.

A reference shares no code with the pass. `ModuleReference.compute` gets one call of a module as a `SiteCall` and returns what the
formula gives, in float64, from the call's arguments, the module's parameters and the options of the pass. What is inside such a
module and was there before (the dense layer it wraps) is *given*: its results are those of the model's own forward.

`MethodReference.wiring` and `start` are about the model as a whole: what reaches the modules, and what they begin with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.inputs.calibration import Calibration
from retrofit.inputs.module_calls import RecordedCall

Place = tuple[int | None, str | None]  # an argument of a call: its position, its keyword
Key = int | str | None  # an item of what a module returns; None: the value itself
MISSING = object()
NOTHING: Mapping[Any, Any] = {}


class Deviation(Exception):
    """A module does something that the method does not: the text says what."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers that a module drew: by which operation (`exponential_`, `uniform_`, `randn_like`, …), and the values."""

    operation: str
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Expected:
    """The arguments that a given child must be called with, and its output."""

    places: Mapping[Place, Tensor]  # the first carries the gradient
    others: Mapping[Any, Any] | None  # further arguments, by position or keyword; None: they are not looked at
    returned: Any  # as the child returned it, with `leaf` at `key`
    leaf: Tensor
    key: Key
    irrelevant: Tensor | None = None  # positions of the arguments that nobody reads


@dataclasses.dataclass(frozen=True)
class OneOf:
    """An argument that may have any of these values."""

    values: tuple[Any, ...]


class SiteCall:
    """One call of a module under verification: everything in float64 on the CPU, parameters too.

    `inputs` are the model's. `before` are the earlier calls with the same cache; `staying` (batch, tokens) are the tokens of this
    one that belong to their sequences afterwards (None: all). `losses` are the auxiliary losses that the formula records,
    `irrelevant` the positions (batch, tokens) whose output nobody reads: padding.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Mapping[str, Any],
        results: Mapping[str, Sequence[Any]],
        draws: Sequence[Draw] = (),
        before: tuple[SiteCall, ...] = (),
        cached: bool = False,
        staying: Tensor | None = None,
    ) -> None:
        self.module, self.options, self.args, self.kwargs, self.inputs = module, options, tuple(args), dict(kwargs), dict(inputs)
        self.training, self.before, self.cached, self.staying = module.training, before, cached, staying
        self.results, self.draws = {name: list(values) for name, values in results.items()}, list(draws)
        self.expected: dict[str, list[Expected]] = {}
        self.losses: list[Tensor] = []
        self.irrelevant: Tensor | None = None
        self.kept: dict[str, Any] = {}  # what the formula keeps for later calls with the same cache

    def argument(self, place: Place, default: Any = MISSING) -> Any:
        """Return the argument at a place; raise `Deviation` where it was left out and there is no default."""
        position, keyword = place
        if keyword is not None and keyword in self.kwargs:
            return self.kwargs[keyword]
        if position is not None and position < len(self.args):
            return self.args[position]
        if default is MISSING:
            raise Deviation(f"it was called without the argument {keyword or position}")
        return default

    def given(
        self, child: str, places: Mapping[Place, Tensor], key: Key = None, others: Mapping[Any, Any] | None = NOTHING
    ) -> Tensor:
        """Return what `child`, called with these arguments, returns at `key` (None: first): as it did in the model's forward.

        The module must call it with the same, and with its own arguments apart from these and `others` (None: with whatever).
        A gradient that arrives here goes on to the first of these arguments. What is there at positions that
        are `irrelevant` by now does not matter.
        """
        calls = self.expected.setdefault(child, [])
        if len(calls) >= len(self.results.get(child, ())):
            raise Deviation(f"{child} is called {len(self.results.get(child, ()))} times, and the method calls it more often")
        returned = self.results[child][len(calls)]
        key = None if isinstance(returned, Tensor) else 0 if key is None else key
        leaf = (returned if key is None else item(returned, key)).detach().clone().requires_grad_()
        calls.append(Expected(dict(places), others, returned, leaf, key, self.irrelevant))
        return linked(leaf, shown(next(iter(places.values())), self.irrelevant)) if places else leaf

    def draw(self, *operations: str, shape: Sequence[int] = ()) -> Tensor:
        """Return the next random numbers that the module drew; raise `Deviation` unless by one of these operations, and as many."""
        if not self.draws:
            raise Deviation(f"it draws no {' or '.join(operations)} numbers where the method does")
        draw = self.draws.pop(0)
        if draw.operation not in operations:
            raise Deviation(f"it draws {draw.operation} numbers where the method draws {' or '.join(operations)}")
        if draw.values.numel() != math.prod(shape):
            raise Deviation(f"it draws {draw.values.numel()} {draw.operation} numbers, and the method {math.prod(shape)}")
        return draw.values.reshape(tuple(shape))


def item(returned: Any, key: Key) -> Any:
    """Return the item `key` of what a module returned; a mapping is numbered in its order."""
    if isinstance(returned, Mapping) and isinstance(key, int):
        return list(returned.values())[key]
    return returned[key]


def shown(argument: Any, irrelevant: Tensor | None) -> Any:
    """Return a stream (batch, tokens, d), zero at the positions that nobody reads; another argument as it is."""
    if irrelevant is None or not isinstance(argument, Tensor) or argument.dim() != 3 or argument.shape[:2] != irrelevant.shape:
        return argument
    return argument.masked_fill(irrelevant.unsqueeze(-1).to(argument.device), 0.0)


def linked(leaf: Tensor, argument: Tensor) -> Tensor:
    """Return `leaf`, whose gradient also goes on to `argument`, by fixed weights of its own for each element."""
    if not argument.is_floating_point():
        return leaf
    weights = torch.linspace(0.3, 1.7, argument.numel(), dtype=torch.float64, device=argument.device).reshape(argument.shape)
    passed = (argument * weights).sum()
    return leaf + (passed - passed.detach())


@dataclasses.dataclass(frozen=True)
class ModuleReference:
    """An independent implementation of a module that a pass installs.

    `given` are its children that were there before, `functions` those that compute an element-wise part of the dense model: the
    formula calls these too. `key` is the attribute that says where in what the module returns the output is, "" where that is the
    value itself or its first item. `tokens`: of more tokens in all it computes in another way, `length`: of a sequence with more.
    `trainings`: how many times it is trained on other random numbers; 0: not by itself, but with others, in
    `MethodReference.wiring`. `inside`, of a module that runs what it holds on fewer tokens: the model's inputs as that sees them.
    """

    compute: Callable[[SiteCall], Tensor]
    given: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    key: str = ""
    tokens: int = 0
    length: int = 0
    trainings: int = 1
    cached: bool = False  # whether it keeps something in the model's cache
    inside: Callable[[SiteCall], Inside] | None = None


@dataclasses.dataclass(frozen=True)
class Inside:
    """The inputs of modules that another module runs on fewer tokens."""

    inputs: Mapping[str, Any]  # the model's
    staying: Tensor | None = None  # (batch, tokens): which belong to their sequences after the call; None: all


@dataclasses.dataclass
class ObservedSite:
    """A module that a pass installed, and its calls in one forward in evaluation mode."""

    path: str
    dense_path: str  # of what was there in the dense model, where modules that wrap others are not
    module: nn.Module
    calls: list[RecordedCall] = dataclasses.field(default_factory=list)


Rows = Mapping[str, tuple[Tensor, Tensor]]  # module path → some rows of x, and what the module made of them


@dataclasses.dataclass(frozen=True)
class DenseModules:
    """The recorded modules of a dense model, by path.

    `probes`, `products` and `features` are of the plain projections, which only multiply by one matrix and add a bias.
    """

    calls: Rows = dataclasses.field(default_factory=dict)  # the last rows received, and what was returned for them
    probes: Rows = dataclasses.field(default_factory=dict)  # random rows, and their products with the matrix
    products: Rows = dataclasses.field(default_factory=dict)  # the rows of `calls`, and their products with the matrix
    features: Mapping[str, tuple[list[int], Tensor]] = dataclasses.field(default_factory=dict)  # input features, rows of the matrix
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # all of them, where they are at hand
    fates: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the parameters; empty without a dense model


@dataclasses.dataclass
class Observed:
    """A rewritten model, for what a reference says of it as a whole."""

    model: nn.Module
    options: Any  # the pass
    inputs: Mapping[str, Any]
    sites: list[ObservedSite]  # of this pass, in the order of their first calls
    dense: DenseModules
    recipe: tuple[Any, ...]  # all the passes, in order
    training_loss: Callable[[], float | None]  # the model's own, in training mode, always on the same random numbers
    recorded_losses: Callable[[], float]  # the sum of the auxiliary ones that its modules record, on these numbers too
    calibration: Calibration | None = None  # the data that passes were fitted on
    uncached: Collection[str] = ()  # sites that received no cache though the model decoded on one
    missing: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # sites that were not compared, and why

    @property
    def is_calibrated(self) -> bool:
        return self.calibration is not None

    def dense_stream(self, path: str, dense_path: str, width: int) -> tuple[Tensor, Tensor, float] | None:
        """Return rows that the dense module there received, what it returned, in float64, and how far rounding may move that.

        None where there is no such module for the site at `path`, which the report says.
        """
        x, y = self.dense.calls.get(dense_path, (None, None))
        if x is None or y is None or not x.shape[-1] == width == y.shape[-1]:
            self.not_compared(path, "the dense model calls no module there that takes and returns a stream of its width")
            return None
        return x.double(), y.double(), ROUNDING.get(y.dtype, COARSE) * float(y.double().abs().max())

    def not_compared(self, path: str, why: str) -> None:
        """Note for the report that this site was not compared, and why."""
        self.missing.append((path, why))


Problems = Iterator[tuple[str, str]]  # the path of a site, and what is wrong there
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-4}  # of the largest output, by the dtype that a dense module computed it in
COARSE = 5e-2  # the same of half precision
STANDARD_ERRORS = 6  # of a spread: chance goes beyond them less than once in a million times


def may_be_chance(ratio: float, count: int) -> bool:
    """Return whether so many normal numbers may spread `ratio` times as far as those of their distribution do."""
    return abs(ratio - 1) <= max(0.05, STANDARD_ERRORS / math.sqrt(2 * count))


FEWEST = 24  # numbers that have a spread


def spread_problem(name: str, value: Tensor, expected: float) -> Iterator[str]:
    """Yield that a parameter does not begin as normal numbers of the `expected` spread, where it does not."""
    ratio = float(value.detach().float().std()) / expected if value.numel() >= FEWEST else 1.0
    if not may_be_chance(ratio, value.numel()):
        yield f"{name} begins with {ratio:.2g} times the spread that the method gives it"


@dataclasses.dataclass(frozen=True)
class MethodReference:
    """The references of the modules of one pass, and what is to hold between them and at their start."""

    modules: Mapping[type[nn.Module], ModuleReference]
    wiring: Callable[[Observed], Problems] | None = None
    start: Callable[[Observed], Problems] | None = None  # of a model just rewritten

    def of(self, module: nn.Module) -> ModuleReference | None:
        """Return the reference of a module, None where it is none of the pass's."""
        return next((self.modules[kind] for kind in type(module).__mro__ if kind in self.modules), None)
