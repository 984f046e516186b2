"""Agreement of two computations of the same values: if one arithmetic leaves a doubt, a wider one decides.

1. No gap in float32, or, in a large model where the two may round differently, a gap within its own rounding: they agree.

2. In float64 more than 1e-9 of the outputs' scale: they disagree, however small the gap is in float32.

3. Less, and the model's own rounding explains the gap in float32: they agree.

4. Less, and it does not: with the choices made in float64 forced on float32, the gap must be explained. Then some choices were
nearly ties, and they agree; otherwise one of them loses precision.

The model's own rounding is the distance between its forward in float32 and in float64.

A choice is any operation that returns integers or truth values for floating-point numbers, alone or with the selected numbers: the
largest of several numbers, an order, a side of a threshold. Two runs that round differently may choose differently if two
candidates are nearly tied, and then differ by far more than rounding. A record of choices belongs to one sequence of operations,
and fits only the same sequence, in any arithmetic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.errors import first_line
from retrofit.inputs.example_inputs import dtype_of
from retrofit.inputs.probes import logits_of, run
from retrofit.numerics.distances import TOLERANCE, distance, scale_of
from retrofit.numerics.precision import SplitReductions, Widened

LIMIT = TOLERANCE[torch.float64]
EXPLAINED = 64  # float32 outputs may differ by this multiple of the model's own rounding
SETTLED = 1 << 25  # parameters up to which every gap except zero is decided in float64
HALF = (torch.float16, torch.bfloat16)
Ways = Callable[[], tuple[Tensor, Tensor]]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The distance of two computations, relative to the largest output, and the arithmetic that decided."""

    gap: float
    narrow: str = "float32"
    wide: float | None = None  # the gap in float64, if it was needed
    agrees: bool = True
    limit: float = 0.0  # in the arithmetic that decided
    in_float64: bool = False  # whether that was float64
    note: str = ""
    outputs: Tensor | None = None  # of the first, if they disagree
    others: Tensor | None = None

    @property
    def measured(self) -> str:
        """Return the gaps in words: `1.1e-06 in float32, 3.1e-16 in float64 (limit 1e-09)`."""
        if self.wide is None:
            return f"{self.gap:.1e} in {self.narrow}" + (f" ({self.note})" if self.note else "")
        limit = self.limit if self.in_float64 or (self.agrees and self.limit) else LIMIT
        wide = f"{self.gap:.1e} in {self.narrow}, {self.wide:.1e} in float64 (limit {limit:.0e})"
        return f"{wide}, {self.note}" if self.note else wide


