"""The start of the controller: the map of rank r that best predicts which unit of a block contributes most.

C1 C2 + c is the reduced-rank regression of the contributions, less their block's mean, on x: least squared error at rank r. With
calibration data it is fitted to that, after the units were permuted into blocks that rarely fire together; without, to the weights.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from retrofit.passes.sparse_ffn.balanced_partition import balanced_partition
from retrofit.passes.sparse_ffn.contributions import ContributionMoments, Contributions
from retrofit.sdk import Enough, FeedForward, evaluation_mode

SPREAD = 4.0  # of the controller's logits in a block at the start, in standard deviations (benchmarks/sparse_ffn_calibration.py)
SHRINKAGE = 0.5  # of the covariance of x towards the identity (benchmarks/sparse_ffn_calibration.py)
TOKENS = 8192  # that a layer is calibrated on
HELD_OUT = 8  # one token in so many is left out of the fit and measured on


@dataclasses.dataclass(frozen=True)
class Controller:
    """Which unit of each block: the largest of x C1 C2 + c."""

    c1: Tensor
    c2: Tensor
    bias: Tensor

    @staticmethod
    def fit(moments: ContributionMoments, order: Tensor, n: int, rank: int) -> Controller:
        """The reduced-rank regression of the contributions, less the mean of their block, on x; units come in the given order.

        The covariance of x is shrunk towards a multiple of the identity. C1 has orthonormal columns, and the logits are scaled to
        spread by `SPREAD` in a block: the argmax does not depend on it, but the noise of training is of a fixed size.
        """
        xc, c = (centre_blocks(value[..., order].double(), n) for value in (moments.xc, moments.c))
        xx = moments.xx.double()
        level = xx.diagonal().mean().clamp_min(1e-30) * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        root = torch.linalg.cholesky(torch.lerp(xx, level, SHRINKAGE))
        explained = torch.linalg.solve_triangular(root, xc, upper=False)
        basis = leading_singular_vectors(explained, rank)
        c1, upper = torch.linalg.qr(torch.linalg.solve_triangular(root.t(), basis, upper=True))
        c2 = upper @ basis.t() @ explained
        variance = (c2 * (c1.t() @ xx @ c1 @ c2)).sum(0) + c.square()
        scale = SPREAD / variance.mean().sqrt().clamp_min(1e-30)
        bias = c - moments.x.double() @ c1 @ c2
        return Controller(c1.float(), (scale * c2).float(), (scale * bias).float())

    def energy_kept(self, contributions: Contributions, x: Tensor, order: Tensor, n: int) -> tuple[float, float]:
        """The share of the outputs' energy Σ c_u² that the selected units keep, and the share that the best choice would keep."""
        kept = best = whole = 0.0
        for part, c in contributions.chunks(x):
            energy = c[:, order].square().unflatten(1, (-1, n))
            units = (part @ self.c1 @ self.c2 + self.bias).unflatten(1, (-1, n)).argmax(-1, keepdim=True)
            kept += float(energy.gather(-1, units).sum())
            best += float(energy.amax(-1).sum())
            whole += float(energy.sum())
        return kept / max(whole, 1e-30), best / max(whole, 1e-30)


@dataclasses.dataclass(frozen=True)
class Start:
    """How a sparse feed-forward begins."""

    controller: Controller
    order: Tensor | None = None  # the dense unit that each unit is; None: unchanged
    finding: str = ""  # measured on the tokens held out, for the report


def fit_start(site: FeedForward, model: nn.Module, n: int, rank: int, x: Tensor | None) -> Start:
    """The controller of a feed-forward, and the order of its units; `x`, (tokens, d), is its input on calibration data."""
    with evaluation_mode(site.hidden):
        contributions = Contributions(site, model)
        unchanged = torch.arange(site.units, device=contributions.lengths.device)
        of_weights = Controller.fit(ContributionMoments.of_standard_normal(contributions), unchanged, n, rank)
        if x is None:
            return Start(of_weights)
        held_out = torch.arange(len(x)) % HELD_OUT == 0
        moments, coactivation = ContributionMoments.of_data(contributions, x[~held_out])
        order = balanced_partition(coactivation, n).flatten()
        controller = Controller.fit(moments, order, n, rank)
        kept, best = controller.energy_kept(contributions, x[held_out], order, n)
        uncalibrated, _ = of_weights.energy_kept(contributions, x[held_out], unchanged, n)
    finding = f"{kept:.1%} of the outputs' energy kept (without calibration {uncalibrated:.1%}, best choice {best:.1%})"
    return Start(controller, order, finding)


class TokenRecorder:
    """Keeps the first `TOKENS` tokens that a module receives."""

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
