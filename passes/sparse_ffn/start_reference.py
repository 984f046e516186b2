"""What a sparse feed-forward begins with, held against the dense one and against an optimum that is computed here.

Without data the controller is the best map of rank r from x, standard normal, to what the units contribute, |h_u| ‖row u of W_out‖,
less the mean of their block. With x standard normal the slope of that regression is Cov[x, c_u], here by Gauss-Hermite quadrature
in the one or two directions that a unit reads, and the best map of rank r is its truncated singular value decomposition.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.passes.sparse_ffn.reference import Dense, controller_logits, hidden_units, in_blocks, indicator, output
from retrofit.sdk import Enough, Observed, ObservedSite, Problems

CLOSE = {torch.float64: 1e-7, torch.float32: 1e-4}  # of the largest output, by the dtype that the dense model computed it in
COARSE = 5e-2  # the same of half precision
PROBES = 512  # random inputs that a controller is tried on
TOKENS = 512  # of calibration data that a fitted output matrix is tried on
STRENGTHS = (0.01, 0.1, 0.3, 1.0, 3.0)  # λ, of the pull towards the dense output matrix
MOST = 4  # blocks whose regression is solved again, spread evenly over the model
NODES = {1: 64, 2: 40}  # of the quadrature, in each direction
EXPLAINED = 0.9  # of what the best map of that rank explains: the pass estimates the slopes from draws
NEGLIGIBLE = 1e-3  # of the contributions: so little their means differ that the bias says nothing


def start(observed: Observed) -> Problems:
    """With all units active and the dense output matrix it is the dense feed-forward; its controller is the best of its rank.

    On data the controller is better than chance, and an output matrix that was fitted no further from the dense feed-forward than
    the dense one.
    """
    options = observed.options
    advantages: list[tuple[str, float, float]] = []
    compared_on_data = False
    predicted = [site for site in observed.sites if getattr(site.module, "c1", None) is not None]
    solved = {predicted[index * (len(predicted) - 1) // max(1, MOST - 1)].path for index in range(MOST)} if predicted else set()
    for site in observed.sites:
        block: Any = site.module
        known = observed.dense_calls.get(site.dense_path)
        fitted = bool(getattr(block, "fitted", False))
        dense = dense_output(observed, site) if fitted else None
        if known is None or not known[0].shape[-1] == block.width == known[1].shape[-1]:
            observed.not_compared(site.path, "the dense model calls no module there that takes and returns a stream of its width")
        elif fitted and dense is None:
            observed.not_compared(site.path, "its output matrix was fitted, and the dense one is not at hand")
        else:
            x, y = (rows.double() for rows in known)
            apart = float((output(block, hidden_units(block, x)[1], dense).detach() - y).abs().max())
            if apart > CLOSE.get(known[1].dtype, COARSE) * float(y.abs().max()):
                yield site.path, "with all its units active it does not begin as the dense feed-forward"
        if not compared_on_data and options.fits_output:  # the first: its input on the data is what it was fitted on
            compared_on_data = True
            yield from compare_on_data(observed, site, dense)
        if site not in predicted or not site.calls:
            continue
        random = random_rows(block)
        if not bool(logits_of(block, options, random).var(0).any()):
            yield site.path, "its controller selects the same units for all inputs: it was not fitted"
        elif not observed.is_calibrated and site.path in solved:
            yield from ((site.path, problem) for problem in regression_problems(block, options.sparsity))
        advantages.append((site.path, advantage(block, options, random), advantage(block, options, real_rows(site))))
    if advantages and sum(one[1] for one in advantages) <= 0 and sum(one[2] for one in advantages) <= 0:
        yield advantages[0][0], "the controllers begin no better than ones that select at random: they were not fitted"


# ── The output matrix ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def dense_output(observed: Observed, site: ObservedSite) -> Dense | None:
    """W_out and b_out of the dense model, units in the order of the block; None where they are not at hand."""
    block: Any = site.module
    found = {fate.name: (name, fate) for name, fate in observed.fates.items()}
    name, fate = found.get(f"{site.path}.down.weight", ("", None))
    if name not in observed.dense_parameters or fate.layout is None:
        return None
    weight = observed.dense_parameters[name].detach().double()
    rows = (weight.T if fate.layout.transposed else weight)[block.order]
    bias = observed.dense_parameters.get(found.get(f"{site.path}.down.bias", ("", None))[0])
    return rows, None if bias is None else bias.detach().double()


def compare_on_data(observed: Observed, site: ObservedSite, dense: Dense | None) -> Problems:
    """Some calibration tokens by the output matrix and by others: how far is each from the dense feed-forward?

    One that is fitted here, to fewer tokens, must not be nearer; nor must the dense matrix, where another was fitted.
    """
    block, options, rows = site.module, observed.options, list[Tensor]()
    if observed.calibration is None:
        return

    def keep(x: Tensor) -> None:
        rows.append(x[:TOKENS])
        if sum(map(len, rows)) >= TOKENS:
            raise Enough

    observed.calibration.observe(observed.model, {site.path: keep})
    x = torch.cat(rows).double()
    if (share := share_of_fitted(block, options, x, dense)) < 1:
        least = f"one fitted to {3 * len(x) // 4} of its tokens has {share:.2f} of its squared error on others"
        yield site.path, f"its output matrix was not fitted to its calibration data: {least}"
    if dense is None:
        return
    with torch.no_grad():
        z, h = hidden_units(block, x)
        y = output(block, h, dense, with_tail=False)
        lengths = y.square().sum(-1)
        weights = (lengths.median() / lengths.clamp_min(1e-30)).clamp(max=1)
        errors = []
        for one in (None, dense):
            found = output(block, masked(block, options, x, z, h, one), one, with_tail=False)
            errors.append(float((found - y).square().sum(-1) @ weights))
    if not errors[0] < errors[1]:
        worse = f"its error on the calibration data is {(errors[0] / max(errors[1], 1e-30)) ** 0.5:.2f} times that of the dense one"
        yield site.path, f"its output matrix was not fitted to the units that are active: {worse}"


@torch.no_grad()
def share_of_fitted(block: Any, options: Any, x: Tensor, dense: Dense | None) -> float:
    """The squared error on a quarter of these tokens of a matrix fitted to the others, as a part of the block's own.

    The matrix is the minimum of what the fit minimizes, for the λ that is best here. Of four shares the largest is returned: of
    either half of the quarter, tokens weighed by their length or all alike. The block's matrix was fitted to these tokens among
    others, so that one fitted to fewer is not nearer.
    """
    z, h = hidden_units(block, x)
    weight, bias = (block.down.weight.double(), block.down.bias) if dense is None else dense
    a, y = masked(block, options, x, z, h, dense), output(block, h, dense, with_tail=False)
    missed = y - output(block, a, dense, with_tail=False)
    ones = a if bias is None else torch.cat([a, torch.ones_like(a[:, :1])], 1)
    fitted = torch.arange(len(x), device=x.device) < len(x) * 3 // 4
    lengths = y.square().sum(-1).clamp_min(1e-30)
    weights = (lengths.median() / lengths).clamp(max=1)
    weighted = (weights.unsqueeze(1) * ones)[fitted]
    gram, right = weighted.T @ ones[fitted], weighted.T @ missed[fitted]
    size = gram.diagonal()[: h.shape[1]].mean().clamp_min(1e-30) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)

    def errors(by: Dense | None) -> Tensor:
        """The squared errors of the tokens that were not fitted to, with the units that are active by this matrix."""
        return (y - output(block, masked(block, options, x, z, h, by), by, with_tail=False))[~fitted].square().sum(-1)

    own, shares = errors(None), []
    halves = (slice(None, len(own) // 2), slice(len(own) // 2, None))
    counted = [(half, one[half]) for one in (weights[~fitted], torch.ones_like(own)) for half in halves]
    for strength in STRENGTHS:
        change = torch.linalg.solve(gram + strength * size, right)
        left = errors((weight + change[: len(weight)], None if bias is None else bias + change[len(weight)]))
        shares.append(max(float(left[half] @ by / (own[half] @ by).clamp_min(1e-30)) for half, by in counted))
    return min(shares)


def masked(block: Any, options: Any, x: Tensor, z: list[Tensor], h: Tensor, dense: Dense | None) -> Tensor:
    """h with the units that are active in evaluation, where the output matrix is the `dense` one or the block's."""
    if options.controller == "gate":
        logits = in_blocks(controller_logits(block, options, x, z, h, None if dense is None else dense[0]), options.sparsity)
    else:
        logits = logits_of(block, options, x.float()).to(h.dtype)
    mask = indicator(logits, options.active)
    if options.multiply_by_controller:
        mask = mask * logits.softmax(-1)
    return h * mask.flatten(-2) * (math.sqrt(options.sparsity / options.active) if options.scale else 1.0)


