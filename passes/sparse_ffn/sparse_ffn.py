"""Sparse feed-forward: of every block of N hidden units one is active, and a low-rank controller says which.

    Controller(x) = argmax over each block of N of (x C1 C2 + c)      C1: [d, r] `c1`, C2: [r, d_ff] `c2`, c: [d_ff] `bias`
    h = hidden(x W_in + b_in) ⊙ Controller(x)                         hidden: the activation, and the gate where there is one
    y = h W_out + b_out                                               r = d/N by default

In training the controller is a straight-through Gumbel-softmax: s = softmax((x C1 C2 + c + g)/τ) with Gumbel noise g and τ = 0.1;
for three batches in ten h is multiplied by the one-hot of s, with the gradient of s, for the others by s itself.

The start. Unit u adds a vector of length c_u = |h_u| ‖row u of W_out‖ to the output. C1 C2 + c is the map of rank r that tells
these lengths, less their block's mean, with the least squared error (reduced-rank regression). With calibration data it is fitted
to that, and the units are first parted into blocks that rarely fire together. Without, x is taken as standard normal, which is
what a normalisation leaves; the covariance of x and c_u is then E[∂c_u/∂x] (Stein's lemma), a matter of the weights alone.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from retrofit.passes.sparse_ffn.chosen_rows import chosen_products, followed, summed_rows
from retrofit.passes.sparse_ffn.partition import parted
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    Enough,
    FeedForward,
    FeedForwardBlock,
    NearMiss,
    Pass,
    Port,
    Rearranged,
    Rewrite,
    RowMajor,
    Site,
    SpecError,
    cond,
    evaluation_mode,
    feed_forwards,
    install,
    linear,
    option,
    out_first,
    parameters_of,
    selected_depths,
)

FEW = 4  # up to N / FEW tokens it is faster to copy the active rows than to use all (benchmarks/sparse_ffn.py --crossover)
ALWAYS = 8  # from this N on, where rows are read in place on a CPU, it is faster for any number of tokens; below, for N tokens
SPREAD = 4.0  # of the controller's logits in a block at the start, in standard deviations (benchmarks/sparse_ffn_calibration.py)
SHRINKAGE = 0.5  # of the covariance of x towards the identity (benchmarks/sparse_ffn_calibration.py)
TOKENS = 8192  # that a layer is calibrated on
HELD_OUT = 8  # one of so many is left out of the fit, to measure on
CHUNK = 1024  # tokens worked on at a time
DRAWS = 256  # of each unit's pre-activations where there is no data

# ── The layer ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SparseFeedForward(FeedForwardBlock):
    """y = (hidden(x W_in + b_in) ⊙ Controller(x)) W_out + b_out: (…, d) to (…, d).

    Hidden units come in blocks of `sparsity`, of which one is active; unit i is the dense model's unit `order[i]`. A block of one
    leaves nothing to choose: there `c1`, `c2` and `bias` are None.
    """

    c1: Tensor
    c2: Tensor
    bias: Tensor
    order: Tensor

    def __init__(
        self, site: FeedForward, old: nn.Module, into: dict[str, nn.Linear], down: RowMajor, order: Tensor, options: SparseFFN
    ) -> None:
        super().__init__(site, old)
        self.sparsity, self.temperature, self.hard = options.sparsity, options.temperature, options.hard
        self.multiply = options.multiply_by_controller
        self.factor = math.sqrt(options.sparsity) if options.scale else 1.0
        self.hidden, self.ports, self.roles = site.hidden, site.ports, tuple(into)
        for role, child in into.items():
            self.add_module(role, child)
        self.down = down
        self.register_buffer("order", order)
        rank = options.rank_for(site.width)
        for name, size in {"c1": (self.width, rank), "c2": (rank, self.units), "bias": (self.units,)}.items():
            chosen = nn.Parameter(down.weight.new_zeros(size)) if self.sparsity > 1 else None
            self.register_parameter(name, chosen)

    def compute(self, x: Tensor) -> Tensor:
        if self.c1 is None:
            return self.down(self.hidden(*self.columns(x)))  # type: ignore[no-any-return]
        logits = self.logits(x)
        if self.training:
            return self.masked(x, self.sampled(logits))
        largest, unit = logits.max(-1, keepdim=True)
        weight = ((largest - logits.logsumexp(-1, keepdim=True)).exp(),) if self.multiply else ()
        return cond(self.gathers(x), self.gathered, self.selected, x, unit, *weight)

    def logits(self, x: Tensor) -> Tensor:
        """x C1 C2 + c in float32, whatever precision the rest is in: (…, blocks, N)."""
        with maybe_autocast(device_type=x.device.type, enabled=False):
            low = x.float() @ self.c1.float()
            return F.linear(low, self.c2.float().t(), self.bias.float()).unflatten(-1, (-1, self.sparsity))

    def sampled(self, logits: Tensor) -> Tensor:
        """The straight-through Gumbel-softmax, one-hot with probability `hard` for the whole batch: (…, blocks, N)."""
        noise = torch.empty_like(logits).exponential_().log()
        soft = ((logits - noise) / self.temperature).softmax(-1)
        one_hot = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
        mask = torch.where(torch.rand((), device=soft.device) < self.hard, one_hot + (soft - soft.detach()), soft)
        return mask * logits.softmax(-1) if self.multiply else mask

    # All rows, and the mask.

    def selected(self, x: Tensor, unit: Tensor, weight: Tensor | None = None) -> Tensor:
        """With the active `unit` of each block, by its place there, and its weight: both (…, blocks, 1)."""
        active = torch.arange(self.sparsity, device=x.device) == unit
        return self.masked(x, active if weight is None else active * weight)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.scaled(self.hidden(*self.columns(x)))
        return self.down(h * mask.flatten(-2).to(h.dtype))  # type: ignore[no-any-return]

    def columns(self, x: Tensor) -> list[Tensor]:
        """What each port of `hidden` reads: (…, d_ff)."""
        z = [self.get_submodule(role)(x) for role in self.roles]
        return [z[port.matrix][..., port.start : port.start + port.step * self.units : port.step] for port in self.ports]

    def scaled(self, h: Tensor) -> Tensor:
        return h if self.factor == 1.0 else h * self.factor

    # The rows of the active units alone.

    def gathers(self, x: Tensor) -> bool | torch.SymBool:
        """Whether the active rows are gathered: where that is faster, and nothing has taken the place of the plain matrices."""
        into = [getattr(self, role) for role in self.roles]
        if type(self.down) is not RowMajor or any(type(child) is not nn.Linear for child in into):
            return False
        if x.device.type == "cpu" and not followed(x, self.down.weight, *(child.weight for child in into)):
            return self.sparsity >= ALWAYS or x.numel() <= self.sparsity * self.width
        return x.numel() <= self.sparsity // FEW * self.width

    def gathered(self, x: Tensor, unit: Tensor, weight: Tensor | None = None) -> Tensor:
        """The same from the rows of the active units alone."""
        blocks = self.units // self.sparsity
        active = unit.view(-1, blocks) + torch.arange(0, self.units, self.sparsity, device=x.device)
        tokens = x.reshape(-1, self.width)
        h = self.scaled(self.hidden(*(self.column(port, tokens, active) for port in self.ports)))
        if weight is not None:
            h = h * weight.reshape(-1, blocks).to(h.dtype)
        y = summed_rows(h, active, self.down.weight)
        return (y if self.down.bias is None else y + self.down.bias.to(y.dtype)).view(x.shape)

    def column(self, port: Port, x: Tensor, active: Tensor) -> Tensor:
        """What a port reads for the active units: (tokens, blocks)."""
        matrix: nn.Linear = getattr(self, self.roles[port.matrix])
        places = port.columns(active)
        z = chosen_products(x, places, matrix.weight)
        return z if matrix.bias is None else z + matrix.bias[places].to(z.dtype)

    def extra_repr(self) -> str:
        rank = 0 if self.c1 is None else self.c1.shape[1]
        return f"d={self.width}, d_ff={self.units}, N={self.sparsity}, r={rank}"


# ── The start ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Contributions:
    """c_u = |h_u| ‖row u of W_out‖, the length of what each hidden unit of a dense feed-forward adds to its output; in float32."""

    def __init__(self, site: FeedForward, model: nn.Module) -> None:
        units = torch.arange(site.units, device=model.get_parameter(site.out.weight).device)
        self.hidden = site.hidden
        self.lengths = out_first(site.out, model).float().norm(dim=0)
        self.rows, self.offsets = [], []  # of each port: (d_ff, d), (d_ff)
        for port in site.ports:
            matrix, columns = site.into[port.matrix], port.columns(units)
            _, bias = parameters_of(matrix, model)
            self.rows.append(out_first(matrix, model).float()[columns])
            self.offsets.append(torch.zeros_like(self.lengths) if bias is None else bias.detach().float()[columns])

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, d) to (tokens, d_ff)."""
        return self.made_of(*(F.linear(x, rows, offset) for rows, offset in zip(self.rows, self.offsets, strict=True)))

    def made_of(self, *z: Tensor) -> Tensor:
        return self.hidden(*z).abs() * self.lengths

    def chunks(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """x and its contributions, some tokens at a time."""
        for part in x.split(CHUNK):
            part = part.to(self.lengths.device, torch.float32)
            yield part, self(part)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Means and covariances of a feed-forward's input x and the contributions c of its units, in the dense model's order."""

    x: Tensor  # E[x]: (d)
    c: Tensor  # E[c]: (d_ff)
    xx: Tensor  # Cov[x, x]: (d, d)
    xc: Tensor  # Cov[x, c]: (d, d_ff)

    @staticmethod
    def seen(contributions: Contributions, x: Tensor) -> tuple[Moments, Tensor]:
        """Those of real inputs x, (tokens, d), and how much the units fire together: E[c_u² c_v²], (d_ff, d_ff)."""
        d, units, like = x.shape[1], len(contributions.lengths), contributions.lengths
        shift = x[:CHUNK].to(like).mean(0)  # near the mean, so that little cancels
        sums = [like.new_zeros(size) for size in ((d,), (units,), (d, d), (d, units), (units, units))]
        for part, c in contributions.chunks(x):
            part = part - shift
            energy = c.square()
            products = (part.sum(0), c.sum(0), part.t() @ part, part.t() @ c, energy.t() @ energy)
            for total, product in zip(sums, products, strict=True):
                total += product
        mean, c, xx, xc, together = (total.div_(len(x)) for total in sums)
        return Moments(mean + shift, c, xx - torch.outer(mean, mean), xc - torch.outer(mean, c)), together

    @staticmethod
    def of_standard_normal(contributions: Contributions) -> Moments:
        """Those of x ~ N(0, 1): Cov[x, c_u] = E[∂c_u/∂x] = Σ_p E[∂c_u/∂z_p] W_p[u], by Stein's lemma, over a unit's ports p."""
        rows = torch.stack(contributions.rows, 1)  # (d_ff, ports, d)
        spread, _ = torch.linalg.cholesky_ex(rows @ rows.mT + 1e-12 * torch.eye(rows.shape[1], device=rows.device))
        noise = torch.randn(DRAWS // 2, rows.shape[1], generator=torch.Generator().manual_seed(0)).to(rows)
        noise = torch.cat([noise, -noise])
        z = torch.einsum("upq,sq->psu", spread, noise) + torch.stack(contributions.offsets).unsqueeze(1)
        with torch.enable_grad():
            ports = [one.detach().requires_grad_() for one in z]
            c = contributions.made_of(*ports)
            slopes = torch.autograd.grad(c.sum(), ports)
        xc = sum((slope.mean(0) * row.t() for slope, row in zip(slopes, contributions.rows, strict=True)), start=rows.new_zeros(()))
        return Moments(rows.new_zeros(rows.shape[2]), c.detach().mean(0), torch.eye(rows.shape[2], device=rows.device), xc)


@dataclasses.dataclass(frozen=True)
class Controller:
    """Which unit of each block: the largest of x C1 C2 + c."""

    c1: Tensor
    c2: Tensor
    bias: Tensor

    @staticmethod
    def fitted(moments: Moments, order: Tensor, n: int, rank: int) -> Controller:
        """The reduced-rank regression of the contributions, less the mean of their block, on x; units come in the given order.

        The covariance of x is shrunk towards a multiple of the identity. C1 has orthonormal columns, and the logits are scaled to
        spread by `SPREAD` in a block: the argmax does not depend on it, but the noise of training is of a fixed size.
        """
        xc, c = (centred(value[..., order].double(), n) for value in (moments.xc, moments.c))
        xx = moments.xx.double()
        level = xx.diagonal().mean().clamp_min(1e-30) * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        root = torch.linalg.cholesky(torch.lerp(xx, level, SHRINKAGE))
        explained = torch.linalg.solve_triangular(root, xc, upper=False)
        basis = leading(explained, rank)
        c1, upper = torch.linalg.qr(torch.linalg.solve_triangular(root.t(), basis, upper=True))
        c2 = upper @ basis.t() @ explained
        variance = (c2 * (c1.t() @ xx @ c1 @ c2)).sum(0) + c.square()
        scale = SPREAD / variance.mean().sqrt().clamp_min(1e-30)
        bias = c - moments.x.double() @ c1 @ c2
        return Controller(c1.float(), (scale * c2).float(), (scale * bias).float())

    def kept(self, contributions: Contributions, x: Tensor, order: Tensor, n: int) -> tuple[float, float]:
        """The share of the outputs' energy Σ c_u² that the chosen units keep, and that the best choice in these blocks would."""
        kept = best = whole = 0.0
        for part, c in contributions.chunks(x):
            energy = c[:, order].square().unflatten(1, (-1, n))
            chosen = (part @ self.c1 @ self.c2 + self.bias).unflatten(1, (-1, n)).argmax(-1, keepdim=True)
            kept += float(energy.gather(-1, chosen).sum())
            best += float(energy.amax(-1).sum())
            whole += float(energy.sum())
        return kept / max(whole, 1e-30), best / max(whole, 1e-30)


def centred(values: Tensor, n: int) -> Tensor:
    """Values of units, (…, d_ff), less the mean of their block of n."""
    blocks = values.unflatten(-1, (-1, n))
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


def leading(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal basis of the `rank` leading left singular vectors of (d, n), by subspace iteration: (d, rank)."""
    kept = min(rank + 8, len(matrix))
    start = torch.randn(matrix.shape[1], kept, generator=torch.Generator().manual_seed(0)).to(matrix)
    basis, _ = torch.linalg.qr(matrix @ start)
    for _ in range(6):
        basis, _ = torch.linalg.qr(matrix @ (matrix.t() @ basis))
    within = basis.t() @ matrix
    return basis @ torch.linalg.eigh(within @ within.t()).eigenvectors.flip(1)[:, :rank]


# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class SparseFFN(Pass):
    """Feed-forwards of which a controller activates one hidden unit in N."""

    name: ClassVar[str] = "sparse-ffn"
    summary: ClassVar[str] = "activate one hidden unit in N of every feed-forward, chosen by a low-rank controller"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.1"
    calibrates: ClassVar[bool] = True

    sparsity: int = option(64, "N, hidden units in a block, of which one is active; must divide d_ff", minimum=1)
    rank: int | None = option(None, "r, width of the controller's bottleneck; none: d/N", minimum=1)
    layers: str = option("all", "depths whose feed-forwards become sparse, e.g. 0-5+8")
    multiply_by_controller: bool = option(False, "multiply an active unit by the probability the controller gives it")
    scale: bool = option(False, "multiply the output weights by √N, for the units that are left out")
    temperature: float = option(0.1, "τ of the Gumbel-softmax in training", minimum=1e-6)
    hard: float = option(0.3, "how often training uses the one-hot choice, and not the softmax", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hard > 1:
            raise SpecError(f"sparse-ffn: option hard={self.hard:g} is above 1", remedy="it is a probability")

    @property
    def exact(self) -> bool:
        return self.sparsity == 1

    def rank_for(self, width: int) -> int:
        return self.rank or max(1, width // self.sparsity)

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        return Application(self, anatomy, edit).run()


class Application:
    """One rewrite of one model."""

    def __init__(self, sparse: SparseFFN, anatomy: Anatomy, edit: Edit) -> None:
        self.sparse, self.anatomy, self.edit = sparse, anatomy, edit
        self.model = anatomy.model
        self.sites: list[Site] = []
        self.notes: list[str] = []
        self.sizes: dict[tuple[int, int], int] = {}  # d and d_ff: how many feed-forwards have them

    def run(self) -> Rewrite:
        n = self.sparse.sparsity
        deepest = max((len(stack.layers) for stack in self.anatomy.stacks), default=0)
        wanted = None if self.sparse.layers == "all" else selected_depths(self.sparse.layers, deepest, self.sparse.name)
        found, skipped = feed_forwards(self.anatomy, wanted)
        reasons = {site.path: self.reason(site) for site in found}
        fitting = [site for site in found if not reasons[site.path]]
        skipped += [NearMiss(site.name, reasons[site.path]) for site in found if reasons[site.path]]
        if not fitting:
            raise DoesNotFitError(
                "sparse-ffn: no feed-forward of the model can be made sparse",
                why="; ".join(dict.fromkeys(f"{miss.name}: {miss.why}" for miss in skipped[:4])) or "none was found",
                remedy=f"use {self.divisors(found)}" if found else "retrofit inspect shows what was found, and where",
            )
        seen = self.observed(fitting) if n > 1 else {}
        for site in fitting:
            self.replace(site, seen.get(site.path))
        return Rewrite(
            self.sparse.spec(),
            self.sparse.exact,
            tuple(self.sites),
            tuple(skipped),
            new_parameters=sum(count * self.count(*size) for size, count in self.sizes.items()),
            formula=self.formula(),
            notes=(*self.notes, *self.costs(fitting)),
        )

    # Which fit.

    def reason(self, site: FeedForward) -> str:
        """Why a feed-forward cannot be made sparse, "" where it can."""
        n = self.sparse.sparsity
        if site.units % n:
            return f"its d_ff = {site.units} is no multiple of N = {n}; {self.divisors([site])} would do"
        if self.sparse.rank_for(site.width) > site.width:
            return f"the controller's rank {self.sparse.rank} exceeds its width d = {site.width}"
        for matrix in (*site.into, site.out):
            for parameter in (one for one in parameters_of(matrix, self.model) if one is not None):
                names = [name for name, one in self.model.named_parameters(remove_duplicate=False) if one is parameter]
                if len(names) > 1:
                    return f"its parameter {names[0]} is also {names[1]}, whose hidden units would have to move along"
                if not parameter.is_floating_point():
                    return f"its weights are stored as {parameter.dtype}"
        return ""

    def divisors(self, sites: list[FeedForward]) -> str:
        """The divisors of all the sites' d_ff that are nearest to N."""
        common = math.gcd(*(site.units for site in sites))
        able = [size for size in range(1, common + 1) if common % size == 0]
        nearest = sorted(able, key=lambda size: abs(math.log(size / self.sparse.sparsity)))[:3]
        return "sparsity=" + " or ".join(map(str, sorted(nearest)))

    # The start.

    def observed(self, sites: list[FeedForward]) -> dict[str, Tensor]:
        """What each feed-forward is handed on the calibration data: (tokens, d), by path; empty without data."""
        if self.edit.calibration is None:
            return {}
        watchers = {site.passing[0] if site.passing else site.path: Recorder() for site in sites}
        self.edit.calibration.observe(self.model, watchers)
        seen = {site.path: watchers[site.passing[0] if site.passing else site.path].tokens() for site in sites}
        return {path: tokens for path, tokens in seen.items() if tokens is not None}

    def started(self, site: FeedForward, x: Tensor | None) -> tuple[Tensor | None, Controller]:
        """The order of the units, None where they stay, and the controller; `x`, (tokens, d), is what the model hands the site."""
        n, rank = self.sparse.sparsity, self.sparse.rank_for(site.width)
        with evaluation_mode(site.hidden):
            contributions = Contributions(site, self.model)
            natural = torch.arange(site.units, device=contributions.lengths.device)
            of_weights = Controller.fitted(Moments.of_standard_normal(contributions), natural, n, rank)
            if x is None:
                return None, of_weights
            out = torch.arange(len(x)) % HELD_OUT == 0
            moments, together = Moments.seen(contributions, x[~out])
            order = parted(together, n).flatten()
            controller = Controller.fitted(moments, order, n, rank)
            kept, best = controller.kept(contributions, x[out], order, n)
            uncalibrated, _ = of_weights.kept(contributions, x[out], natural, n)
        self.notes.append(
            f"{site.name}: {kept:.1%} of the outputs' energy kept (without calibration {uncalibrated:.1%}, best choice {best:.1%})"
        )
        return order, controller

    # The edit.

    def replace(self, site: FeedForward, x: Tensor | None) -> None:
        n, old, meta = self.sparse.sparsity, self.model.get_submodule(site.path), self.model.get_parameter(site.out.weight).is_meta
        order, controller = (None, None) if n == 1 or meta else self.started(site, x)
        moved: list[tuple[nn.Parameter, nn.Parameter, Rearranged]] = []

        def arranged(parameter: nn.Parameter, layout: Rearranged) -> nn.Parameter:
            values = parameter.detach() if order is None else layout.ordered(parameter.detach(), order)
            new = nn.Parameter(values.t().contiguous() if layout.transposed else values, requires_grad=parameter.requires_grad)
            moved.append((parameter, new, layout))
            return new

        into: dict[str, nn.Linear] = {}
        for index, matrix in enumerate(site.into):
            ports = tuple((port.start, port.step) for port in site.ports if port.matrix == index)
            weight, bias = parameters_of(matrix, self.model)
            rows = Rearranged(transposed=not matrix.out_first, order="order", dim=0 if matrix.out_first else 1, ports=ports)
            name = matrix.role if matrix.role not in into else f"{matrix.role}{index}"
            into[name] = linear(
                arranged(weight, rows), None if bias is None else arranged(bias, Rearranged(order="order", ports=ports))
            )
        weight, bias = parameters_of(site.out, self.model)
        rows = Rearranged(transposed=site.out.out_first, order="order", dim=1 if site.out.out_first else 0)
        down = RowMajor(arranged(weight, rows), bias)
        units = torch.arange(site.units, device=weight.device) if order is None else order.to(weight.device)
        block = SparseFeedForward(site, old, into, down, units, self.sparse)
        if controller is not None:
            for name, values in vars(controller).items():
                getattr(block, name).copy_(values)
        install(site, block, self.edit)
        for dense, new, layout in moved:
            self.edit.rearrange_parameter(dense, new, block, layout, "a row for each hidden unit, in blocks")
        self.sites.append(Site(site.name, f"one hidden unit of {n} active in each of {site.units // n} blocks"))
        self.sizes[site.width, site.units] = self.sizes.get((site.width, site.units), 0) + 1

    # The account.

    def count(self, d: int, d_ff: int) -> int:
        """The controller's parameters: d·r + r·d_ff + d_ff; a block of one has none."""
        r = self.sparse.rank_for(d)
        return d * r + r * d_ff + d_ff if self.sparse.sparsity > 1 else 0

    def formula(self) -> str:
        if self.sparse.sparsity == 1:
            return "no controller: a block of one leaves nothing to choose"
        terms = []
        for (d, d_ff), count in self.sizes.items():
            r = self.sparse.rank_for(d)
            terms.append(f"{count}·(d·r + r·d_ff + d_ff) = {count}·({d}·{r} + {r}·{d_ff} + {d_ff})")
        return " + ".join(terms)

    def costs(self, sites: list[FeedForward]) -> Iterator[str]:
        """What a token costs that is decoded by itself."""
        dense = sum(2 * site.width * site.units * (len(site.ports) + 1) for site in sites)
        rows = dense // self.sparse.sparsity
        ranks = [self.sparse.rank_for(site.width) for site in sites] if self.sparse.sparsity > 1 else []
        choice = sum(2 * r * (site.width + site.units) for site, r in zip(sites, ranks, strict=False))
        yield f"one token at a time, the feed-forwards cost {rows + choice:,} FLOPs, not {dense:,}"


class Recorder:
    """Keeps the first `TOKENS` tokens that a module is handed."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def __call__(self, x: Tensor) -> None:
        room = TOKENS - sum(map(len, self.parts))
        self.parts.append(x[:room].cpu().clone())
        if room <= len(x):
            raise Enough

    def tokens(self) -> Tensor | None:
        """(tokens, d); None where there were too few to fit anything on."""
        x = torch.cat(self.parts) if self.parts else torch.empty(0)
        return x if len(x) >= 2 * HELD_OUT else None
