"""The start of the controller: which map of rank r best tells the units of a block that contribute most.

Without data, C1 C2 + c is the reduced-rank regression of the contributions, less their block's mean, on x: the least squared error
at rank r, from the weights alone. With calibration data it is fitted to what the units contribute on it (`contributions.py`), after
they were permuted into blocks that rarely fire together; then it is trained as a classifier (`controller_training.py`). On tokens
left out of the fit each start is measured, the one without data among them, and the best is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.sparse_ffn.balanced_partition import balanced_partition
from retrofit.passes.sparse_ffn.contributions import ContributionMoments, Contributions
from retrofit.passes.sparse_ffn.controller_training import train_controller
from retrofit.passes.sparse_ffn.gate_activation import gate_activation
from retrofit.passes.sparse_ffn.recorded_inputs import spread
from retrofit.sdk import FeedForward, evaluation_mode

SPREAD = 4.0  # of the controller's logits in a block at the start, in standard deviations (benchmarks/sparse_ffn_calibration.py)
SHRINKAGE = 0.1  # of the covariance of x towards the identity
TOKENS = 8192  # whose moments are averaged; the controller is trained on all
HELD_OUT = 8  # one run of tokens in so many is left out of the fit and measured on
RUN = 64  # tokens of a run: neighbours are much the same, so a token would not be new where those beside it were fitted to

Scores = Callable[[Tensor], Tensor]  # x, (tokens, d), to what the units are selected by, (tokens, d_ff)


@dataclasses.dataclass(frozen=True)
class Controller:
    """Which units of each block: those with the largest x C1 C2 + c."""

    c1: Tensor
    c2: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of all units: (tokens, d) to (tokens, d_ff)."""
        return x @ self.c1 @ self.c2 + self.bias

    @staticmethod
    def fit(moments: ContributionMoments, order: Tensor, n: int, rank: int) -> Controller:
        """The reduced-rank regression of the contributions, less the mean of their block, on x; units come in the given order.

        The covariance of x is shrunk towards a multiple of the identity. C1 has orthonormal columns.
        """
        xc, c = (centre_blocks(value[..., order].double(), n) for value in (moments.xc, moments.c))
        root = shrunk_root(moments)
        explained = torch.linalg.solve_triangular(root, xc, upper=False)
        basis = leading_singular_vectors(explained, rank)
        c1, upper = torch.linalg.qr(torch.linalg.solve_triangular(root.t(), basis, upper=True))
        c2 = upper @ basis.t() @ explained
        bias = c - moments.x.double() @ c1 @ c2
        return Controller(c1.float(), c2.float(), bias.float()).spread_out(moments, n)

    def spread_out(self, moments: ContributionMoments, n: int) -> Controller:
        """The same choices, from logits that spread by `SPREAD` in a block: the noise of training is of a fixed size."""
        c1, c2, bias = (one.double() for one in (self.c1, centre_blocks(self.c2, n), centre_blocks(self.bias, n)))
        variance = (c2 * (c1.t() @ moments.xx.double() @ c1 @ c2)).sum(0) + (moments.x.double() @ c1 @ c2 + bias).square()
        scale = float(SPREAD / variance.mean().sqrt().clamp_min(1e-30))
        return Controller(self.c1, scale * self.c2, scale * self.bias)

    def trained(self, contributions: Contributions, x: Tensor, order: Tensor, n: int, moments: ContributionMoments) -> Controller:
        """This one, trained as a classifier on x, (tokens, d), whose moments are given."""
        root, mean = shrunk_root(moments).float(), moments.x
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
        white = torch.addmm(-(inverse @ mean), x.to(mean), inverse.t())
        bias = self.bias + mean @ self.c1 @ self.c2
        c1, c2, bias = train_controller(contributions, x, white, order, n, (root.t() @ self.c1, self.c2, bias))
        c1 = torch.linalg.solve_triangular(root.t(), c1, upper=True)
        return Controller(c1, c2, bias - mean @ c1 @ c2).spread_out(moments, n)


@dataclasses.dataclass(frozen=True)
class Kept:
    """How much of its outputs' energy Σ c_u² a feed-forward keeps with the units selected."""

    of_tokens: float  # the share that a token keeps, averaged over the tokens
    of_all: float  # the share of the sum over all tokens

    @staticmethod
    def measure(contributions: Contributions, x: Tensor, order: Tensor, n: int, k: int, scores: Scores | None = None) -> Kept:
        """With the k units of each block that score highest; without scores those that contribute most. Units come in `order`."""
        tokens = kept = whole = 0.0
        for part, c in contributions.chunks(x):
            energy = c[:, order].square()
            selected = (energy if scores is None else scores(part)).unflatten(1, (-1, n)).topk(k, -1).indices
            of_token = energy.unflatten(1, (-1, n)).gather(-1, selected).sum((1, 2))
            tokens += float((of_token / energy.sum(1).clamp_min(1e-30)).sum())
            kept += float(of_token.sum())
            whole += float(energy.sum())
        return Kept(tokens / len(x), kept / max(whole, 1e-30))

    @property
    def share(self) -> float:
        """The mean of both: neither the few tokens with massive activations nor all the others may be lost."""
        return (self.of_tokens + self.of_all) / 2


