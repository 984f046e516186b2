"""What a multiplicative layer begins with, held against the optimum: the singular value decomposition of each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

SLACK = 1e-4  # of a row's own square: how much more than the least error a fit in single or half precision may have
UNEVEN = 0.02  # how far the lengths of D[i,:] and E[i,:] may lie apart


def fit_problem(d: Tensor, e: Tensor, features: Sequence[int], rows: Tensor) -> str:
    """What is wrong with D (d, S) and E (d, M) as the best fit to the rows of these features in a dense matrix; "" if nothing is.

    Row i as a matrix (S, M) has its best product of two vectors in its largest singular value; both get half its length.
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
