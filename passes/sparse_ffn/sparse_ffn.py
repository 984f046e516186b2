"""The sparse-ffn pass: in every feed-forward a controller activates k hidden units in N.

`sparse_feed_forward.py` is the layer; `controller_fit.py` and `output_fit.py` fit its start to the dense weights and to calibration
data.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.1.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.passes.sparse_ffn import reference as method_reference
from retrofit.passes.sparse_ffn.controller_fit import fit_start, held_out_tokens
from retrofit.passes.sparse_ffn.output_fit import fit_output
from retrofit.passes.sparse_ffn.sparse_feed_forward import ActiveUnits, SparseFeedForward
from retrofit.passes.sparse_ffn.unit_choice import gate_activation
from retrofit.sdk import (
    Anatomy,
    Edit,
    MethodReference,
    ModuleReference,
    Pass,
    Plan,
    Rearranged,
    Recovery,
    Site,
    SpecError,
    collect_near_miss,
    option,
    selected_depths,
    unfit,
)
from retrofit.sdk.anatomy import FeedForward, feed_forwards, weight_and_bias
from retrofit.sdk.data import (
    Calibration,
    Enough,
    evaluation_mode,
    groups_in_room,
    page_out_mapped,
    release_freed_memory,
    set_aside,
    side_by_side,
)
from retrofit.sdk.modules import install_feed_forward, linear

ENERGY = "energy kept of the outputs"  # measured at each site that is calibrated
OUTPUT = "relative error of the outputs on tokens held out"  # measured where the output matrix is fitted


@dataclasses.dataclass(frozen=True)
class SparseBlock:
    """A sparse feed-forward before it is installed."""

    block: SparseFeedForward
    rearranged: list[tuple[nn.Parameter, nn.Parameter, Rearranged]]  # dense parameter, new parameter, layout
    findings: list[tuple[str, dict[str, float], dict[str, Any]]]  # arguments of `Edit.note`


@dataclasses.dataclass(frozen=True)
class SparseFFNPlan(Plan):
    """The feed-forwards that become sparse, in the order of the sites."""

    feed_forwards: tuple[FeedForward, ...] = ()
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)  # number of calls of each module in a forward, by path


@dataclasses.dataclass(frozen=True)
class SparseFFN(Pass[SparseFFNPlan]):
    """Make feed-forwards sparse: a controller activates k hidden units in N."""

    name: ClassVar[str] = "sparse-ffn"
    summary: ClassVar[str] = "activate k of N hidden units in every feed-forward, selected by a low-rank controller or the gate"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.1"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "feed-forward"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "sparsity", "rank", "controller")
    already: ClassVar[str] = "another pass has already replaced it"
    candidates: ClassVar[tuple[str, ...]] = (
        "sparsity=8, active=1",
        "sparsity=8, active=2, controller=gate",
        "sparsity=8, active=2",
        "sparsity=32, active=2, rank=32",
        "sparsity=8, active=1, controller=gate",
        "sparsity=8, active=4, controller=gate",
    )
    reference: ClassVar[MethodReference] = MethodReference(
        {
            SparseFeedForward: ModuleReference(
                method_reference.sparse_feed_forward, functions=("hidden", "tail", "activation"), trainings=4
            )
        },
        start=method_reference.start,
    )

    recovery: ClassVar[Recovery] = Recovery(dial=ActiveUnits(), rate=10.0)

    sparsity: int = option(64, "N, hidden units in a block; must divide d_ff", minimum=1, weights="divides")
    active: int = option(1, "k, active hidden units of each block, up to N; N is the dense function", minimum=1)
    controller: str = option(
        "low-rank",
        "what selects the active units: a low-rank map of x, or the full gate of a gated feed-forward",
        choices=("low-rank", "gate"),
    )
    rank: int | None = option(None, "r, width of the controller's bottleneck; none: d/N", minimum=1, weights="within")
    layers: str = option("all", "depths to make sparse, e.g. 0-5+8", depths=True)
    multiply_by_controller: bool = option(False, "multiply active units by their probability under the controller")
    scale: bool = option(False, "scale the output weights by √(N/k), for the inactive units")
    temperature: float = option(
        0.1, "τ in training: scale of the noise, or temperature of the softmax (noise=both, controller=gate)", minimum=1e-6
    )
    hard: float = option(0.3, "probability of using the k selected units, not the softmax, in training", minimum=0, maximum=1)
    noise: str = option(
        "choice",
        "where training adds Gumbel noise: the choice of units alone, or the softmax too",
        choices=("choice", "both"),
    )
    fit_output: bool = option(True, "with calibration data, fit the output matrix to the active units")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.sparsity:
            raise SpecError(
                f"sparse-ffn: option active={self.active} is above sparsity={self.sparsity}",
                why="a block has no more units",
                remedy=f"use at most {self.sparsity}, the dense function",
                option="active",
                code="range",
            )

    @property
    def exact(self) -> bool:
        return self.active == self.sparsity

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        choice = ("rank", "hard", "noise")
        if self.exact:
            given = ("controller", "multiply_by_controller", "scale", "temperature", "fit_output")
            return {f"active={self.active}, all units of a block": (*choice, *given)}
        return {"controller=gate": choice} if self.controller == "gate" else {}

    @property
    def predicts(self) -> bool:
        """Return whether the controller has parameters of its own."""
        return self.controller == "low-rank" and not self.exact

    @property
    def fits_output(self) -> bool:
        """Return whether the output matrix may be fitted, so that its initial values are not the dense ones."""
        return self.fit_output and not self.exact

    def rank_for(self, width: int) -> int:
        """Return r for a feed-forward of width d."""
        return self.rank or max(1, width // self.sparsity)

    # What would be rewritten.

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset({self.rank} if self.rank else {size // self.sparsity for size in sizes})

    def plan(self, anatomy: Anatomy) -> SparseFFNPlan:
        depths = None if self.layers == "all" else selected_depths(self.layers, anatomy.deepest(), self.name)
        found, near_misses = feed_forwards(anatomy, depths)
        remedy = f"use {self.divisors(found)}" if found else ""
        fitting: list[FeedForward] = []
        for site in found:
            with collect_near_miss(site.name, near_misses):
                self.check(site, anatomy.model, remedy)
                fitting.append(site)
        n, k = self.sparsity, "one hidden unit" if self.active == 1 else f"{self.active} hidden units"
        sizes = collections.Counter((site.width, site.units) for site in fitting)
        return SparseFFNPlan(
            tuple(Site(site.name, f"{k} of {n} active in {blocks_of(site.units // n)}") for site in fitting),
            tuple(near_misses),
            new_parameters=sum(count * self.controller_parameters(*size) for size, count in sizes.items()),
            formula=self.formula(sizes),
            notes=(self.decoding_cost(fitting),) if fitting else (),
            feed_forwards=tuple(fitting),
            calls=dict(collections.Counter(call.path for call in anatomy.program.calls)),
        )

    def check(self, site: FeedForward, model: nn.Module, remedy: str) -> None:
        """Raise `DoesNotFitError` if a feed-forward cannot be made sparse; `remedy` is the fix if N does not divide its d_ff."""
        if site.units % self.sparsity:
            why = f"its d_ff = {site.units} is not a multiple of N = {self.sparsity}; {self.divisors([site])} would do"
            raise unfit(why, remedy, in_any_form=True)
        if self.predicts and self.rank_for(site.width) > site.width:
            why = f"the controller's rank {self.rank} exceeds its width d = {site.width}"
            raise unfit(why, f"use a rank up to {site.width}", in_any_form=True)
        if self.controller == "gate" and not self.exact:
            gate_activation(site)
        for parameter in (value for matrix in (*site.into, site.out) for value in weight_and_bias(matrix, model)):
            names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
            if len(names) > 1:
                raise unfit(f"its parameter {names[0]} is also {names[1]}, whose hidden units would have to be permuted too")
            if parameter is not None and not parameter.is_floating_point():
                raise unfit(f"its weights are stored as {parameter.dtype}")

    def divisors(self, sites: Sequence[FeedForward]) -> str:
        """Return the common divisors of the sites' d_ff that are nearest to N, as text of the option."""
        common = math.gcd(*(site.units for site in sites))
        divisors = [size for size in range(1, common + 1) if common % size == 0]
        nearest = sorted(divisors, key=lambda size: abs(math.log(size / self.sparsity)))[:3]
        return "sparsity=" + " or ".join(map(str, sorted(nearest)))

    def controller_parameters(self, d: int, d_ff: int) -> int:
        """Return d·r + r·d_ff + d_ff; 0 if the gate is the controller or all units are active."""
        r = self.rank_for(d)
        return d * r + r * d_ff + d_ff if self.predicts else 0

    def formula(self, sizes: collections.Counter[tuple[int, int]]) -> str:
        """Return the formula of the controllers' parameters, with numbers; `sizes` counts the feed-forwards by d and d_ff."""
        if not self.predicts:
            return f"no new parameters: {'all units are active' if self.exact else 'the gate selects the units'}"
        terms = []
        for (d, d_ff), count in sizes.items():
            r = self.rank_for(d)
            terms.append(f"{count}·(d·r + r·d_ff + d_ff) = {count}·({d}·{r} + {r}·{d_ff} + {d_ff})")
        return " + ".join(terms)

    def decoding_cost(self, sites: Sequence[FeedForward]) -> str:
        """Return a note on the FLOPs of decoding one token at a time."""
        whole = 1 if self.controller == "gate" and not self.exact else 0  # matrices of which all rows are used
        sparse = dense = 0
        for site in sites:
            size, count = 2 * site.width * site.units, len(site.ports) + 1
            dense += size * count
            sparse += size * whole + size * (count - whole) * self.active // self.sparsity
            sparse += 2 * self.rank_for(site.width) * (site.width + site.units) if self.predicts else 0
        return f"one token at a time, the feed-forwards cost {sparse:,} FLOPs, not {dense:,}"

    # The edits.

    def apply(self, plan: SparseFFNPlan, edit: Edit) -> None:
        sites = [site.bound_to(edit.model) for site in plan.feed_forwards]
        made: list[SparseBlock] = []
        with evaluation_mode(edit.model):
            for group in self.groups(sites, edit, plan.calls):
                made += self.make_group(group, edit, plan.calls, len(made), len(sites))
                release_freed_memory()
        for site, new in zip(sites, made, strict=True):
            for heading, finding, how in new.findings:
                edit.note(heading, site.name, finding, **how)
            install_feed_forward(site, new.block, edit)
            for dense, parameter, layout in new.rearranged:
                edit.rearrange_parameter(dense, parameter, new.block, layout, "a row for each hidden unit, in blocks")

    def groups(self, sites: Sequence[FeedForward], edit: Edit, calls: Mapping[str, int]) -> list[list[FeedForward]]:
        """Return the sites in groups, in order; the inputs of a group on the calibration data fit in memory together."""
        if edit.calibration is None or self.exact:
            return [list(sites)]
        most = most_tokens(edit.calibration)
        tokens = {site.entry_path: min(TOKENS, most * calls.get(site.entry_path, 1)) for site in sites}
        sizes = {site.entry_path: ROUNDED.itemsize * tokens[site.entry_path] * site.width for site in sites}
        groups = groups_in_room(sizes, edit.model)
        return [[site for site in sites if site.entry_path in paths] for paths in groups]

    def make_group(
        self, sites: Sequence[FeedForward], edit: Edit, calls: Mapping[str, int], done: int, total: int
    ) -> list[SparseBlock]:
        """Return the sparse feed-forwards of a group, computed in parallel; `done` of the `total` sites are before it."""
        recorded: dict[str, Tensor] = {}
        if edit.calibration is not None and not self.exact:
            paths = {site.entry_path: calls.get(site.entry_path, 1) for site in sites}
            recorded = record_inputs(edit.model, edit.calibration, paths)
            page_out_mapped(edit.model.parameters())  # each fit reads only the weights of its own site
        inputs = [recorded.get(site.entry_path) for site in sites]
        size = max(bytes_of_a_fit(max(map(len, recorded.values()), default=0), site) for site in sites)
        recorded.clear()

        def make(index: int) -> SparseBlock:
            x, inputs[index] = inputs[index], None  # frees the memory after the last site that reads it
            return self.make(sites[index], edit.model, x)

        return side_by_side(make, range(len(sites)), "fitting feed-forward", size, done=done, total=total)

    def make(self, site: FeedForward, model: nn.Module, x: Tensor | None) -> SparseBlock:
        """Return the sparse feed-forward that replaces a dense one; `x`, (tokens, d), is its calibration input."""
        from retrofit.sdk.modules import RowMajor  # deferred: it imports transformers

        rank = self.rank_for(site.width)
        has_values = not model.get_parameter(site.out.weight).is_meta
        fitted_rank = rank if self.controller == "low-rank" else None
        start = fit_start(site, model, self.sparsity, self.active, fitted_rank, x) if has_values and not self.exact else None
        order = None if start is None else start.order
        rearranged: list[tuple[nn.Parameter, nn.Parameter, Rearranged]] = []
        findings: list[tuple[str, dict[str, float], dict[str, Any]]] = []

        def rearrange(parameter: nn.Parameter, layout: Rearranged) -> nn.Parameter:
            values = parameter.detach() if order is None or not layout.order else layout.ordered(parameter.detach(), order)
            values = values.t().contiguous() if layout.transposed else values
            values = values.clone() if layout.fitted and x is not None else values  # the dense parameter keeps its values
            new = nn.Parameter(values, requires_grad=parameter.requires_grad)
            rearranged.append((parameter, new, layout))
            return new

        into: dict[str, nn.Linear] = {}
        for index, matrix in enumerate(site.into):
            ports = tuple((port.start, port.step) for port in site.ports if port.matrix == index)
            weight, bias = weight_and_bias(matrix, model)
            rows = Rearranged(transposed=not matrix.out_first, order="order", dim=0 if matrix.out_first else 1, ports=ports)
            name = matrix.role if matrix.role not in into else f"{matrix.role}{index}"
            new_bias = None if bias is None else rearrange(bias, Rearranged(order="order", ports=ports))
            into[name] = linear(rearrange(weight, rows), new_bias)
        weight, bias = weight_and_bias(site.out, model)
        fitted = "fitted" if self.fits_output else ""
        rows = Rearranged(transposed=site.out.out_first, order="order", dim=1 if site.out.out_first else 0, fitted=fitted)
        out_bias = rearrange(bias, Rearranged(fitted=fitted)) if bias is not None and fitted else bias
        down = RowMajor(rearrange(weight, rows), out_bias)
        block = SparseFeedForward(
            site,
            model.get_submodule(site.path),
            into,
            down,
            torch.arange(site.units, device=weight.device) if order is None else order.to(weight.device),
            sparsity=self.sparsity,
            rank=rank,
            temperature=self.temperature,
            hard=self.hard,
            noise=self.noise,
            multiply=self.multiply_by_controller,
            scale=self.scale,
            active=self.active,
            controller=self.controller,
        )
        if start is not None:
            for name, values in vars(start.controller).items() if start.controller is not None else ():
                getattr(block, name).copy_(values)
            if start.finding:
                findings.append((ENERGY, start.finding, {"form": ".1%"}))
        if x is not None and start is not None and self.fits_output:
            held_out = held_out_tokens(len(x))
            before, after = fit_output(block, x[~held_out], x[held_out])
            columns = {"output matrix fitted": after.of_tokens, "as it was": before.of_tokens}
            findings.append((OUTPUT, columns, {"form": ".3f", "worst": "highest"}))
        return SparseBlock(block, rearranged, findings)