# ── Without data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def regression_problems(block: Any, n: int) -> list[str]:
    """What is wrong with a controller as the regression of the units' contributions on standard normal x."""
    means, slopes = standard_normal_moments(block)
    means, slopes = centred(means, n), centred(slopes, n)
    c1, c2, bias = block.c1.double(), centred(block.c2.double(), n), centred(block.bias.double(), n)
    product = ((c1.T @ slopes) * c2).sum()
    square = ((c1.T @ c1) * (c2 @ c2.T)).sum().clamp_min(1e-30)
    most = float(torch.linalg.eigvalsh(slopes @ slopes.T)[-c1.shape[1] :].sum())
    explained = float(product * product.abs() / square) / max(most, 1e-30)
    found = []
    if explained < EXPLAINED:
        found.append(f"its controller explains {explained:.2f} of what the best one of its rank does: it was not fitted")
    elif float(means.norm()) > NEGLIGIBLE * float(slopes.norm()):
        scale = float(product) / max(most, 1e-30)  # the logits may be any multiple of the regression
        if float((bias / scale - means).norm()) > 0.5 * float(means.norm()):
            found.append("its controller's bias is not that of the regression: the units' mean contributions")
    return found


def standard_normal_moments(block: Any) -> tuple[Tensor, Tensor]:
    """E[c] and Cov[x, c] of the units' contributions c for x ~ N(0, 1): (d_ff) and (d, d_ff)."""
    rows, offsets = zip(*(port_rows(block, port) for port in block.ports), strict=True)
    basis: list[Tensor] = []  # of what each unit reads, (d_ff, d) each
    for row in rows:
        rest = row - sum(((row * one).sum(1, keepdim=True) * one for one in basis), torch.zeros_like(row))
        basis.append(rest / rest.norm(dim=1, keepdim=True).clamp_min(1e-12))
    nodes, weight = (one.to(rows[0]) for one in hermite(NODES.get(len(rows), 8)))
    grid = torch.cartesian_prod(*([nodes] * len(rows))).view(-1, len(rows))  # (nodes, directions)
    weight = torch.cartesian_prod(*([weight] * len(rows))).view(-1, len(rows)).prod(1)
    z = [
        offset + sum((grid[:, index, None] * (row * one).sum(1) for index, one in enumerate(basis)), torch.zeros(()).to(row))
        for row, offset in zip(rows, offsets, strict=True)
    ]
    c = block.hidden(*z).abs() * block.down.weight.double().norm(dim=1)  # (nodes, d_ff)
    slopes = sum(((weight * grid[:, index]) @ c * one.T for index, one in enumerate(basis)), torch.zeros(()).to(c))
    return weight @ c, slopes  # type: ignore[return-value]


