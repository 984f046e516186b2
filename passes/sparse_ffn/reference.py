"""The sparse feed-forward with all units computed, most of them times zero: the reference for the check `method`.

Its initial values are compared with the dense feed-forward and with an optimum that is computed here. Without data the controller
is the best map of rank r from x, standard normal, to the units' contributions, |h_u| ‖row u of W_out‖, minus the mean of their
block. For standard normal x the slope of that regression is Cov[x, c_u], computed here by Gauss-Hermite quadrature in the one or
two directions that a unit reads; the best map of rank r is its truncated singular value decomposition.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, Observed, ObservedSite, Problems, SiteCall, argument_at
from retrofit.sdk.data import Enough

Dense = tuple[Tensor, Tensor | None]  # W_out and b_out of the dense model


def sparse_feed_forward(call: SiteCall) -> Tensor:
    """Return (hidden(x W_in + b_in) ⊙ m) W_out + b_out; m indicates the k units that the controller selects in each block of N."""
    block: Any = call.module
    options = call.options
    x = call.argument(block.place)
    z, h = hidden_units(block, x)
    k, n = options.active, options.sparsity
    if k < n:
        logits = in_blocks(controller_logits(block, options, x, z, h), n)
        mask = training_mask(call, logits, k) if call.training else indicator(logits, k)
        if options.multiply_by_controller:
            mask = mask * logits.softmax(-1)
        h = h * mask.flatten(-2) * (math.sqrt(n / k) if options.scale else 1.0)
    return output(block, h)


def hidden_units(block: Any, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the input of each port of the hidden function, and the hidden units: (…, d_ff) each."""
    results = []
    for role in block.roles:
        matrix = getattr(block, role)
        result = x @ matrix.weight.to(x.dtype).T
        results.append(result if matrix.bias is None else result + matrix.bias)
    z = [results[port.matrix][..., columns(block, port)] for port in block.ports]
    return z, block.hidden(*z)


def columns(block: Any, port: Any) -> list[int]:
    """Return the rows of a port's matrix, which are columns of its result, in the order of the units."""
    return [port.start + port.step * unit for unit in range(block.units)]


def output(block: Any, h: Tensor, dense: Dense | None = None, *, with_tail: bool = True) -> Tensor:
    """Return h W_out + b_out, with the weights of the `dense` model if given, and with its module's further operations."""
    weight, bias = (block.down.weight, block.down.bias) if dense is None else dense
    y = h @ weight.to(h.dtype)
    y = y if bias is None else y + bias
    return y if block.tail is None or not with_tail else block.tail(y)  # type: ignore[no-any-return]


