"""A recorded call, repeated in float64 by the module and by its reference: outputs, auxiliary losses and gradients are compared.

The module's own code runs with perturbed parameters (their initial values, a table of zeros or a coefficient of one, hide much of a
method), with the recorded arguments, and with its given children returning their recorded outputs. The model is not changed: the
parameters are copies that replace the module's during the call. The module computes on its own device, the reference on the CPU,
where plain loops do not wait for another device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from retrofit.checks.gradients import EMBEDDING
from retrofit.inputs.model_memory import zeros_for
from retrofit.inputs.model_state import preserve_modes
from retrofit.inputs.module_calls import CacheMark, RecordedCall, map_tensors, tensors_in
from retrofit.numerics.distances import distance
from retrofit.numerics.precision import Widened
from retrofit.passbase.method_reference import (
    Deviation,
    Draw,
    Expected,
    ModuleReference,
    OneOf,
    Place,
    SiteCall,
    linked,
    shown,
)
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.surgery.wrappers import item_at, with_item

LIMIT = 1e-7  # relative to the largest value; both sides are computed in float64
SPREAD, LEAST = 0.5, 0.1  # perturbation: relative to a parameter's spread; for parameters of zeros
NEGLIGIBLE = 1e-6  # of the largest gradient, by which smaller ones are measured
LARGE = 1 << 22  # elements of a table from which on only the rows in use are copied
TALL = 4096  # rows of such a table
BLOCK = 65521  # random numbers drawn for a tensor; a prime, so that no two rows of a matrix are equal


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """The distance of a module from its reference, and the problem ("" if none); `stopped` if neither is known."""

    gap: float = 0.0
    problem: str = ""
    stopped: str = ""  # the error that stopped the comparison


@dataclasses.dataclass(frozen=True)
class Mode:
    """The settings of a repeated call."""

    words: str
    training: bool = False
    gradients: bool = False
    seed: int = 0


# ── Perturbed parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class PerturbedParameters:
    """Float64 copies of a module's own parameters and buffers, perturbed; of large tables only the rows in use."""

    leaves: dict[str, Tensor]  # by name
    places: list[tuple[dict[str, Any], str, Any, str]]  # registry, name in it, former value, name of the leaf
    tables: dict[str, RowsInUse]  # large tables, by name

    @staticmethod
    def of(module: nn.Module, reference: ModuleReference, calls: Sequence[RecordedCall]) -> PerturbedParameters:
        """Return the copies for a module and these calls; its given children and functions keep their own."""
        generator = torch.Generator().manual_seed(5)
        leaves: dict[str, Tensor] = {}
        places: list[tuple[dict[str, Any], str, Any, str]] = []
        tables: dict[str, RowsInUse] = {}
        used = used_integers(calls)
        by_identity: dict[int, str] = {}
        for path, part in own_modules(module, (*reference.given, *reference.functions)):
            for registry in (part._parameters, part._buffers):
                for name, value in registry.items():
                    if value is None or not value.is_floating_point():
                        continue
                    full = f"{path}.{name}".lstrip(".")
                    known = by_identity.setdefault(id(value), full)
                    if known == full:
                        is_table = value.numel() > LARGE and value.dim() > 1 and len(value) > TALL
                        rows = used[used < len(value)] if is_table else None
                        new = perturbed(value.detach(), rows, generator)
                        leaves[full] = new.requires_grad_(registry is part._parameters)
                        if rows is not None:
                            tables[full] = RowsInUse.of(new, rows)
                    places.append((registry, name, value, known))  # type: ignore[arg-type]
        return PerturbedParameters(leaves, places, tables)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Install the copies as the module's parameters and buffers within this context."""
        try:
            for registry, name, _, leaf in self.places:
                registry[name] = self.leaves[leaf]
            with LookUps(self.tables.values()) if self.tables else contextlib.nullcontext():
                yield
        finally:
            for registry, name, value, _ in self.places:
                registry[name] = value

    @contextlib.contextmanager
    def on_the_cpu(self, module: nn.Module, reference: ModuleReference) -> Iterator[None]:
        """Move what the module and its functions hold to the CPU within this context; gradients flow back to the originals."""
        registries = [
            registry for _, part in own_modules(module, reference.given) for registry in (part._parameters, part._buffers)
        ]
        before = [dict(registry) for registry in registries]
        try:
            for registry in registries:
                registry.update({name: value.cpu() for name, value in registry.items() if value is not None})  # type: ignore[misc]
            yield
        finally:
            for registry, values in zip(registries, before, strict=True):
                registry.update(values)  # type: ignore[arg-type]

    @property
    def trainable(self) -> dict[str, Tensor]:
        """The copies that receive a gradient, by name."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}

    def gradients(self, value: Tensor, others: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradient of a number with respect to each trainable parameter, then to each of `others`.

        For a large table it covers the rows in use. None if the number does not depend on it.
        """
        leaves = self.trainable
        tables = {place: self.tables[name] for place, name in enumerate(leaves) if name in self.tables}
        found = gradients_of(value, [*leaves.values(), *others, *(table.values for table in tables.values())])
        for (place, table), looked_up in zip(tables.items(), found[len(leaves) + len(others) :], strict=True):
            found[place] = table.gradient(found[place], looked_up)
        return [None if each is None else each.to_dense() for each in found[: len(leaves) + len(others)]]


