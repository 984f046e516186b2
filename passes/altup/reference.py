"""AltUp, block by block as in Alg. 1: the reference for the check `method`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.passes.altup.plan import REPEATED
from retrofit.sdk import Deviation, Observed, ObservedSite, Problems, SiteCall, argument_at, item_at

# ── Modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def altup_layer(call: SiteCall) -> Tensor:
    """Return x_new^i = x̂^i + g[i] (layer(x^j) − x̂^j), x̂^i = Σ_m p[i,m] x^m."""
    layer: Any = call.module
    k, d, j = call.options.k, layer.width, layer.active
    x = call.argument(layer.stream_in)
    blocks = [x] * k if layer.expand else list(x.split(d, -1))
    if len(blocks) != k:
        raise Deviation(f"its stream has {len(blocks)} blocks and not K = {k}")
    places = {layer.stream_in: blocks[j]}
    for place, block in layer.narrow:
        value = call.argument(place)
        if value is not None:
            places[place] = value[..., block * d : (block + 1) * d]
    y = call.given("layer", places, layer.stream_out)
    new = {"scalar": scalar, "dense": dense, "dynamic": dynamic}[call.options.coefficients](layer, blocks, j, y)
    if layer.rotate:
        new = new[1:] + new[:1]
    if layer.combine is None:
        return torch.cat(new, -1)
    return sum((weight * block for weight, block in zip(combination(call.options), new, strict=True)), torch.zeros_like(new[0]))


def update(blocks: list[Tensor], j: int, y: Tensor, p: Any, g: Any) -> list[Tensor]:
    """Return the blocks by Alg. 1; each coefficient, p[i][m] or g[i], is a number or has one for each token."""
    k = len(blocks)
    predicted = []
    for i in range(k):
        total = torch.zeros_like(blocks[0])
        for m in range(k):
            total = total + p[i][m] * blocks[m]
        predicted.append(total)
    return [predicted[i] + g[i] * (y - predicted[j]) for i in range(k)]


def scalar(layer: Any, blocks: list[Tensor], j: int, y: Tensor) -> list[Tensor]:
    return update(blocks, j, y, layer.p, layer.g)


def dense(layer: Any, blocks: list[Tensor], j: int, y: Tensor) -> list[Tensor]:
    """Return the blocks by Alg. 2: x̂ = P x, x_new = x̂ + G (x̃ − x̂^j)."""
    k, d = len(blocks), blocks[0].shape[-1]
    p, g = layer.p.view(k, d, k, d), layer.g.view(k, d, d)
    predicted = [torch.stack([blocks[m] @ p[i, :, m].T for m in range(k)]).sum(0) for i in range(k)]
    return [predicted[i] + (y - predicted[j]) @ g[i].T for i in range(k)]


def dynamic(layer: Any, blocks: list[Tensor], j: int, y: Tensor) -> list[Tensor]:
    """Return the blocks by Alg. 1, P from the active block and g from the layer's output: the start plus a linear map of r(v)."""
    k, prediction, correction = len(blocks), layer.prediction_coefs.weight, layer.correction_coefs.weight
    of_block, of_output = routed(layer, blocks[j]), routed(layer, y)
    p = [[layer.base_p[i, m] + (of_block @ prediction[i * k + m]).unsqueeze(-1) for m in range(k)] for i in range(k)]
    g = [layer.base_g[i] + (of_output @ correction[i]).unsqueeze(-1) for i in range(k)]
    return update(blocks, j, y, p, g)


def routed(layer: Any, v: Tensor) -> Tensor:
    """Return r(v) = tanh(router(rms_norm(v) / d))."""
    norm = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.router_norm.weight
    return torch.tanh((norm / layer.width) @ layer.modality_router.weight.T)