def controller_logits(block: Any, options: Any, x: Tensor, z: list[Tensor], h: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return x C1 C2 + c, or log |act(gate)| ‖row of W_up‖ ‖row of W_out‖; `weight` is W_out if it is not the block's."""
    if options.controller != "gate":
        return (x @ block.c1) @ block.c2 + block.bias  # type: ignore[no-any-return]
    gate = gate_port(block, z)
    ones = [value if number == gate else torch.ones_like(value) for number, value in enumerate(z)]
    activation = block.hidden(*ones)
    port = block.ports[1 - gate]
    rows = getattr(block, block.roles[port.matrix]).weight[columns(block, port)]
    lengths = rows.norm(dim=1) * (block.down.weight if weight is None else weight).norm(dim=1)
    return (activation.abs() * lengths.detach()).clamp_min(1e-20).log()  # type: ignore[no-any-return]


def gate_port(block: Any, z: list[Tensor]) -> int:
    """Return the port in which the hidden function is not linear; if it is linear in both, that of the matrix named gate."""
    with torch.no_grad():
        whole = block.hidden(*z)
        for number in range(2):
            doubled = block.hidden(*(2 * value if number == port else value for port, value in enumerate(z)))
            if not torch.allclose(doubled, 2 * whole):
                return number
    return list(block.roles).index("gate")


def in_blocks(values: Tensor, n: int) -> Tensor:
    """Return the values in blocks, unit u in block u // n: (…, d_ff) to (…, d_ff / n, n)."""
    return values.reshape(*values.shape[:-1], -1, n)


def indicator(logits: Tensor, k: int) -> Tensor:
    """Return 1 where fewer than k units of the block have a larger logit, else 0."""
    larger = (logits.unsqueeze(-2) > logits.unsqueeze(-1)).sum(-1)
    return (larger < k).to(logits.dtype)


def training_mask(call: SiteCall, logits: Tensor, k: int) -> Tensor:
    """Return, for the whole batch, the indicator of the k largest with noise (with probability `hard`), or the relaxation."""
    options, tau = call.options, call.options.temperature
    if options.controller == "gate":
        soft = relaxed(logits / tau, k)
        return indicator(logits, k) + (soft - soft.detach())
    is_hard = float(call.draw("rand")) < options.hard
    if options.noise == "choice" and not is_hard and not call.draws:
        return relaxed(logits, k)
    uniform = call.draw("rand_like", shape=logits.shape)
    is_uniform = 0.25 < float(uniform.mean()) < 0.75 and 0 <= float(uniform.min()) <= float(uniform.max()) <= 1
    if uniform.numel() >= 64 and not is_uniform:
        raise Deviation("its noise is not Gumbel noise")
    noise = -(-uniform.clamp_min(1e-300).log()).log()
    soft = relaxed(logits, k) if options.noise == "choice" else relaxed((logits + noise) / tau, k)
    noisy = logits + (tau if options.noise == "choice" else 1.0) * noise
    return indicator(noisy, k) + (soft - soft.detach()) if is_hard else soft


def relaxed(logits: Tensor, k: int) -> Tensor:
    """Return min(1, e^l / Z), Z such that the units of a block sum to k: the softmax at k = 1."""
    full = torch.zeros_like(logits, dtype=torch.bool)
    for _ in range(k):  # a unit whose share exceeds 1 gets 1, and the others share the rest
        left = k - full.sum(-1, keepdim=True)
        share = left * logits.masked_fill(full, -torch.inf).softmax(-1)
        full = full | (share > 1)
    return torch.where(full, torch.ones_like(share), share)


# ── The start ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

PROBES = 512  # random inputs on which a controller is tried
TOKENS = 512  # of calibration data, on which a fitted output matrix is tried
STRENGTHS = (0.01, 0.1, 0.3, 1.0, 3.0)  # λ, of the pull towards the dense output matrix
MOST = 4  # blocks whose regression is solved again, spread evenly over the model
NODES = {1: 64, 2: 40}  # of the quadrature in each direction, by the number of directions
EXPLAINED = 0.9  # fraction of what the best map of the same rank explains: the pass estimates the slopes from draws
NEGLIGIBLE = 1e-3  # relative to the slopes: if the mean contributions differ by less, the bias is arbitrary


def start(observed: Observed) -> Problems:
    """Check that with all units and the dense output matrix the module is the dense feed-forward, and that the start was fitted.

    Without data the controller must be the best of its rank. With data it must be better than chance, and a fitted output matrix
    nearer to the dense feed-forward than the dense matrix.
    """
    options = observed.options
    advantages: list[tuple[str, float, float]] = []
    compared_on_data = False
    predicted = [site for site in observed.sites if getattr(site.module, "c1", None) is not None]
    solved = {predicted[index * (len(predicted) - 1) // max(1, MOST - 1)].path for index in range(MOST)} if predicted else set()
    for site in observed.sites:
        block: Any = site.module
        known = observed.dense_stream(site.path, site.dense_path, block.width)
        fitted = bool(getattr(block, "fitted", False))
        dense = dense_output(observed, site) if fitted else None
        if known is not None and fitted and dense is None:
            observed.not_compared(site.path, "its output matrix was fitted, and the dense matrix is not available")
        elif known is not None:
            x, y, rounding = known
            if float((output(block, hidden_units(block, x)[1], dense).detach() - y).abs().max()) > rounding:
                yield site.path, "with all its units active it does not begin as the dense feed-forward"
        if not compared_on_data and options.fits_output:  # only the first site gets the inputs on which it was fitted
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
    if advantages and sum(random for _, random, _ in advantages) <= 0 and sum(real for _, _, real in advantages) <= 0:
        yield advantages[0][0], "the controllers begin no better than ones that select at random: they were not fitted"


# ── The output matrix ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def dense_output(observed: Observed, site: ObservedSite) -> Dense | None:
    """Return W_out and b_out of the dense model, units in the block's order; None if they are not available."""
    block: Any = site.module
    found = {fate.name: (name, fate) for name, fate in observed.dense.fates.items()}
    name, fate = found.get(f"{site.path}.down.weight", ("", None))
    if name not in observed.dense.parameters or fate.layout is None:
        return None
    weight = observed.dense.parameters[name].detach().double()
    rows = (weight.T if fate.layout.transposed else weight)[block.order]
    bias = observed.dense.parameters.get(found.get(f"{site.path}.down.bias", ("", None))[0])
    return rows, None if bias is None else bias.detach().double()


def compare_on_data(observed: Observed, site: ObservedSite, dense: Dense | None) -> Problems:
    """Check, on calibration tokens, how far the outputs are from those of the dense feed-forward.

    With a matrix fitted here to fewer tokens they must not be nearer; nor with the dense matrix, if another was fitted.
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
        for matrix in (None, dense):
            found = output(block, masked(block, options, x, z, h, matrix), matrix, with_tail=False)
            errors.append(float((found - y).square().sum(-1) @ weights))
    if not errors[0] < errors[1]:
        worse = f"its error on the calibration data is {(errors[0] / max(errors[1], 1e-30)) ** 0.5:.2f} times that of the dense one"
        yield site.path, f"its output matrix was not fitted to the active units: {worse}"


@torch.no_grad()
def share_of_fitted(block: Any, options: Any, x: Tensor, dense: Dense | None) -> float:
    """Return the squared error of another matrix, fitted to three quarters of these tokens, as a fraction of the block's own.

    It is the minimizer of the fit's objective, for the best λ here. The errors are those on the other quarter; the largest of four
    fractions is returned: for either half of it, with tokens weighted by length or equally. The block's matrix was fitted to these
    tokens among others, so a matrix fitted to fewer is not nearer.
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
        """Return the squared errors on the tokens of the other quarter, with the units that this matrix activates."""
        return (y - output(block, masked(block, options, x, z, h, by), by, with_tail=False))[~fitted].square().sum(-1)

    own, shares = errors(None), []
    halves = (slice(None, len(own) // 2), slice(len(own) // 2, None))
    counted = [(half, by[half]) for by in (weights[~fitted], torch.ones_like(own)) for half in halves]
    for strength in STRENGTHS:
        change = torch.linalg.solve(gram + strength * size, right)
        left = errors((weight + change[: len(weight)], None if bias is None else bias + change[len(weight)]))
        shares.append(max(float(left[half] @ by / (own[half] @ by).clamp_min(1e-30)) for half, by in counted))
    return min(shares)


def masked(block: Any, options: Any, x: Tensor, z: list[Tensor], h: Tensor, dense: Dense | None) -> Tensor:
    """Return h, zero for units that are inactive in evaluation; the output matrix is the `dense` one or the block's."""
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
    """Return the deviations of a controller from the regression of the units' contributions on standard normal x."""
    means, slopes = standard_normal_moments(block)
    means, slopes = centred(means, n), centred(slopes, n)
    c1, c2, bias = block.c1.double(), centred(block.c2.double(), n), centred(block.bias.double(), n)
    product = ((c1.T @ slopes) * c2).sum()
    square = ((c1.T @ c1) * (c2 @ c2.T)).sum().clamp_min(1e-30)
    most = float(torch.linalg.eigvalsh(slopes @ slopes.T)[-c1.shape[1] :].sum())
    explained = float(product * product.abs() / square) / max(most, 1e-30)
    found = []
    if explained < EXPLAINED:
        found.append(f"its controller explains {explained:.2f} of what the best one of its rank explains: it was not fitted")
    elif float(means.norm()) > NEGLIGIBLE * float(slopes.norm()):
        scale = float(product) / max(most, 1e-30)  # the logits may be any multiple of the regression
        if float((bias / scale - means).norm()) > 0.5 * float(means.norm()):
            found.append("its controller's bias is not that of the regression: the units' mean contributions")
    return found


def standard_normal_moments(block: Any) -> tuple[Tensor, Tensor]:
    """Return E[c] and Cov[x, c] of the units' contributions c for x ~ N(0, 1): (d_ff) and (d, d_ff)."""
    rows, offsets = zip(*(port_rows(block, port) for port in block.ports), strict=True)
    basis: list[Tensor] = []  # of what each unit reads, (d_ff, d) each
    for row in rows:
        rest = row - sum(((row * unit).sum(1, keepdim=True) * unit for unit in basis), torch.zeros_like(row))
        basis.append(rest / rest.norm(dim=1, keepdim=True).clamp_min(1e-12))
    nodes, weight = (values.to(rows[0]) for values in hermite(NODES.get(len(rows), 8)))
    grid = torch.cartesian_prod(*([nodes] * len(rows))).view(-1, len(rows))  # (nodes, directions)
    weight = torch.cartesian_prod(*([weight] * len(rows))).view(-1, len(rows)).prod(1)
    z = [
        offset + sum((grid[:, index, None] * (row * unit).sum(1) for index, unit in enumerate(basis)), torch.zeros(()).to(row))
        for row, offset in zip(rows, offsets, strict=True)
    ]
    c = block.hidden(*z).abs() * block.down.weight.double().norm(dim=1)  # (nodes, d_ff)
    slopes = sum(((weight * grid[:, index]) @ c * unit.T for index, unit in enumerate(basis)), torch.zeros(()).to(c))
    return weight @ c, slopes  # type: ignore[return-value]


def hermite(count: int) -> tuple[Tensor, Tensor]:
    """Return `count` nodes and weights of quadrature over a standard normal variable (Golub and Welsch, 1969)."""
    off = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0].square()


def port_rows(block: Any, port: Any) -> tuple[Tensor, Tensor]:
    """Return the rows of the matrix that a port reads and their biases, in the order of the units: (d_ff, d) and (d_ff)."""
    matrix, units = getattr(block, block.roles[port.matrix]), columns(block, port)
    rows = matrix.weight.double()[units]
    return rows, rows.new_zeros(len(rows)) if matrix.bias is None else matrix.bias.double()[units]


def centred(values: Tensor, n: int) -> Tensor:
    """Return values of units, (…, d_ff), minus the mean of their block of n."""
    blocks = in_blocks(values, n)
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


# ── The selected units ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_rows(block: Any) -> Tensor:
    """Return standard normal inputs, (rows, d)."""
    return torch.randn(PROBES, block.width, generator=torch.Generator().manual_seed(0)).to(block.c1.device)


def real_rows(site: ObservedSite) -> Tensor:
    """Return the inputs of a block in the model's forward, (rows, d)."""
    block: Any = site.module
    x: Tensor = argument_at(block.place, site.calls[0].args, site.calls[0].kwargs)
    return x.detach().reshape(-1, x.shape[-1]).float()


def logits_of(block: Any, options: Any, x: Tensor) -> Tensor:
    """Return x C1 C2 + c with the block's parameters: (rows, blocks, N)."""
    logits = (x @ block.c1.detach().float()) @ block.c2.detach().float() + block.bias.detach().float()
    return in_blocks(logits, options.sparsity)


def advantage(block: Any, options: Any, x: Tensor) -> float:
    """Return the share of the selected units in the energy Σ (h_u ‖row u of W_out‖)² of all units, minus their even share k/N."""
    k, n = options.active, options.sparsity
    with torch.no_grad():
        _, h = hidden_units(block, x)
        energy = in_blocks((h.float() * block.down.weight.float().norm(dim=1)).square(), n)
        chosen = logits_of(block, options, x).topk(k).indices
        kept = energy.gather(-1, chosen).sum() / energy.sum().clamp_min(1e-30)
    return float(kept) - k / n
