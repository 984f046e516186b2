"""The multiplicative dense layer: an input feature has one weight for each module and one for each position in a module.

    y[s,m] = Σ_i x_i D[i,s] E[i,m]        D: [d, S] `d`   E: [d, M] `e`   S modules of size M

Input feature i contributes x_i times the rank-1 matrix D[i,:] ⊗ E[i,:]: a dense layer d → S·M with d·(S + M) weights.

`fit_problem` compares the initial factors with the optimum: the singular value decomposition of each row.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk.modules import cond

FEW = 4  # times the scaled copies of x must fit into the dense matrix to be the cheaper way


class Multiplicative(nn.Module):
    """y[s,m] = Σ_i x_i D[i,s] E[i,m]: (…, d) gives (…, S, M).

    For few tokens x is scaled for each module, which reads d·(S + M) weights; for many the dense matrix is computed once and
    multiplies them all. What either computes beside the same products is d·S numbers a token, or d·S·M in all.
    """

    def __init__(self, width: int, modules: int, size: int, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.d = nn.Parameter(torch.empty(width, modules, device=device, dtype=dtype))
        self.e = nn.Parameter(torch.empty(width, size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw D and E such that y has the variance of a dense layer's output at its usual initialization."""
        width = len(self.d)
        for factor in (self.d, self.e):
            factor.normal_(std=width**-0.25)

    @property
    def modules_and_size(self) -> tuple[int, int]:
        return self.d.shape[1], self.e.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        modules, size = self.modules_and_size
        is_few = FEW * x.numel() <= size * len(self.d)
        return cond(is_few, self.by_modules, self.by_matrix, x, size=(*x.shape[:-1], modules, size))

    def by_modules(self, x: Tensor) -> Tensor:
        return by_modules(x, self.d.to(x.dtype), self.e.to(x.dtype))

    def by_matrix(self, x: Tensor) -> Tensor:
        return (x @ self.matrix().to(x.dtype)).unflatten(-1, self.modules_and_size)

    def matrix(self) -> Tensor:
        """Return the dense matrix of the layer: (d, S·M)."""
        return product(self.d, self.e)

    @torch.no_grad()
    def fit(self, matrix: Tensor) -> None:
        """Fit D and E to the dense `matrix` (d, S·M) by least squares: a rank-1 problem for each input feature.

        Does nothing on the meta device.
        """
        if matrix.is_meta:
            return
        modules, size = self.modules_and_size
        for part in range(0, len(matrix), ROWS):
            rows = matrix[part : part + ROWS].float().unflatten(-1, (modules, size))  # (rows, S, M)
            d, e = nearest_product(rows)
            self.d[part : part + ROWS].copy_(d)
            self.e[part : part + ROWS].copy_(e)

    def extra_repr(self) -> str:
        return f"{len(self.d)}, modules={self.d.shape[1]}, size={self.e.shape[1]}"

    @staticmethod
    def count(width: int, modules: int, size: int) -> int:
        """Return the number of parameters: d²/S + d·S if S·M = d."""
        return width * (modules + size)


def by_modules(x: Tensor, d: Tensor, e: Tensor) -> Tensor:
    """Return y without the dense matrix: (…, d) gives (…, S, M)."""
    return (x.unsqueeze(-2) * d.t()) @ e


def product(d: Tensor, e: Tensor) -> Tensor:
    """Return the dense matrix of the factors D (d, S) and E (d, M): (d, S·M)."""
    return (d.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)


# Fits.

ROWS = 256  # input features fitted at a time


def nearest_product(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and v of equal norm whose product u ⊗ v is nearest to each of the `matrices` (n, S, M): (n, S) and (n, M).

    They are the leading singular vectors (Eckart and Young). That of the shorter side is the last eigenvector of the Gram matrix.
    """
    if matrices.shape[1] > matrices.shape[2]:
        v, u = nearest_product(matrices.mT)
        return u, v
    wide = matrices.double()
    u = torch.linalg.eigh(wide @ wide.mT).eigenvectors[..., -1:]  # (n, S, 1), of length 1
    v = wide.mT @ u  # its length is the singular value
    root = v.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(matrices.dtype).tiny).sqrt()
    return (u * root).squeeze(-1).to(matrices.dtype), (v / root).squeeze(-1).to(matrices.dtype)


def balanced(d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors with the same product, in which each row of D is as long as that of E."""
    tiny = torch.finfo(d.dtype).tiny
    ratio = (d.norm(dim=1, keepdim=True).clamp_min(tiny) / e.norm(dim=1, keepdim=True).clamp_min(tiny)).sqrt()
    return d / ratio, e * ratio


def solve(system: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Return the solution of a positive semi-definite system, or of a batch of them; zero if the system is zero.

    `ridge`, a fraction of the mean of its diagonal, is added to the diagonal.
    """
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    added = ridge * diagonal.mean(-1, keepdim=True) + torch.finfo(system.dtype).tiny
    return torch.linalg.solve(system + torch.diag_embed(added.expand_as(diagonal)), right)


def relative_adam(values: Sequence[Tensor], rate: float, steps: int) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LambdaLR]:
    """Return Adam with a rate relative to the root mean square of each value, and a cosine schedule that decays it to zero."""
    rates = [rate * float(value.detach().float().square().mean().sqrt().clamp_min(1e-12)) for value in values]
    groups = [{"params": [value], "lr": own} for value, own in zip(values, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))


# The check of a fit to the weights alone.

SLACK = 1e-4  # of a row's squared norm: excess over the least error that a fit in single or half precision may have
UNEVEN = 0.02  # allowed relative difference between the lengths of D[i,:] and E[i,:]


def fit_problem(d: Tensor, e: Tensor, features: Sequence[int], rows: Tensor) -> str:
    """Return what is wrong with D (d, S) and E (d, M) as the best fit to the rows of these features in a dense matrix, or "".

    The best rank-1 fit to row i as a matrix (S, M) is its largest singular value with its vectors; D[i,:] and E[i,:] are equally
    long.
    """
    modules, size = d.shape[1], e.shape[1]
    for feature, row in zip(features, rows.double(), strict=True):
        matrix = F.pad(row, (0, modules * size - len(row))).view(modules, size)
        values = torch.linalg.svdvals(matrix)
        total, least = float(values.square().sum()), float(values[1:].square().sum())
        if not total:
            continue
        left, right = d[feature].detach().double(), e[feature].detach().double()
        error = float((matrix - torch.outer(left, right)).square().sum())
        if not error <= least + SLACK * total:
            return f"the fit to input feature {feature} misses {error / total:.4g} of its energy, the best one {least / total:.4g}"
        lengths = float(left.norm()), float(right.norm())
        if abs(lengths[0] / max(lengths[1], 1e-30) - 1) > UNEVEN:
            return f"D and E of input feature {feature} are {lengths[0]:.2g} and {lengths[1]:.2g} long, and should be equally long"
    return ""