@dataclasses.dataclass(frozen=True)
class RowsInUse:
    """The rows of a large table that are looked up, as a separate tensor with its own gradient."""

    table: Tensor
    rows: Tensor  # in ascending order
    values: Tensor

    @staticmethod
    def of(table: Tensor, rows: Tensor) -> RowsInUse:
        rows = rows.to(table.device)
        return RowsInUse(table, rows, table.detach()[rows].requires_grad_(table.requires_grad))

    def places(self, index: Any) -> Any:
        """Return the places of an integer index among the rows in use; None if it is no such index, or has other rows."""
        if isinstance(index, Tensor) and index.dtype == torch.long:
            found = torch.searchsorted(self.rows, index.to(self.rows.device)).clamp_max(len(self.rows) - 1)
            return found if torch.equal(self.rows[found], index.to(self.rows.device)) else None
        if isinstance(index, int) and not isinstance(index, bool):
            place = self.places(torch.tensor([index]))
            return None if place is None else int(place)
        return None

    def gradient(self, table: Tensor | None, looked_up: Tensor | None) -> Tensor | None:
        """Return the gradient of the rows in use from the dense or sparse gradients of the table and of the looked-up rows."""
        if table is None:
            return looked_up
        part = (table.coalesce() if table.is_sparse else table).index_select(0, self.rows).to_dense()
        return part if looked_up is None else part + looked_up


class LookUps(TorchFunctionMode):
    """Redirect look-ups in large tables to the rows in use within this context; other operations read the table itself."""

    def __init__(self, tables: Iterable[RowsInUse]) -> None:
        super().__init__()
        self.tables = {id(rows.table): rows for rows in tables}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.embedding:
            given = EMBEDDING.bind(*args, **(kwargs or {})).arguments
            plain = given.get("padding_idx") is None and given.get("max_norm") is None and not given.get("scale_grad_by_freq")
            index, table = given["input"] if plain else None, given["weight"]
        elif function is Tensor.__getitem__:
            table, index = args
        else:
            return function(*args, **(kwargs or {}))
        known = self.tables.get(id(table))
        places = None if known is None else known.places(index)
        return function(*args, **(kwargs or {})) if known is None or places is None else known.values[places]


