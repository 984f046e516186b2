"""A feed-forward's hidden units in slices, each with experts and a router of its own (virtual groups, arXiv 2410.07524).

    y = Σ_s e_s(x) + b,   e_s: the units of slice s          the dense feed-forward, for any division of its units
    u ~ v if |h_u| ‖w_u‖ and |h_v| ‖w_v‖ correlate           over the tokens of calibration data; w_u: row u of W_out

The slices are stored as one mixture of g·E experts of d_ff/g units each: expert e of slice s is s·E + e. The matrices that read x
are stacked into one, in which each port has its rows; the first slice's experts have the bias of y.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.shared_moe.grouping import DOWN, Group
from retrofit.passes.shared_moe.mixture_fit import CHUNK, hidden_units, record_inputs
from retrofit.passes.shared_moe.mixture_of_experts import ExpertMatrices
from retrofit.sdk import Edit, Rearranged, unfit
from retrofit.sdk.anatomy import FeedForward, Port, weight_and_bias, weight_out_first
from retrofit.sdk.data import counted, sample_calibration

TOKENS = 4096  # at most, from which the slices of a feed-forward's units are computed
SWEEPS = 16  # at most, of the clustering
UP, GATE_UP, ORDER = "up", "gate_up", "order"


@dataclasses.dataclass(frozen=True)
class Slices:
    """The division of a feed-forward into `count` slices with `experts` copies each."""

    site: FeedForward
    count: int
    experts: int
    order: Tensor  # the dense hidden units, slice after slice

    @property
    def units(self) -> int:
        return self.site.units // self.count

    @property
    def into(self) -> str:
        """Return the name of the matrix that reads x."""
        return GATE_UP if len(self.site.ports) > 1 else UP

    @property
    def ports(self) -> list[Port]:
        """Return the rows of the hidden function's arguments in the matrix that reads x."""
        return [Port(0, self.places.index(number) * self.units, 1) for number in range(len(self.site.ports))]

    @property
    def places(self) -> list[int]:
        """Return the indices of the ports in the order of their rows: by matrix."""
        return sorted(range(len(self.site.ports)), key=lambda number: self.site.ports[number].matrix)

    def layouts(self) -> Iterator[tuple[str, str | None, str | None, Rearranged]]:
        """Yield, for each dense matrix, its module, its parameters' names, and the layout of the weight in the first experts."""
        first, ports = slice(0, None, self.experts), [self.site.ports[number] for number in self.places]
        for index, matrix in enumerate(self.site.into):
            own = [place for place, port in enumerate(ports) if port.matrix == index]
            rows = slice(own[0] * self.units, (own[-1] + 1) * self.units)
            columns = tuple((ports[place].start, ports[place].step) for place in own)
            dim = 0 if matrix.out_first else 1
            layout = Rearranged((first, rows), not matrix.out_first, ORDER, dim, columns, sliced=True)
            yield self.into, matrix.weight, matrix.bias, layout
        out = self.site.out
        yield DOWN, out.weight, out.bias, Rearranged((first,), not out.out_first, ORDER, 1 if out.out_first else 0, sliced=True)

    def matrices(self, model: nn.Module) -> dict[str, ExpertMatrices]:
        """Return the stacked matrices, all experts of a slice equal."""
        weights: dict[str, list[Tensor]] = {self.into: [], DOWN: []}
        biases: dict[str, list[Tensor]] = {self.into: [], DOWN: []}
        trains = False
        for (name, _, _, layout), matrix in zip(self.layouts(), (*self.site.into, self.site.out), strict=True):
            weight, bias = weight_and_bias(matrix, model)
            trains = trains or weight.requires_grad
            plain = dataclasses.replace(layout, transposed=False, dim=layout.units_dim)  # of a weight laid out (out, in)
            weights[name].append(plain.divided(plain.ordered(weight_out_first(matrix, model), self.order), self.count))
            biases[name] += [] if bias is None else [self.sliced_bias(bias.detach(), name, layout)]

        def of_experts(slices: list[Tensor]) -> nn.Parameter:
            return nn.Parameter(torch.cat(slices, 1).repeat_interleave(self.experts, 0), requires_grad=trains)

        return {
            name: ExpertMatrices(of_experts(weights[name]), of_experts(biases[name]) if biases[name] else None) for name in weights
        }

    def sliced_bias(self, bias: Tensor, name: str, layout: Rearranged) -> Tensor:
        """Return the bias of each slice: (slices, …); the bias of y is zero in all but the first."""
        if name == DOWN:
            return torch.cat([bias.unsqueeze(0), bias.new_zeros(self.count - 1, len(bias))])
        of_bias = bias_layout(layout)
        return of_bias.divided(of_bias.ordered(bias, self.order), self.count)

    def place(self, moe: nn.Module, edit: Edit) -> None:
        """Record that the dense weights are the first expert of each slice now."""
        why = "its slices are experts of a mixture"
        for name, weight, bias, layout in self.layouts():
            matrices = moe.get_submodule(name)
            edit.rearrange_parameter(edit.model.get_parameter(str(weight)), matrices.get_parameter("weight"), moe, layout, why)
            if bias is not None:
                placed = Rearranged((0,)) if name == DOWN else bias_layout(layout)
                edit.rearrange_parameter(edit.model.get_parameter(bias), matrices.get_parameter("bias"), moe, placed, why)


