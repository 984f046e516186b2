"""References of a pass's modules: independent implementations of their formulas, for verification.

A reference shares no code with the pass. `ModuleReference.compute` gets one call of a module as a `SiteCall`. It returns the
formula's result in float64, computed from the call's arguments, the module's parameters and the options of the pass. Modules of the
dense model inside such a module (the layer that it wraps) are *given*: their outputs are taken from the model's own forward.

`MethodReference.wiring` and `start` check the model as a whole: the inputs of the modules, and their initial values.
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
from retrofit.surgery.wrappers import item_at

Place = tuple[int | None, str | None]  # an argument of a call: its position, its keyword
Key = int | str | None  # an item of what a module returns; None: the value itself
MISSING = object()
NOTHING: Mapping[Any, Any] = {}


class Deviation(Exception):
    """A module deviates from the method; the text says how."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers that a module drew: by which operation (`exponential_`, `uniform_`, `randn_like`, …), and the values."""

    operation: str
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Expected:
    """The arguments that a given child must be called with, and its output."""

    places: Mapping[Place, Tensor]  # the first one receives the gradient
    others: Mapping[Any, Any] | None  # further arguments, by position or keyword; None: not compared
    returned: Any  # as the child returned it, with `leaf` at `key`
    leaf: Tensor
    key: Key
    irrelevant: Tensor | None = None  # positions of the arguments that are never read


@dataclasses.dataclass(frozen=True)
class OneOf:
    """An argument that may have any of these values."""

    values: tuple[Any, ...]