def is_large(model: nn.Module) -> bool:
    """Return whether not every gap is decided in float64, and few forwards are made: each reads all the weights."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.is_floating_point()) > SETTLED


class Arithmetic:
    """The arithmetic in which a model is measured, and the wider one that decides doubts."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], computed: Callable[[], Tensor] | None = None) -> None:
        """Store the model and its inputs; `computed`, if given, returns outputs that are already known."""
        self.model, self.inputs, self.computed = model, inputs, computed
        self.stored = dtype_of(model)
        self.dtype = torch.float32 if self.stored in HALF else self.stored
        self.settles_everything = not is_large(model)
        self.remembered: dict[Hashable, Any] = {}  # values computed in the arithmetic in which the model is measured
        self.remembers = False

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def note(self) -> str:
        """Return why the model is not measured in the dtype of its weights; "" if it is."""
        stored = str(self.stored).removeprefix("torch.")
        return f"computed in {self.name}: its weights are {stored}" if self.stored in HALF else ""

    def computing(self, in_float64: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Within this context the model computes in the arithmetic of the measurements, or in float64."""
        if in_float64:
            return Widened(torch.float64)
        return Widened(self.dtype) if self.stored in HALF else contextlib.nullcontext()

    @functools.cached_property
    def outputs(self) -> Tensor:
        """Return the model's outputs for the inputs."""
        if self.computed is not None:
            return self.computed()
        with self.computing():
            return logits_of(run(self.model, self.inputs)).cpu()

    @functools.cached_property
    def wide_outputs(self) -> Tensor | None:
        """Return the outputs in float64; None if its code does not support it."""
        return self.wide_outputs_for(self.inputs)

    def wide_outputs_for(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the model's outputs for those inputs in float64; None if its code does not support it."""
        try:
            with self.computing(in_float64=True):
                return logits_of(run(self.model, inputs)).cpu()
        except Exception:  # of any type, from the model's own code
            return None

    @functools.cached_property
    def rounding(self) -> float:
        """Return how far rounding moves the outputs: float32 from float64; in a large model, one order of its sums from another."""
        if self.dtype == torch.float64:
            return 0.0
        if not self.settles_everything and "wide_outputs" not in self.__dict__:
            expected = self.outputs  # before the sums are split
            with self.computing(), SplitReductions():
                moved = distance(logits_of(run(self.model, self.inputs)), expected)
            if moved <= TOLERANCE[torch.float32]:
                return moved
        if self.wide_outputs is None:
            return TOLERANCE[torch.float32] / EXPLAINED
        found = distance(self.outputs, self.wide_outputs)
        if found <= TOLERANCE[torch.float32]:
            return found
        forced = self.gap_with_choices(lambda: (logits_of(run(self.model, self.inputs)),) * 2, self.wide_outputs)
        return found if forced is None else min(found, forced[0])

    @property
    def explained(self) -> float:
        """Return the largest distance of outputs that rounding alone explains."""
        return max(TOLERANCE[torch.float32], EXPLAINED * self.rounding)

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Within this context `logits` and `once` compute each value only once, for all checks."""
        self.remembers = True
        try:
            yield
        finally:
            self.remembers = False

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the model's outputs for those inputs."""
        return self.once(identity_of(inputs), lambda: logits_of(run(self.model, inputs)))

    def remember(self, inputs: Mapping[str, Any], logits: Tensor) -> None:
        """Store `logits` as the model's outputs for those inputs, so that it need not run."""
        key = identity_of(inputs)
        if key is not None:
            self.remembered[key] = logits

    def once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return `compute()`; within `remembering` it is called once per key, except for the key None."""
        if not self.remembers or key is None:
            return compute()
        if key not in self.remembered:
            self.remembered[key] = compute()
        found: Result = self.remembered[key]
        return found

    def compare(self, ways: Ways, in_doubt: bool = False, same_kernels: bool = False) -> Comparison:
        """Return whether the two ways agree; `in_doubt` float64 is used in any case. Raises any error of the two.

        If both run the `same_kernels` on the same numbers, they round equally, so any gap is a doubt, even in a large model.
        """
        with self.computing(), self.remembering():
            a, b = ways()
        gap = distance(a, b)
        if self.dtype == torch.float64:
            return self.decided(a, b, Comparison(gap, self.name, agrees=gap <= LIMIT, limit=LIMIT, in_float64=True))
        may_round = not self.settles_everything and not same_kernels
        if not in_doubt and (gap == 0.0 or (may_round and gap <= 2 * self.rounding)):
            return Comparison(gap, self.name)
        try:
            with self.computing(in_float64=True):
                wide_a, wide_b = ways()
        except Exception as error:  # code that does not support float64
            limit = TOLERANCE[torch.float32]
            note = f"limit {limit:.0e}; not in float64: {first_line(error)}"
            return self.decided(a, b, Comparison(gap, self.name, agrees=gap <= limit, limit=limit, note=note))
        wide = distance(wide_a, wide_b)
        if wide > LIMIT:
            found = Comparison(gap, self.name, wide, agrees=False, limit=LIMIT, in_float64=True)
            return self.decided(wide_a, wide_b, found)
        if gap <= self.explained:
            return Comparison(gap, self.name, wide)
        return self.decided(a, b, self.explain(ways, Comparison(gap, self.name, wide)))

    def compare_with(self, other: nn.Module) -> Comparison:
        """Return whether another model has the same outputs for the inputs."""
        return self.compare(lambda: (logits_of(run(other, self.inputs)), logits_of(run(self.model, self.inputs))))

    def decided(self, a: Tensor, b: Tensor, found: Comparison) -> Comparison:
        """Return the comparison, with its outputs if the two disagree."""
        return found if found.agrees else dataclasses.replace(found, outputs=a.detach().cpu(), others=b.detach().cpu())

    def explain(self, ways: Ways, found: Comparison) -> Comparison:
        """Return whether a gap that vanishes in float64 comes from choices that were nearly ties."""
        forced = self.gap_with_choices(ways)
        if forced is not None and forced[1] and forced[0] <= self.explained:
            gap, changed, margin = forced
            choices = f"{changed} choice{'s' if changed > 1 else ''} within {margin:.1e} of a tie fell otherwise"
            return dataclasses.replace(found, note=f"{choices}, with the same {gap:.1e}")
        note = f"more than its own rounding of {self.rounding:.1e} explains: it loses precision on the way"
        return dataclasses.replace(found, agrees=False, limit=self.explained, note=note)

    def gap_with_choices(self, ways: Ways, expected: Tensor | None = None) -> tuple[float, int, float] | None:
        """Return the gap with the choices made in float64, the number of choices that differ without, and their margin.

        Return None if they cannot be made.
        """
        try:
            with self.computing(in_float64=True), Choices() as recorded:
                ways()
            with self.computing(), Choices(recorded.made) as replayed:
                a, b = ways()
        except OtherChoicesError:
            return None
        return distance(a, b if expected is None else expected), replayed.changed, replayed.margin


def identity_of(inputs: Mapping[str, Any]) -> Hashable:
    """Return a key that distinguishes these inputs from others; None if they contain more than tensors and plain values."""
    parts: list[Hashable] = []
    for name, value in sorted(inputs.items()):
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            parts.append((name, tuple(value.shape), value.dtype, content))
        elif value is None or isinstance(value, (bool, int, float, str)):
            parts.append((name, value))
        else:
            return None
    return tuple(parts)


# ── Discrete choices ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


aten = torch.ops.aten
PICKED = {  # operations that return numbers with their indices, and the position of their argument `dim`
    aten.topk.default: 2,
    aten.sort.default: 1,
    aten.sort.stable: 2,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.kthvalue.default: 2,
}
PLACES = {aten.argmax.default, aten.argmin.default}
COMPARED = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}


class OtherChoicesError(Exception):
    """The operations differ from the recorded ones."""


class Choices(TorchDispatchMode):
    """Within this context the choices are recorded in `made`; given recorded ones, these are forced, whatever the numbers are.

    Then `changed` is the number of choices that would have differed, and `margin` the largest distance of their candidates,
    relative to the largest of their numbers. `picks_only` ignores thresholds and roundings. Enter it after an arithmetic context,
    so that it sees the same values as the code.
    """

    def __init__(self, forced: list[Tensor] | None = None, *, picks_only: bool = False) -> None:
        super().__init__()
        self.picks_only = picks_only
        self.made: list[Tensor] = []
        self.sizes: list[tuple[int, int]] = []  # of each choice of the largest: how many of how many
        self.forced = forced
        self.changed, self.margin = 0, 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        if not given:
            return result
        if function in PICKED:
            dim, keeps = dim_of(function, args, kwargs or {}), result[1].dim() == args[0].dim()
            if function is aten.topk.default and args[0].dim():
                self.sizes.append((result[1].shape[dim], args[0].shape[dim]))
            places = self.choose(result[1])
            if places is result[1]:
                return result
            index = places if keeps else places.unsqueeze(dim)
            values = args[0].gather(dim, index) if args[0].dim() else args[0]
            values = values if keeps else values.squeeze(dim)
            self.compare(result[0], values, result[1] != places, scale_of(args[0]))
            return type(result)((values, places)) if isinstance(result, tuple) and type(result) is not tuple else (values, places)
        if isinstance(result, Tensor) and is_discrete(result) and (function in PLACES or not self.picks_only):
            places = self.choose(result)
            if places is not result:
                self.compare(*candidates(function, args, result, places), result != places, scale_of(given[0]))
            return places
        return result

    def choose(self, result: Tensor) -> Tensor:
        """Return the choice recorded at this place; `result` itself if it is the same, or nothing is recorded."""
        if self.forced is None:
            self.made.append(result.clone())
            return result
        place = len(self.made)
        self.made.append(result)
        if place >= len(self.forced) or self.forced[place].numel() != result.numel():
            raise OtherChoicesError("the operations are not those whose choices were recorded")
        forced = self.forced[place].reshape(result.shape).to(result)
        return result if torch.equal(forced, result) else forced

    def compare(self, ours: Tensor, theirs: Tensor, differs: Tensor, scale: float) -> None:
        self.changed += int(differs.sum())
        apart = (ours - theirs).abs()[differs] if ours.shape == differs.shape else (ours - theirs).abs()
        self.margin = max(self.margin, float(apart.max()) / scale if apart.numel() else 0.0)


def is_discrete(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def dim_of(function: Any, args: Any, kwargs: Any) -> int:
    """Return the dimension along which an operation selects."""
    place = PICKED[function]
    found = args[place] if len(args) > place else kwargs.get("dim", -1)
    return int(found)


def candidates(function: Any, args: Any, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers between which the choice was made, as far as they are known."""
    value = args[0]
    if function in PLACES:
        dim = args[1] if len(args) > 1 else None
        if dim is None:
            flat = value.reshape(-1)
            return flat[ours].reshape(()), flat[theirs].reshape(())
        keeps = ours.dim() == value.dim()
        picked = [value.gather(dim, places if keeps else places.unsqueeze(dim)) for places in (ours, theirs)]
        return (picked[0], picked[1]) if keeps else (picked[0].squeeze(dim), picked[1].squeeze(dim))
    if function.overloadpacket in COMPARED:
        left, right = torch.broadcast_tensors(value, torch.as_tensor(args[1], dtype=value.dtype, device=value.device))
        return left, right
    return value.new_zeros(()), value.new_zeros(())