def blockwise(call: SiteCall) -> Tensor:
    """Return the output of the dense module for each block."""
    module: Any = call.module
    blocks = call.argument(module.place).split(call.argument(module.place).shape[-1] // call.options.k, -1)
    return torch.cat([call.given("layer", {module.place: block}, 0) for block in blocks], -1)


def replicated(call: SiteCall) -> Tensor:
    """Return the dense module's output K times."""
    named: dict[tuple[int | None, str | None], Any] = {(index, None): value for index, value in enumerate(call.args)}
    named |= {(None, name): value for name, value in call.kwargs.items()}
    tensors = [(place, value) for place, value in named.items() if isinstance(value, Tensor)]
    return torch.cat([call.given("layer", dict(tensors[:1]), 0)] * call.options.k, -1)


def block_scale(call: SiteCall) -> Tensor:
    """Return block i times scale[i]: the learned scale, or the weight with which the block is combined."""
    x, learned = call.args[0], dict(call.module.named_parameters())
    scale = learned.get("scale", combination(call.options))
    d = x.shape[-1] // call.options.k
    return torch.cat([x[..., i * d : (i + 1) * d] * scale[i] for i in range(call.options.k)], -1)


def divide_and_project(call: SiteCall) -> Tensor:
    """Return sub-block i of the extra width e, projected to d."""
    module: Any = call.module
    x, weight = call.args[0], module.weight
    part = call.options.extra // (call.options.k - 1)
    return torch.cat([x[..., i * part : (i + 1) * part] @ weight[i].T for i in range(call.options.k - 1)], -1)


# ── The model as a whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def combination(options: Any) -> list[float]:
    """Return the weights with which the blocks are combined to the dense stream."""
    return [1 / options.k] * options.k if options.init == "lockstep" else [1.0] + [0.0] * (options.k - 1)


def layers_of(observed: Observed) -> list[ObservedSite]:
    return [site for site in observed.sites if hasattr(site.module, "active") and site.calls]


def chains(observed: Observed) -> Iterator[list[ObservedSite]]:
    """Yield sequences of layers in which each receives the previous one's output as its stream."""
    chain: list[ObservedSite] = []
    for site in layers_of(observed):
        if chain and not torch.equal(stream_in(site), stream_out(chain[-1])):
            yield chain
            chain = []
        chain.append(site)
    if chain:
        yield chain


def stream_in(site: ObservedSite) -> Tensor:
    module: Any = site.module
    value: Tensor = argument_at(module.stream_in, site.calls[0].args, site.calls[0].kwargs)
    return value


def stream_out(site: ObservedSite) -> Tensor:
    module: Any = site.module
    value: Tensor = item_at(site.calls[0].output, module.stream_out)
    return value


def is_shared(site: ObservedSite) -> bool:
    return len(site.calls) > 1


def wiring(observed: Observed) -> Problems:
    """Check that layer l computes block l mod K, or each the first, and that the head reverses the projection of the look-up."""
    for site in observed.sites:
        yield from narrowing(site, observed.options)
    k, alternates = observed.options.k, observed.options.selection == "alternating"
    for number, chain in enumerate(chains(observed)):
        for index, site in enumerate(chain):
            expected: Any = 0
            if index and alternates and not is_shared(site):
                expected = (int(chain[index - 1].module.active) + 1) % k  # type: ignore[arg-type]
            elif number and not index and not is_shared(site):
                expected = site.module.active
            if site.module.active != expected:
                yield site.path, f"it works on block {site.module.active}, and the method on block {expected}"
            if site.module.rotate != (is_shared(site) and alternates):
                yield site.path, "its blocks move up by one" if site.module.rotate else "its blocks do not move up by one"
            combine = site.module.combine
            if combine is not None and list(combine) != combination(observed.options):  # type: ignore[arg-type]
                yield site.path, f"it combines its blocks by {combine}, and the method by {combination(observed.options)}"


def narrowing(site: ObservedSite, options: Any) -> Problems:
    """Check that before the head extra block i is projected to sub-block i of the extra width by the transposed matrix i."""
    weight, narrowed = getattr(site.module, "weight", None), getattr(site.module, "before", None)
    if not isinstance(weight, Tensor) or weight.dim() != 3 or narrowed is None:
        return
    d = weight.shape[1]
    x = torch.randn(3, options.k * d, generator=torch.Generator().manual_seed(0)).to(weight)
    expected = torch.cat([x[:, :d], *(x[:, (i + 1) * d : (i + 2) * d] @ weight[i] for i in range(options.k - 1))], -1)
    (found,) = narrowed(site.module, (x,))
    if found.shape != expected.shape or float((found - expected).abs().max()) > 1e-3 * float(expected.abs().max()):
        yield site.path, "before the head it does not narrow the extra blocks by the matrices that projected them"


def start(observed: Observed) -> Problems:
    """Check that coefficients take the dense stream from block j to the next layer's, or keep all blocks equal."""
    options = observed.options
    for chain in chains(observed):
        for index, site in enumerate(chain):
            j = int(site.module.active)  # type: ignore[arg-type]
            if is_shared(site):
                n = 1 % options.k if options.selection == "alternating" else 0
            elif index + 1 < len(chain):
                n = int(chain[index + 1].module.active)  # type: ignore[arg-type]
            elif site.module.combine is None and site is not layers_of(observed)[-1]:
                continue  # no recorded layer receives its stream
            else:
                n = 0
            yield from ((site.path, problem) for problem in start_problems(site.module, options, j, n))
    yield from table_start(observed)


def start_problems(layer: Any, options: Any, j: int, n: int) -> Iterator[str]:
    k, d = options.k, layer.width
    p, g = torch.eye(k), torch.ones(k)
    if options.init == "hop":
        p[j] = torch.eye(k)[n]
        g = torch.eye(k)[n]
    if options.coefficients == "dense":
        p, g = torch.kron(p, torch.eye(d)), torch.kron(g.unsqueeze(-1), torch.eye(d))
    names = ("base_p", "base_g") if options.coefficients == "dynamic" else ("p", "g")
    for name, expected in zip(names, (p, g), strict=True):
        if not torch.equal(getattr(layer, name).detach().cpu().float(), expected):
            yield f"{name} does not begin as init={options.init} sets it"
    if options.coefficients == "dynamic":
        for name in ("prediction_coefs", "correction_coefs"):
            if bool(getattr(layer, name).weight.any()):
                yield f"{name} does not begin at zero"
        spread = float(layer.modality_router.weight.detach().float().std()) / math.sqrt(d)
        if layer.modality_router.weight.numel() >= 32 and not 0.5 < spread < 2:
            yield f"modality_router begins with {spread:.2g} times the spread that gives its results unit variance"


def table_start(observed: Observed) -> Problems:
    """Check that new columns of a token table are noise with the spread of the dense ones (hop), or copies of these (lockstep).

    A parameter that is added to the stream, such as a table of positions, is repeated and not checked.
    """
    widened = {fate.name: fate for fate in observed.dense.fates.values() if fate.kind == "widened"}
    for name, fate in widened.items():
        parameter, owner = observed.model.get_parameter(name), observed.model.get_submodule(name.rpartition(".")[0])
        dim = next((dim for dim, part in enumerate(fate.index) if part != slice(None)), None)
        if dim is None or fate.why == REPEATED or not isinstance(owner, nn.Embedding) or parameter is not owner.weight:
            continue
        table = parameter.detach().float()
        width = fate.index[dim].stop
        dense, rest = table.narrow(dim, 0, width), table.narrow(dim, width, table.shape[dim] - width)
        if observed.options.init == "lockstep":
            if any(not torch.equal(part, dense) for part in rest.split(width, dim)):
                yield name, "its new columns do not begin as copies of the dense ones"
        elif not float(dense.std()):  # a table of equal entries has noise without spread
            continue
        elif any(torch.equal(part, dense) for part in rest.split(width, dim)):
            yield name, "its new columns begin as copies of the dense ones, not as noise"
        elif rest.numel() >= 100 and not 0.5 < float(rest.std()) / max(float(dense.std()), 1e-30) < 2:
            spreads = f"{float(rest.std()):.2g}, the dense ones have {float(dense.std()):.2g}"
            yield name, f"its new columns begin with a spread of {spreads}"
