"""Fits of sparse projections: by least squares to the dense weights, and on calibration data to the attention's outputs.

Without earlier tokens, the multiplicative layer and the convolutions multiply by the dense matrices Ŵ_j[i,s,n] = Σ_o D[i,
r·s+o−⌊F/2⌋] (E[i,:] C_j[o])[n], where C_j[o] = W_j[o,0] are the taps of the token itself. The fit minimizes

    Σ_j tr (W_j − Ŵ_j)ᵀ A (W_j − Ŵ_j)        A: the second moments of x on calibration data, the identity without

Given two of D, E and C, the third is a linear least-squares problem; for D and E it is one of S or M unknowns for each input
feature. With A = I alternating least squares solve them in turn, and each solution lowers the error. With calibration data L-BFGS
continues from there under A, which couples the features. The taps of earlier tokens are zero, because the dense model reads none.

With calibration data the sparse attention is then fitted to the dense attention's outputs for the same arguments. The projections
can be near the dense ones while the outputs are far apart, most of all without the output layer. So the dense attention's calls are
recorded, and the sparse attention is called with the same arguments. Of the fit to the weights and those to data, the one with the
nearest outputs on held-out windows is chosen. Gradient descent on other windows continues from it; its result is kept if the
held-out error falls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from retrofit.passes.multiplicative import Multiplicative, balanced, nearest_product, relative_adam, solve
from retrofit.passes.sparse_qkv.modular_projection import ModularConvolution, ModularProjection, neighbours
from retrofit.sdk.data import RecordedCall, evaluation_mode, float_tensors, set_aside, token_weights, weighted_error

SWEEPS = 12  # of alternating least squares (benchmarks/sparse_qkv_start.py)
STEPS = 40  # of L-BFGS
HISTORY = 20  # of its steps
RIDGE = 1e-5  # added to the diagonal of a system, as a fraction of the diagonal's mean
ROWS = 256  # input features in one solve
TOKENS = 8192  # in the average of the second moments

Targets = Mapping[str, Tensor]  # by letter: (d, S/r, N)


class SecondMoments:
    """The weighted sum of x xᵀ over rows, a watcher for `Calibration.observe`; the weights limit the influence of long rows."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.weight = 0.0

    def __call__(self, rows: Tensor) -> None:
        rows, weights = rows.float(), token_weights(rows)
        products = (rows * weights.unsqueeze(1)).t() @ rows
        self.total = set_aside(products) if self.total is None else self.total.add_(products)
        self.weight += float(weights.sum())

    def mean(self) -> Tensor | None:
        return None if self.total is None else set_aside(self.total / self.weight)


def joined(projections: Sequence[ModularProjection]) -> ModularProjection:
    """Return projections that share a multiplicative layer as one projection with the same layers; fitting it fits them all."""
    first = projections[0]
    strides = {letter: stride for projection in projections for letter, stride in projection.strides.items()}
    like = torch.empty(0, device="meta")
    whole = ModularProjection(first.variant, first.width, first.module_count, first.size, strides, first.kernel, like)
    for projection in projections:
        for name, layer in projection.named_children():
            setattr(whole, name, layer)
    return whole