def own_modules(module: nn.Module, given: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Return the module and the modules inside it, without its given children and their contents."""
    for path, part in module.named_modules(remove_duplicate=False):
        if path.partition(".")[0] not in given or not path:
            yield path, part


def perturbed(value: Tensor, rows: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return a float64 copy with noise relative to its spread; zero outside of `rows` if they are given."""
    source = value if rows is None else value[rows]
    noise = repeated_noise(source.shape, generator).to(value.device)
    size = float(source.double().square().mean().sqrt()) if source.numel() else 0.0
    new = source.double() + (SPREAD * size or LEAST) * noise
    if rows is not None:
        zeros = zeros_for(torch.empty(value.shape, dtype=torch.float64, device="meta")).to(value.device)
        new = zeros.index_copy_(0, rows.to(value.device), new)
    return new


def repeated_noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers, repeated in a large tensor, because drawing all would dominate the time."""
    count = shape.numel()
    block = torch.randn(min(count, BLOCK), generator=generator, dtype=torch.float64)
    return block.repeat(-(-count // max(1, len(block))))[:count].view(shape)


def used_integers(calls: Sequence[RecordedCall]) -> Tensor:
    """Return the distinct integers among the arguments of some calls: rows of a table that may be read."""
    tensors = tensors_in([(call.args, call.kwargs) for call in calls])
    found = [torch.zeros(1, dtype=torch.long), *(tensor.cpu().flatten() for tensor in tensors if tensor.dtype == torch.long)]
    unique = torch.cat(found).unique()
    return unique[unique >= 0]


# ── Given children and random draws ──────────────────────────────────────────────────────────────────────────────────────────────


class GivenChild(nn.Module):
    """Replacement of a given child: returns its recorded outputs, and compares its arguments with the reference's.

    Until the reference has run it only returns outputs.
    """

    def __init__(self, child: nn.Module, name: str, results: Sequence[Any]) -> None:
        super().__init__()
        self.__dict__["child"], self.child_name = child, name
        self.results, self.answered = list(results), 0
        self.expected: list[Expected] | None = None
        self.call: SiteCall | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["child"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index = self.answered
        self.answered += 1
        if index >= len(self.results):
            raise Deviation(f"it calls {self.child_name} more than {len(self.results)} times")
        if self.expected is None:
            return self.results[index]
        if index >= len(self.expected):
            raise Deviation(f"it calls {self.child_name} more than {len(self.expected)} times, as the method does")
        expected = self.expected[index]
        assert self.call is not None
        received = [compare_argument(self.child_name, place, expected, args, kwargs) for place in expected.places]
        compare_others(self.child_name, expected, self.call, args, kwargs)
        returned = self.results[index]
        leaf = expected.leaf.to(item_at(returned, expected.key).device)
        answer = linked(leaf, received[0]) if received else leaf
        return with_item(returned, expected.key, answer)


def compare_argument(name: str, place: Place, expected: Expected, args: Any, kwargs: Any) -> Tensor:
    """Return the parts of the argument at a place that are read; raises `Deviation` if it is not the expected one."""
    position, keyword = place
    missing = keyword not in kwargs and (position is None or position >= len(args))
    if missing:
        raise Deviation(f"{name} is called without {keyword or position}")
    received = shown(kwargs[keyword] if keyword in kwargs else args[position], expected.irrelevant)
    problem = difference(received, shown(expected.places[place], expected.irrelevant))
    if problem:
        raise Deviation(f"what {name} receives as {keyword or position} is not the method's: {problem}")
    return received  # type: ignore[no-any-return]


def compare_others(name: str, expected: Expected, call: SiteCall, args: Any, kwargs: Any) -> None:
    """Raise `Deviation` if another argument is not the expected one or, without one, the module's own."""
    if expected.others is None:
        return
    given = {**dict(enumerate(call.args)), **call.kwargs, **expected.others}
    named = {part for place in expected.places for part in place}
    for key, value in (*enumerate(args), *kwargs.items()):
        if key in named or key not in given:
            continue
        wanted = given[key].values if isinstance(given[key], OneOf) else (given[key],)
        problems = [first_difference(value, option) for option in wanted]
        if all(problems):
            raise Deviation(f"what {name} receives as {key} is not the method's: {problems[-1]}")


def first_difference(value: Any, other: Any) -> str:
    """Return the first difference among the tensors inside, "" if there is none."""
    pairs = zip(tensors_in(value), tensors_in(other), strict=False)
    return next((problem for pair in pairs if (problem := difference(*pair))), "")


def difference(value: Any, other: Any) -> str:
    """Return how two tensors differ by more than rounding, "" if they do not."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return "" if value is other else f"it is {type(value).__name__}"
    if value.dim() == other.dim() and all(size in (1, own) for own, size in zip(value.shape, other.shape, strict=True)):
        other = other.expand_as(value)  # one row for the whole batch
    if value.shape != other.shape:
        return f"it is {tuple(value.shape)}, and not {tuple(other.shape)}"
    gap = distance(value, other)
    return f"{gap:.1e} of its scale apart" if gap > LIMIT else ""


class RandomDraws(TorchDispatchMode):
    """Keep the random numbers that are drawn within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            values = result[0] if isinstance(result, tuple) else result
            if isinstance(values, Tensor):
                self.draws.append(Draw(function._schema.name.removeprefix("aten::"), values.detach().double().cpu().clone()))
        return result


# ── Making a call again ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def replay(
    module: nn.Module,
    reference: ModuleReference,
    options: Any,
    calls: Sequence[RecordedCall],
    parameters: PerturbedParameters,
    mode: Mode,
) -> ReplayResult:
    """Return the distance between module and reference over calls that follow each other with one cache, or over a single call."""
    caches: dict[int, Any] = {}
    before: tuple[SiteCall, ...] = ()
    found = ReplayResult()
    with parameters.in_place(), set_mode(module, reference, mode.training):
        for call in calls:
            replayed = Replay(module, reference, options, call, parameters, before, caches)
            try:
                found = max(found, replayed.run(mode.gradients, mode.seed), key=lambda each: each.gap)
            except Deviation as error:
                return ReplayResult(float("inf"), str(error))
            if found.problem:
                return found
            before = (*before, replayed.site)
    return found