def bias_layout(layout: Rearranged) -> Rearranged:
    """Return the layout of a bias from that of its weight."""
    return dataclasses.replace(layout, transposed=False, dim=0)


def require_slices(site: FeedForward, count: int, model: nn.Module) -> None:
    """Raise `DoesNotFitError` if a feed-forward, or one of its matrices, does not divide into `count` slices."""
    if site.units % count:
        near = [divisor for divisor in range(2, min(site.units, 4 * count) + 1) if site.units % divisor == 0]
        remedy = f"use slices={min(near, key=lambda divisor: abs(divisor - count))}" if near else "leave it out with layers="
        why = f"its d_ff = {site.units} is not a multiple of {count}"
        raise unfit(why, remedy, in_any_form=True, code="does-not-divide")
    rows = [(port.matrix, port.start + port.step * unit) for port in site.ports for unit in range(site.units)]
    if len({weight_and_bias(matrix, model)[1] is None for matrix in site.into}) > 1:
        why = "some of its matrices have a bias and some have none"
    elif any(tensor.numel() > 1 for tensor in (*site.hidden.parameters(), *site.hidden.buffers())):
        why = "its hidden function has parameters or buffers of several elements"
    elif len(set(rows)) < len(rows) or {matrix for matrix, _ in rows} != {*range(len(site.into))}:
        why = "two of its units share a column of a matrix, or a matrix has none of their columns"
    else:
        return
    raise unfit(why, "leave it out with layers=, or drop slices")


# ── Units that fire together ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fit_orders(groups: Sequence[Group], count: int, edit: Edit) -> dict[str, Tensor]:
    """Return, by path, the units of each feed-forward that received calibration data, slice after slice."""
    assert edit.calibration is not None
    inputs = record_inputs(groups, edit.model, sample_calibration(edit.calibration, TOKENS))
    sites = [site for group in groups for site in group.bound_to(edit.model).sites if site.path in inputs]
    return {
        site.path: together(strengths(site, inputs.pop(site.path), edit.model), count)
        for site in counted(sites, "slicing feed-forward", len(sites))
    }


@torch.no_grad()
def strengths(site: FeedForward, x: Tensor, model: nn.Module) -> Tensor:
    """Return |h_u| ‖w_u‖ of each token and hidden unit, normalized for each token: (tokens, units)."""
    lengths = weight_out_first(site.out, model).float().norm(dim=0)
    return F.normalize(torch.cat([hidden_units(site, part, model).abs() * lengths for part in x.split(CHUNK)]), dim=1)


@torch.no_grad()
def together(strength: Tensor, count: int) -> Tensor:
    """Return the units, (units), in `count` even slices, such that strengths, (tokens, units), correlate within a slice.

    The sum of their correlations is at least that of the original order.
    """
    x = F.normalize(strength - strength.mean(0), dim=0)  # the product of two columns is their correlation
    units = x.shape[1]
    best = torch.arange(units, device=x.device) // (units // count)  # the slice of each unit
    most, slices = correlation_inside(x, best, count), along_the_main_direction(x, count)
    for _ in range(SWEEPS):
        found = correlation_inside(x, slices, count)
        if found <= most:
            break
        best, most = slices, found
        slices = nearest_with_room(affinities(x, slices, count), units // count)
    return best.argsort(stable=True).cpu()


def along_the_main_direction(x: Tensor, count: int) -> Tensor:
    """Return even slices of the units by their products with the first principal direction of x."""
    direction = x[:, x.abs().sum(0).argmax()]
    for _ in range(SWEEPS):
        direction = F.normalize(x @ (x.t() @ direction), dim=0)
    ranks = (x.t() @ direction).argsort(stable=True).argsort(stable=True)
    return ranks // (x.shape[1] // count)


def correlation_inside(x: Tensor, slices: Tensor, count: int) -> float:
    """Return the sum of the correlations of all pairs of units in one slice."""
    return float((x @ F.one_hot(slices, count).to(x.dtype)).square().sum())


def affinities(x: Tensor, slices: Tensor, count: int) -> Tensor:
    """Return the sum of each unit's correlations with the other units of each slice: (units, slices)."""
    members = F.one_hot(slices, count).to(x.dtype)
    return x.t() @ (x @ members) - members * x.square().sum(0).unsqueeze(1)


def nearest_with_room(affinity: Tensor, size: int) -> Tensor:
    """Return the slice of each unit, `size` units in each: the slice of greatest affinity that is not full.

    Units whose two greatest affinities differ most choose first.
    """
    ranked = affinity.sort(1, descending=True)
    margin = ranked.values[:, 0] - ranked.values[:, 1:2].sum(1)
    preferences, room = ranked.indices.tolist(), [size] * affinity.shape[1]
    slices = [0] * len(affinity)
    for unit in margin.argsort(descending=True, stable=True).tolist():
        slices[unit] = next(choice for choice in preferences[unit] if room[choice])
        room[slices[unit]] -= 1
    return torch.tensor(slices, device=affinity.device)