@dataclasses.dataclass(frozen=True)
class Start:
    """How a sparse feed-forward begins."""

    controller: Controller | None  # None: the gate
    order: Tensor | None = None  # the dense unit that each unit is; None: unchanged
    finding: dict[str, float] | None = None  # `Kept.share` on the tokens held out, for the report


def fit_start(site: FeedForward, model: nn.Module, n: int, k: int, rank: int | None, x: Tensor | None) -> Start:
    """The controller of a feed-forward, and the order of its units; `x`, (tokens, d), is its input on calibration data.

    k units of each block of n are to be active. `rank` is the controller's; None: the gate selects, and only the order is fitted.
    """
    with evaluation_mode(site.hidden):
        contributions = Contributions(site, model)
        unchanged = torch.arange(site.units, device=contributions.lengths.device)
        of_weights = None
        if rank is not None:
            of_weights = Controller.fit(ContributionMoments.of_standard_normal(contributions), unchanged, n, rank)
        if x is None:
            return Start(of_weights)
        held_out = held_out_tokens(len(x))
        x, held_x = x[~held_out], x[held_out]
        moments, coactivation = ContributionMoments.of_data(contributions, spread(x, TOKENS))
        order = balanced_partition(coactivation, n).flatten()
        starts: list[tuple[Controller | None, Tensor]] = [(of_weights, unchanged)]
        if rank is None:
            starts.append((None, order))
        else:
            regression = Controller.fit(moments, order, n, rank)
            starts.append((regression, order))
            starts.append((regression.trained(contributions, x, order, n, moments), order))
        measured = [
            Kept.measure(contributions, held_x, units, n, k, controller or gate_scores(site, contributions, units))
            for controller, units in starts
        ]
        chosen = max(range(len(starts)), key=lambda index: measured[index].share)  # of equal ones the first, without data
        best = Kept.measure(contributions, held_x, starts[chosen][1], n, k)
    finding = {"kept": measured[chosen].share, "without calibration": measured[0].share, "best choice": best.share}
    return Start(starts[chosen][0], None if chosen == 0 else order, finding)


def gate_scores(site: FeedForward, contributions: Contributions, order: Tensor) -> Scores:
    """|act(x W_gate)| ‖row of W_up‖ ‖row of W_out‖ of the units in the given order."""
    gate, activation = gate_activation(site)
    (up,) = (rows for index, rows in enumerate(contributions.rows) if index != gate)
    rows, offsets, lengths = contributions.rows[gate][order], contributions.offsets[gate][order], up.norm(dim=1)
    lengths = (lengths * contributions.lengths)[order]
    return lambda x: activation(F.linear(x, rows, offsets)).abs() * lengths


def held_out_tokens(count: int) -> Tensor:
    """Which of so many tokens are left out of the fit, in runs drawn at random: (count).

    Not every eighth run: windows of text have lengths that these divide, and the first tokens of all of them, which are the massive
    ones of many models, would be left out.
    """
    run = max(1, min(RUN, count // (4 * HELD_OUT)))
    runs = -(-count // run)
    drawn = torch.randperm(runs, generator=torch.Generator().manual_seed(0))[: -(-runs // HELD_OUT)]
    return torch.zeros(runs, dtype=torch.bool).index_fill(0, drawn, True).repeat_interleave(run)[:count]


def shrunk_root(moments: ContributionMoments) -> Tensor:
    """The lower Cholesky factor of the covariance of x, shrunk towards a multiple of the identity: (d, d), float64."""
    xx = moments.xx.double()
    level = xx.diagonal().mean().clamp_min(1e-30) * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    return torch.linalg.cholesky(torch.lerp(xx, level, SHRINKAGE))


def centre_blocks(values: Tensor, n: int) -> Tensor:
    """Values of units, (…, d_ff), less the mean of their block of n."""
    blocks = values.unflatten(-1, (-1, n))
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


def leading_singular_vectors(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal basis of the `rank` leading left singular vectors of (d, n), by subspace iteration: (d, rank)."""
    kept = min(rank + 8, len(matrix))
    start = torch.randn(matrix.shape[1], kept, generator=torch.Generator().manual_seed(0)).to(matrix)
    basis, _ = torch.linalg.qr(matrix @ start)
    for _ in range(6):
        basis, _ = torch.linalg.qr(matrix @ (matrix.t() @ basis))
    within = basis.t() @ matrix
    return basis @ torch.linalg.eigh(within @ within.t()).eigenvectors.flip(1)[:, :rank]