class SiteCall:
    """One call of a module under verification; all tensors and parameters in float64 on the CPU.

    `inputs` are the model's. `before` are the earlier calls with the same cache; `staying` (batch, tokens) are the tokens of this
    call that belong to their sequences afterwards (None: all). `losses` are the auxiliary losses that the formula records,
    `irrelevant` the positions (batch, tokens) whose output is never read: padding.
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
        self.kept: dict[str, Any] = {}  # what the formula stores for later calls with the same cache

    def argument(self, place: Place, default: Any = MISSING) -> Any:
        """Return the argument at a place. Raises `Deviation` if it was left out and there is no default."""
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
        """Return the output of `child` in the model's forward for these arguments, at `key` (None: the first item).

        The module must call the child with the same values; `others` are its further arguments (None: not compared). A gradient of
        the output is passed to the first of these arguments. Values at positions that are `irrelevant` by now are ignored.
        """
        calls = self.expected.setdefault(child, [])
        if len(calls) >= len(self.results.get(child, ())):
            raise Deviation(f"{child} is called {len(self.results.get(child, ()))} times, and the method calls it more often")
        returned = self.results[child][len(calls)]
        key = None if isinstance(returned, Tensor) else 0 if key is None else key
        leaf = item_at(returned, key).detach().clone().requires_grad_()
        calls.append(Expected(dict(places), others, returned, leaf, key, self.irrelevant))
        return linked(leaf, shown(next(iter(places.values())), self.irrelevant)) if places else leaf

    def draw(self, *operations: str, shape: Sequence[int] = ()) -> Tensor:
        """Return the next random numbers that the module drew. Raises `Deviation` if operation or count differ."""
        if not self.draws:
            raise Deviation(f"it draws no {' or '.join(operations)} numbers where the method does")
        draw = self.draws.pop(0)
        if draw.operation not in operations:
            raise Deviation(f"it draws {draw.operation} numbers where the method draws {' or '.join(operations)}")
        if draw.values.numel() != math.prod(shape):
            raise Deviation(f"it draws {draw.values.numel()} {draw.operation} numbers, and the method {math.prod(shape)}")
        return draw.values.reshape(tuple(shape))


def shown(argument: Any, irrelevant: Tensor | None) -> Any:
    """Return a stream (batch, tokens, d) with zeros at the positions that are never read; any other argument unchanged."""
    if irrelevant is None or not isinstance(argument, Tensor) or argument.dim() != 3 or argument.shape[:2] != irrelevant.shape:
        return argument
    return argument.masked_fill(irrelevant.unsqueeze(-1).to(argument.device), 0.0)


def linked(leaf: Tensor, argument: Tensor) -> Tensor:
    """Return `leaf`; its gradient is also passed to `argument`, with a fixed weight for each element."""
    if not argument.is_floating_point():
        return leaf
    weights = torch.linspace(0.3, 1.7, argument.numel(), dtype=torch.float64, device=argument.device).reshape(argument.shape)
    passed = (argument * weights).sum()
    return leaf + (passed - passed.detach())


@dataclasses.dataclass(frozen=True)
class ModuleReference:
    """An independent implementation of a module that a pass installs.

    `given` are its children from the dense model, `functions` those that compute an element-wise part of it: the formula calls
    these too. `key` names the attribute that says where the output is in the module's return value; "" if it is that value or its
    first item. The module computes differently with more than `tokens` tokens in all, or with a sequence longer than `length`.
    `trainings`: how many trainings, each on other random numbers; 0: it is trained with others, in `MethodReference.wiring`, not by
    itself. `inside`, of a module that runs its content on fewer tokens: the model's inputs as its content gets them.
    """

    compute: Callable[[SiteCall], Tensor]
    given: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    key: str = ""
    tokens: int = 0
    length: int = 0
    trainings: int = 1
    cached: bool = False  # whether it stores anything in the model's cache
    inside: Callable[[SiteCall], Inside] | None = None


@dataclasses.dataclass(frozen=True)
class Inside:
    """The inputs of modules that another module runs on fewer tokens."""

    inputs: Mapping[str, Any]  # the model's
    staying: Tensor | None = None  # (batch, tokens): those that belong to their sequences after the call; None: all


@dataclasses.dataclass
class ObservedSite:
    """A module that a pass installed, and its calls in one forward in evaluation mode."""

    path: str
    dense_path: str  # of the dense module, if modules that wrap others are not counted
    module: nn.Module
    calls: list[RecordedCall] = dataclasses.field(default_factory=list)


Rows = Mapping[str, tuple[Tensor, Tensor]]  # module path → some input rows x, and the module's outputs for them


@dataclasses.dataclass(frozen=True)
class DenseModules:
    """The recorded modules of a dense model, by path.

    `probes`, `products` and `features` are those of plain projections: one matrix and a bias.
    """

    calls: Rows = dataclasses.field(default_factory=dict)  # the last input rows, and the outputs for them
    probes: Rows = dataclasses.field(default_factory=dict)  # random rows, and their products with the matrix
    products: Rows = dataclasses.field(default_factory=dict)  # the rows of `calls`, and their products with the matrix
    features: Mapping[str, tuple[list[int], Tensor]] = dataclasses.field(default_factory=dict)  # input features, rows of the matrix
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # all of them, if available
    fates: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the parameters; empty without a dense model


@dataclasses.dataclass
class Observed:
    """A rewritten model, as the input of checks of the whole model."""

    model: nn.Module
    options: Any  # the pass
    inputs: Mapping[str, Any]
    sites: list[ObservedSite]  # of this pass, in the order of their first calls
    dense: DenseModules
    recipe: tuple[Any, ...]  # all the passes, in order
    training_loss: Callable[[], float | None]  # the model's own, in training mode, always with the same random numbers
    recorded_losses: Callable[[], float]  # the sum of the auxiliary losses that its modules record, with the same random numbers
    calibration: Calibration | None = None  # the data that passes were fitted on
    uncached: Collection[str] = ()  # sites that received no cache although the model decoded with one
    missing: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # sites that were not compared, and why

    @property
    def is_calibrated(self) -> bool:
        return self.calibration is not None

    def dense_stream(self, path: str, dense_path: str, width: int) -> tuple[Tensor, Tensor, float] | None:
        """Return input rows of the dense module, its outputs for them in float64, and the possible error of rounding.

        Return None, and note it for the report, if no module of the dense model corresponds to the site at `path`.
        """
        x, y = self.dense.calls.get(dense_path, (None, None))
        if x is None or y is None or not x.shape[-1] == width == y.shape[-1]:
            self.not_compared(path, "the dense model calls no module there that takes and returns a stream of its width")
            return None
        return x.double(), y.double(), ROUNDING.get(y.dtype, COARSE) * float(y.double().abs().max())

    def not_compared(self, path: str, why: str) -> None:
        """Note for the report that this site was not compared, and why."""
        self.missing.append((path, why))


Problems = Iterator[tuple[str, str]]  # the path of a site, and the problem
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-4}  # of the largest output, by the dtype that a dense module computed it in
COARSE = 5e-2  # relative to the largest output, by the dtype that a dense module computed it in
STANDARD_ERRORS = 6  # of a spread: chance exceeds them less than once in a million times


def may_be_chance(ratio: float, count: int) -> bool:
    """Return whether the spread of `count` normal numbers can by chance be `ratio` times that of their distribution."""
    return abs(ratio - 1) <= max(0.05, STANDARD_ERRORS / math.sqrt(2 * count))


FEWEST = 24  # numbers needed to estimate a spread


def spread_problem(name: str, value: Tensor, expected: float) -> Iterator[str]:
    """Yield a problem if a parameter does not start as normal numbers of the `expected` spread."""
    ratio = float(value.detach().float().std()) / expected if value.numel() >= FEWEST else 1.0
    if not may_be_chance(ratio, value.numel()):
        yield f"{name} begins with {ratio:.2g} times the spread that the method gives it"


@dataclasses.dataclass(frozen=True)
class MethodReference:
    """The references of the modules of one pass, and the conditions on their wiring and initial values."""

    modules: Mapping[type[nn.Module], ModuleReference]
    wiring: Callable[[Observed], Problems] | None = None
    start: Callable[[Observed], Problems] | None = None  # for a model just rewritten

    def of(self, module: nn.Module) -> ModuleReference | None:
        """Return the reference of a module; None if the pass did not install it."""
        return next((self.modules[kind] for kind in type(module).__mro__ if kind in self.modules), None)