def bytes_of_a_fit(tokens: int, site: FeedForward) -> int:
    """Return the memory of a site's fit: whitened inputs, the units' shares in half precision, moments in float64."""
    return 4 * tokens * site.width + 2 * tokens * site.units + 24 * site.units**2


def blocks_of(number: int) -> str:
    return "its one block" if number == 1 else f"each of {number} blocks"


TOKENS = 32_768  # at most, on which a feed-forward is calibrated
FEWEST = 16  # tokens; with fewer, nothing is fitted
ROUNDED = torch.bfloat16  # the dtype of recorded inputs: fits are as good, and more layers are recorded in a run


def most_tokens(calibration: Calibration) -> int:
    """Return the maximum of tokens recorded per call; the number of image and sound tokens is unknown before the run."""
    tensors = [value for batch in calibration.batches for value in batch.values() if isinstance(value, Tensor)]
    return TOKENS if any(value.is_floating_point() for value in tensors) else min(TOKENS, tokens_given(calibration))


def record_inputs(model: nn.Module, calibration: Calibration, calls: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the inputs of the modules at the paths in `calls`, by path: (tokens, d), rounded, on the CPU.

    Tokens of all calls of a module in a forward are recorded. Modules that receive fewer than `FEWEST` tokens are left out.
    """
    recorders = {path: TokenRecorder(most_tokens(calibration) * count) for path, count in calls.items()}
    spread_out(calibration, TOKENS).observe(model, recorders)
    recorded = {path: recorder.tokens() for path, recorder in recorders.items()}
    return {path: x for path, x in recorded.items() if len(x) >= FEWEST}


class TokenRecorder:
    """Records up to `TOKENS` of the `expected` tokens that a module receives, evenly spaced, in memory allocated once."""

    def __init__(self, expected: int) -> None:
        self.most, self.step = min(TOKENS, expected), math.ceil(expected / TOKENS)
        self.count = self.skipped = 0
        self.rows = torch.empty(0)

    def __call__(self, x: Tensor) -> None:
        if not self.count:
            dtype = ROUNDED if x.dtype.itemsize > ROUNDED.itemsize else x.dtype
            self.rows = set_aside(torch.empty(self.most, x.shape[-1], dtype=dtype))
        first, self.skipped = self.skipped, (self.skipped - len(x)) % self.step
        part = x[first :: self.step][: self.most - self.count]
        self.rows[self.count : self.count + len(part)] = part
        self.count += len(part)
        if self.count == self.most:
            raise Enough

    def tokens(self) -> Tensor:
        """Return the tokens, (tokens, d); none if the module was not called."""
        return self.rows[: self.count]


def spread_out(calibration: Calibration, tokens: int) -> Calibration:
    """Return batches of about `tokens` tokens in all, evenly spaced, because the subject of the data may change."""
    return dataclasses.replace(calibration, batches=calibration.batches[:: max(1, tokens_given(calibration) // tokens)])


def tokens_given(calibration: Calibration) -> int:
    """Return the number of tokens of the data, with padding."""
    tensors = ([value for value in batch.values() if isinstance(value, Tensor)] for batch in calibration.batches)
    return sum(max(math.prod(value.shape[:2]) for value in batch) for batch in tensors)