def fit(projection: ModularProjection, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Fit `projection` to the dense `weights`, (d, columns) by letter; return the relative error of each.

    On the meta device it does nothing and returns no errors.
    """
    if any(weight.is_meta for weight in weights.values()):
        return {}
    targets = targets_of(projection, weights)
    with torch.no_grad():
        if projection.variant == "mult":
            for letter, weight in weights.items():
                multiplicative(projection, letter).fit(weight)
        else:
            alternate(projection, targets)
        return relative_errors(dense_matrices(projection), targets, None)


def fit_to_data(
    projection: ModularProjection, weights: Mapping[str, Tensor], moments: Tensor, held_out: Tensor
) -> tuple[dict[str, float], dict[str, float]]:
    """Fit `projection`, fitted to the weights, under `moments`; keep the fit with the lower error under `held_out`.

    Returns the relative error of each letter under `held_out` for the fit to the weights, and for the fit that is kept.
    """
    parameters, targets = list(projection.parameters()), targets_of(projection, weights)
    plain = copies_of(parameters)
    with torch.no_grad():
        before = relative_errors(dense_matrices(projection), targets, held_out)
    descend(projection, targets, moments)
    with torch.no_grad():
        after = relative_errors(dense_matrices(projection), targets, held_out)
    if sum(error**2 for error in after.values()) < sum(error**2 for error in before.values()):
        return before, after
    put(parameters, plain)
    return before, before


def targets_of(projection: ModularProjection, weights: Mapping[str, Tensor]) -> Targets:
    return {letter: weight.float().unflatten(-1, (-1, projection.size)) for letter, weight in weights.items()}


def multiplicative(projection: ModularProjection, letter: str) -> Multiplicative:
    found = projection.get_submodule(f"mult_{letter}")
    assert isinstance(found, Multiplicative)
    return found


def convolution(projection: ModularProjection, letter: str) -> ModularConvolution:
    found = projection.get_submodule(f"conv_{letter}")
    assert isinstance(found, ModularConvolution)
    return found


def dense_matrices(projection: ModularProjection) -> dict[str, Tensor]:
    """Return the projection's dense matrix without earlier tokens, by letter: (d, S/r, N)."""
    if projection.variant == "mult":
        products = {letter: multiplicative(projection, letter) for letter in projection.strides}
        return {letter: product.matrix().float().unflatten(-1, product.modules_and_size) for letter, product in products.items()}
    d, e = factors(projection)
    m, kernel = d.unsqueeze(-1) * e.unsqueeze(-2), projection.kernel
    inputs = {stride: neighbours(m, kernel, stride) for stride in set(projection.strides.values())}
    taps = {letter: convolution(projection, letter).weight[:, 0].float() for letter in projection.strides}
    return {letter: inputs[stride] @ taps[letter].flatten(0, 1) for letter, stride in projection.strides.items()}


def factors(projection: ModularProjection) -> tuple[Tensor, Tensor]:
    """Return D and E; without a multiplicative layer, those that split x into modules."""
    if projection.variant == "mult-conv":
        return projection.mult.d.float(), projection.mult.e.float()
    device = next(projection.parameters()).device
    feature, size = torch.arange(projection.width, device=device), projection.width // projection.module_count
    d = torch.nn.functional.one_hot(feature // size, projection.module_count)
    return d.float(), torch.nn.functional.one_hot(feature % size, size).float()


def relative_errors(found: Targets, targets: Targets, moments: Tensor | None) -> dict[str, float]:
    """Return the error of each letter relative to its target, in the norm of `moments`."""
    return {letter: distance(found[letter], target, moments) for letter, target in targets.items()}


def distance(found: Tensor, target: Tensor, moments: Tensor | None) -> float:
    return float(length((found - target).flatten(1), moments) / length(target.flatten(1), moments))


def length(matrix: Tensor, moments: Tensor | None) -> Tensor:
    """Return the root of tr Mᵀ A M."""
    return matrix.norm() if moments is None else (matrix * (moments @ matrix)).sum().clamp_min(0).sqrt()


# ── Without data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def alternate(projection: ModularProjection, targets: Targets) -> None:
    """Solve for the taps, D and E in turn, each by least squares given the others."""
    kernel, strides = projection.kernel, projection.strides
    d, e = factors(projection)
    identity = torch.eye(projection.module_count, device=d.device).unsqueeze(-1)
    reach = {letter: neighbours(identity, kernel, stride).permute(2, 0, 1) for letter, stride in strides.items()}  # (F, S, S/r)
    taps: dict[str, Tensor] = {}
    if projection.variant == "conv":
        taps = {letter: best_taps(d, e, reach[letter], target) for letter, target in targets.items()}
    else:
        widest = max(targets, key=lambda letter: targets[letter].shape[1])
        d, e = nearest_product(targets[widest])
        for _ in range(SWEEPS):
            taps = {letter: best_taps(d, e, reach[letter], target) for letter, target in targets.items()}
            d = torch.cat([best_d(e[rows], reach, taps, targets, rows) for rows in chunks(len(d))])
            e = torch.cat([best_e(d[rows], reach, taps, targets, rows) for rows in chunks(len(d))])
            d, e = balanced(d, e)
        projection.mult.d.copy_(d)
        projection.mult.e.copy_(e)
    for letter, tap in taps.items():
        weight = convolution(projection, letter).weight
        weight.zero_()
        weight[:, 0].copy_(tap)


def chunks(count: int) -> list[slice]:
    return [slice(first, first + ROWS) for first in range(0, count, ROWS)]


def best_taps(d: Tensor, e: Tensor, reach: Tensor, target: Tensor) -> Tensor:
    """Return the taps C[o] for D and E: (F, M, N)."""
    kernel, size = len(reach), e.shape[1]
    spread = torch.einsum("osg,is->iog", reach, d)  # (d, F, S/r)
    gram = torch.einsum("iog,ipg->opi", spread, spread)
    system = torch.stack([torch.stack([(e * pair.unsqueeze(-1)).t() @ e for pair in row]) for row in gram])  # (F, F, M, M)
    right = torch.stack([e.t() @ torch.einsum("ig,ign->in", spread[:, o], target) for o in range(kernel)])  # (F, M, N)
    square = system.transpose(1, 2).reshape(kernel * size, kernel * size)
    return solve(square, right.flatten(0, 1), RIDGE).unflatten(0, (kernel, size))


def best_d(e: Tensor, reach: Targets, taps: Targets, targets: Targets, rows: slice) -> Tensor:
    """Return D of the input features `rows` for E and C: (rows, S)."""
    modules = next(iter(reach.values())).shape[1]
    system, right = e.new_zeros(len(e), modules, modules), e.new_zeros(len(e), modules)
    for letter, tap in taps.items():
        read = torch.einsum("im,omn->ion", e, tap)  # (rows, F, N)
        gram = torch.einsum("ion,ipn->iop", read, read)
        overlap = torch.einsum("osg,ptg->opst", reach[letter], reach[letter])
        system += torch.einsum("iop,opst->ist", gram, overlap)
        right += torch.einsum("osg,iog->is", reach[letter], torch.einsum("ign,ion->iog", targets[letter][rows], read))
    return solve(system, right, RIDGE)


def best_e(d: Tensor, reach: Targets, taps: Targets, targets: Targets, rows: slice) -> Tensor:
    """Return E of the input features `rows` for D and C: (rows, M)."""
    size = next(iter(taps.values())).shape[1]
    system, right = d.new_zeros(len(d), size, size), d.new_zeros(len(d), size)
    for letter, tap in taps.items():
        spread = torch.einsum("osg,is->iog", reach[letter], d)
        gram = torch.einsum("iog,ipg->iop", spread, spread)
        overlap = torch.einsum("omn,pkn->opmk", tap, tap)
        system += torch.einsum("iop,opmk->imk", gram, overlap)
        right += torch.einsum("ion,omn->im", torch.einsum("iog,ign->ion", spread, targets[letter][rows]), tap)
    return solve(system, right, RIDGE)


# ── With data ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.enable_grad()
def descend(projection: ModularProjection, targets: Targets, moments: Tensor) -> None:
    """Lower the error under `moments` by L-BFGS; its gradient by a matrix is 2 A (Ŵ − W)."""
    names = [name for name, _ in projection.named_parameters() if not name.endswith("bias")]
    parameters = [projection.get_parameter(name) for name in names]
    values = [parameter.detach().float().clone().requires_grad_() for parameter in parameters]
    total = sum(float(length(target.flatten(1), moments)) ** 2 for target in targets.values())
    optimizer = torch.optim.LBFGS(values, max_iter=STEPS, history_size=HISTORY, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = dense_matrices_with(projection, dict(zip(names, values, strict=True)))
        value = torch.zeros((), device=moments.device)
        for letter, target in targets.items():
            rest = (found[letter] - target).flatten(1)
            weighted = moments @ rest.detach()
            value += (rest.detach() * weighted).sum() / total
            rest.backward(2 * weighted / total, retain_graph=True)
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    put(parameters, values)


def dense_matrices_with(projection: ModularProjection, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `dense_matrices` with other values for the parameters."""
    return torch.func.functional_call(
        DenseMatrices(projection), {f"projection.{name}": value for name, value in values.items()}, ()
    )


class DenseMatrices(torch.nn.Module):
    """`dense_matrices` of a projection as a module's forward."""

    def __init__(self, projection: ModularProjection) -> None:
        super().__init__()
        self.projection = projection

    def forward(self) -> dict[str, Tensor]:
        return dense_matrices(self.projection)


OUTPUT_STEPS = 40  # of Adam
RATE = 0.03  # of Adam, relative to a parameter's root mean square; falls to zero along a cosine

Values = list[Tensor]  # of the parameters of an attention's sparse layers


@dataclasses.dataclass(frozen=True)
class DenseAttention:
    """The calls of an attention in the dense model, on windows for fitting and on held-out windows."""

    path: str  # of the module that contains the attention and its output layer
    fitted: Sequence[RecordedCall]
    held_out: Sequence[RecordedCall]

    def is_repeatable(self, module: nn.Module) -> bool:
        """Return whether the calls return a stream, and `module`, the dense one, returns the same if called by itself."""
        calls = [*self.fitted, *self.held_out]
        returns_stream = all(any(tensor.dim() == 3 for tensor in float_tensors(call.output)) for call in calls)
        return bool(self.fitted and self.held_out) and returns_stream and calls[0].is_repeatable(module)

    def error(self, module: nn.Module) -> float:
        """Return the relative error of the module's outputs on the held-out windows."""
        with evaluation_mode(module), torch.no_grad():
            found, dense = (torch.cat(rows) for rows in zip(*(results(call, module) for call in self.held_out), strict=True))
            return float(weighted_error(found, dense))


def scope_of(attention: str, out: str | None) -> str:
    """Return the path of the innermost module that contains both modules; "" for the model."""
    if out is None:
        return attention
    common = []
    for step, other in zip(attention.split("."), out.split("."), strict=False):
        if step != other:
            break
        common.append(step)
    return ".".join(common)


def results(call: RecordedCall, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the outputs of the module and of the dense one for the same arguments, without padding: (tokens, d) each."""
    found, dense = (stream_among(output) for output in (call.repeat(module), call.output))
    return call.real(found), call.real(dense)


def stream_among(output: object) -> Tensor:
    """Return the first tensor of shape (batch, tokens, d) in a module's output."""
    return next(tensor for tensor in float_tensors(output) if tensor.dim() == 3)


def fit_results(
    module: nn.Module, parameters: Sequence[nn.Parameter], dense: DenseAttention, starts: Sequence[Values]
) -> tuple[float, float]:
    """Set the parameters to the values with the least error of the module; return the error of the first start and the least.

    The first of the `starts` is the one without data.
    """
    errors = []
    for values in starts:
        put(parameters, values)
        errors.append(dense.error(module))
    candidates = [*starts]
    put(parameters, candidates[errors.index(min(errors))])
    descend_by_calls(module, parameters, dense.fitted)
    candidates.append(copies_of(parameters))
    errors.append(dense.error(module))
    best = errors.index(min(errors))
    put(parameters, candidates[best])
    return errors[0], errors[best]


def copies_of(parameters: Sequence[nn.Parameter]) -> Values:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def put(parameters: Sequence[nn.Parameter], values: Values) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.enable_grad()
def descend_by_calls(module: nn.Module, parameters: Sequence[nn.Parameter], calls: Sequence[RecordedCall]) -> None:
    """Take `OUTPUT_STEPS` steps of Adam, one call each, on the relative error of the module's outputs."""
    trained = [parameter for parameter in parameters if parameter.dim() > 1]  # the convolutions' biases stay at zero
    optimizer, schedule = relative_adam(trained, RATE, OUTPUT_STEPS)
    with evaluation_mode(module):
        for step in range(OUTPUT_STEPS):
            error = weighted_error(*results(calls[step % len(calls)], module))
            if not error.requires_grad:
                return
            gradients = torch.autograd.grad(error, trained, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            schedule.step()
    for parameter in trained:
        parameter.grad = None