@contextlib.contextmanager
def set_mode(module: nn.Module, reference: ModuleReference, training: bool) -> Iterator[None]:
    """Set the module's mode within this context; the model's own functions inside it (an activation, a dropout) evaluate."""
    with preserve_modes(module):
        with Widened():  # some functions measure their weights in this mode
            module.train(training)
        for name in reference.functions:
            child = module._modules.get(name)
            if child is not None:
                child.eval()
        yield


class Replay:
    """A recorded call, repeated by the module and by its reference."""

    def __init__(
        self,
        module: nn.Module,
        reference: ModuleReference,
        options: Any,
        call: RecordedCall,
        parameters: PerturbedParameters,
        before: tuple[SiteCall, ...],
        caches: dict[int, Any],
    ) -> None:
        self.module, self.reference, self.parameters = module, reference, parameters
        self.inputs: list[Tensor] = []  # float arguments, leaves of autograd
        self.memo: dict[int, Tensor] = {}
        self.copies: dict[int, Tensor] = {}  # on the CPU
        cached = False

        def widen(value: Any) -> Any:
            nonlocal cached
            if isinstance(value, CacheMark):
                cached = True
                cache = caches.setdefault(0, value.empty())
                cache.staying = call.staying
                return cache
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return self.memo.setdefault(id(value), value.detach().to(torch.float64, copy=True))

        def leaf(value: Any) -> Any:
            wide = map_tensors(value, widen)
            if isinstance(wide, Tensor) and wide.is_floating_point() and wide.dim() > 1 and not wide.requires_grad:
                self.inputs.append(wide.requires_grad_())
            return wide

        self.args = tuple(map(leaf, call.args))
        self.kwargs = {name: leaf(value) for name, value in call.kwargs.items()}
        self.results = {name: [map_tensors(child.output, widen) for child in made] for name, made in call.children.items()}
        with torch.enable_grad():  # gradients flow from the CPU back to the arguments
            args, kwargs, inputs, results = map_tensors((self.args, self.kwargs, call.inputs, self.results), self.on_the_cpu)
        staying = self.on_the_cpu(call.staying)
        self.site = SiteCall(module, options, args, kwargs, inputs, results, (), before, cached, staying)

    def on_the_cpu(self, value: Any) -> Any:
        """Return the tensor's copy on the CPU, always the same one."""
        return self.copies.setdefault(id(value), value.cpu()) if isinstance(value, Tensor) else value

    def run(self, gradients: bool, seed: int) -> ReplayResult:
        """Compare both computations; raise `Deviation` where the module does something else altogether."""
        drawn = self.module_draws(seed) if self.site.training else []
        self.site.draws = list(drawn)
        with torch.set_grad_enabled(gradients):
            widened = Widened() if self.reference.functions else contextlib.nullcontext()  # other formulas are in float64 already
            with self.parameters.on_the_cpu(self.module, self.reference), widened:
                expected = self.reference.compute(self.site)
            if self.site.draws:
                raise Deviation(f"it draws {self.site.draws[0].operation} numbers where the method draws none")
            value, losses = self.run_module(seed)
        if self.site.irrelevant is not None and value.shape == expected.shape:
            hidden = self.site.irrelevant.unsqueeze(-1)
            value, expected = value.masked_fill(hidden, 0.0), expected.masked_fill(hidden, 0.0)
        found = self.compare_outputs(value, losses, expected)
        if found.problem or not gradients:
            return found
        return max(found, self.compare_gradients(value, losses, expected, seed), key=lambda each: each.gap)

    def module_draws(self, seed: int) -> list[Draw]:
        """Return the random numbers that the module draws, without changing its caches."""
        args, kwargs = map_tensors((self.args, self.kwargs), lambda leaf: copy.deepcopy(leaf) if isinstance(leaf, Cache) else leaf)
        torch.manual_seed(seed)
        with torch.no_grad(), self.children(False), Widened(), RandomDraws() as drawn:
            self.module.forward(*args, **kwargs)  # its hooks ran when the call was recorded
        return drawn.draws

    def run_module(self, seed: int) -> tuple[Tensor, list[Tensor]]:
        """Return the module's output and the auxiliary losses that it records, on the CPU."""
        torch.manual_seed(seed)
        with self.children(True) as stubs, Widened(), auxiliary_losses() as losses:
            returned = self.module.forward(*self.args, **self.kwargs)  # its hooks ran when the call was recorded
        for name, stub in stubs.items():
            if stub.expected is not None and stub.answered < len(stub.expected):
                raise Deviation(f"it calls {name} {stub.answered} times, and the method calls it {len(stub.expected)} times")
        return output_of(returned, self.module, self.reference).cpu(), [loss.cpu() for loss in losses]

    @contextlib.contextmanager
    def children(self, compares: bool) -> Iterator[dict[str, GivenChild]]:
        """Let the given children return their recorded outputs within this context."""
        registry, stubs = self.module._modules, {}
        originals = {name: child for name in self.reference.given if (child := registry.get(name)) is not None}
        for name, child in originals.items():
            stub = GivenChild(child, name, self.results.get(name, []))
            if compares:
                stub.expected, stub.call = self.site.expected.get(name, []), self.site
            stubs[name] = registry[name] = stub
        try:
            yield stubs
        finally:
            registry.update(originals)

    def compare_outputs(self, value: Tensor, losses: Sequence[Tensor], expected: Tensor) -> ReplayResult:
        if value.shape != expected.shape:
            return ReplayResult(float("inf"), f"it returns {tuple(value.shape)}, and the method gives {tuple(expected.shape)}")
        gap = distance(value, expected)
        if gap == float("inf"):
            return ReplayResult(gap, f"only one of its output and the method's is finite{self.first_place(value, expected)}")
        if gap > LIMIT:
            return ReplayResult(gap, f"its output is {gap:.1e} of its scale from the method's{self.first_place(value, expected)}")
        if len(losses) != len(self.site.losses):
            return ReplayResult(float("inf"), f"it records {len(losses)} auxiliary losses, and the method {len(self.site.losses)}")
        for loss, expected_loss in zip(losses, self.site.losses, strict=True):
            if (loss_gap := distance(loss, expected_loss)) > LIMIT:
                return ReplayResult(
                    loss_gap, f"its auxiliary loss is {float(loss):.6g}, and the method's {float(expected_loss):.6g}"
                )
        return ReplayResult(gap)

    @staticmethod
    def first_place(value: Tensor, expected: Tensor) -> str:
        """Return where the outputs first differ, as text."""
        if value.dim() < 2:
            return ""
        rows = (value - expected).detach().abs().flatten(0, -2).amax(-1)
        wrong = (~(rows <= LIMIT * float(expected.detach().abs().max()))).nonzero().flatten()
        return f", first at token {int(wrong[0])} of {len(rows)}, at {len(wrong)} in all" if len(wrong) else ""

    def zero_at_padding(self, gradient: Tensor, leaf: Tensor) -> Tensor:
        """Return the gradient of a leaf, zero at padding that the model has set to zero in an argument."""
        hidden = self.site.irrelevant
        if hidden is None or leaf.shape[:-1] != hidden.shape or not any(leaf is argument for argument in self.inputs):
            return gradient
        return gradient.masked_fill((hidden.to(leaf.device) & (leaf == 0).all(-1)).unsqueeze(-1), 0.0)

    def compare_gradients(self, value: Tensor, losses: Sequence[Tensor], expected: Tensor, seed: int) -> ReplayResult:
        """Compare the gradients of a random linear function of the output, and of the losses."""
        cotangent = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        names = [f"parameter {name}" for name in self.parameters.trainable]
        names += [f"argument {number}" for number in range(len(self.inputs))]
        names += [f"what {name} returns" for name, made in self.site.expected.items() for _ in made]
        others = [*self.inputs, *(call.leaf for made in self.site.expected.values() for call in made)]
        gradients = self.parameters.gradients((value * cotangent).sum() + sum(losses), others)
        expected_gradients = self.parameters.gradients((expected * cotangent).sum() + sum(self.site.losses), others)
        largest = (float(values.abs().max()) for values in expected_gradients if values is not None and values.numel())
        floor = NEGLIGIBLE * max(largest, default=0.0)
        worst = ReplayResult()
        leaves = [*self.parameters.trainable.values(), *others]
        for name, leaf, *both in zip(names, leaves, gradients, expected_gradients, strict=True):
            left, right = (None if grad is None else self.zero_at_padding(grad, leaf) for grad in both)
            if left is None or right is None:
                present = right if left is None else left
                if present is not None and bool((present.abs() > floor).any()):
                    which = "none where the method gives one" if left is None else "one where the method gives none"
                    return ReplayResult(float("inf"), f"the gradient of {name}: {which}")
                continue
            gap = distance(left, right, floor)
            if gap == float("inf"):
                return ReplayResult(gap, f"only one of the gradient of {name} and the method's is finite")
            if gap > LIMIT:
                return ReplayResult(gap, f"the gradient of {name} is {gap:.1e} of its scale from the method's")
            worst = max(worst, ReplayResult(gap), key=lambda each: each.gap)
        return worst


def gradients_of(value: Tensor, wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of a number with respect to each tensor, None if it does not depend on it."""
    if not value.requires_grad:
        return [None] * len(wanted)
    return list(torch.autograd.grad(value, list(wanted), allow_unused=True))


def output_of(returned: Any, module: nn.Module, reference: ModuleReference) -> Tensor:
    """Return the output tensor among a module's outputs."""
    key = getattr(module, reference.key) if reference.key else None
    value = item_at(returned, 0 if key is None else key)
    if not isinstance(value, Tensor):
        raise Deviation("it returns no tensor where its output is")
    return value