def hermite(count: int) -> tuple[Tensor, Tensor]:
    """The nodes and weights that integrate over a standard normal variable (Golub and Welsch, 1969)."""
    off = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0].square()


def port_rows(block: Any, port: Any) -> tuple[Tensor, Tensor]:
    """The rows of the matrix that a port reads and their biases, in the order of the units: (d_ff, d) and (d_ff)."""
    matrix = getattr(block, block.roles[port.matrix])
    units = [port.start + port.step * unit for unit in range(block.units)]
    rows = matrix.weight.double()[units]
    return rows, rows.new_zeros(len(rows)) if matrix.bias is None else matrix.bias.double()[units]


def centred(values: Tensor, n: int) -> Tensor:
    """Values of units, (…, d_ff), less the mean of their block of n."""
    blocks = in_blocks(values, n)
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


# ── What it selects ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_rows(block: Any) -> Tensor:
    """Standard normal inputs, (rows, d)."""
    return torch.randn(PROBES, block.width, generator=torch.Generator().manual_seed(0)).to(block.c1.device)


def real_rows(site: ObservedSite) -> Tensor:
    """The inputs of a block in the model's forward, (rows, d)."""
    block: Any = site.module
    (position, keyword), call = block.place, site.calls[0]
    x: Tensor = call.kwargs[keyword] if keyword in call.kwargs else call.args[position]
    return x.detach().reshape(-1, x.shape[-1]).float()


def logits_of(block: Any, options: Any, x: Tensor) -> Tensor:
    """x C1 C2 + c as it is in the model: (rows, blocks, N)."""
    logits = (x @ block.c1.detach().float()) @ block.c2.detach().float() + block.bias.detach().float()
    return in_blocks(logits, options.sparsity)


def advantage(block: Any, options: Any, x: Tensor) -> float:
    """The energy Σ (h_u ‖row u of W_out‖)² of the selected units above their even share, as a part of all."""
    k, n = getattr(options, "active", 1), options.sparsity
    with torch.no_grad():
        _, h = hidden_units(block, x)
        energy = in_blocks((h.float() * block.down.weight.float().norm(dim=1)).square(), n)
        chosen = logits_of(block, options, x).topk(k).indices
        kept = energy.gather(-1, chosen).sum() / energy.sum().clamp_min(1e-30)
    return float(kept) - k / n
