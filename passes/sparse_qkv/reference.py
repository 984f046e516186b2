"""Sparse projections, tap by tap: the reference for the check `method`.

Their initial values are compared with optima that are computed here. A multiplicative layer by itself has an exact optimum. With a
convolution after it, alternating least squares end when no factor alone can be improved: E is the least-squares solution for D and
the filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrofit.passes.multiplicative import UNEVEN, fit_problem
from retrofit.passes.sparse_qkv.sparse_projections import FITTED, FITTED_OUTPUT, NO_OUTPUT
from retrofit.sdk import Deviation, Observed, ObservedSite, Problems, SiteCall

Gates = dict[int, Tensor] | None  # by τ: whether a token may read the one τ tokens earlier, (batch or 1, T)

# ── The projections ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def projected(projection: Any, variant: str, kernel: int, x: Tensor, gates: Gates = None) -> Tensor:
    """Return the concatenated columns of all letters for whole sequences x (batch, T, d)."""
    if variant == "mult":
        parts = [multiplied(getattr(projection, f"mult_{letter}"), x) for letter in projection.strides]
        return torch.cat([part.flatten(-2) for part in parts], -1)
    m = multiplied(projection.mult, x) if variant == "mult-conv" else x.unflatten(-1, (projection.module_count, -1))
    parts = []
    for letter, stride in projection.strides.items():
        convolution = getattr(projection, f"conv_{letter}")
        parts.append(convolved(m, convolution.weight.to(x.dtype), convolution.bias.to(x.dtype), kernel, stride, gates))
    return torch.cat([part.flatten(-2) for part in parts], -1)


def multiplied(product: Any, x: Tensor) -> Tensor:
    """Return y[s,n] = Σ_i x_i D[i,s] E[i,n]: (…, d) to (…, S, M)."""
    d, e = product.d.to(x.dtype), product.e.to(x.dtype)
    return torch.stack([(x * d[:, s]) @ e for s in range(d.shape[1])], -2)


def convolved(m: Tensor, weight: Tensor, bias: Tensor, kernel: int, stride: int, gates: Gates) -> Tensor:
    """Return y[t,s,n] = b[n] + Σ_τ g[t,τ] Σ_o Σ_m m[t−τ, r·s+o−⌊F/2⌋, m] W[o,τ,m,n], zeros outside."""
    tokens, modules = m.shape[1], m.shape[2]
    y = [bias.expand(*m.shape[:2], -1) for _ in range(modules // stride)]
    for tau in range(kernel):
        for o in range(kernel):
            for s in range(modules // stride):
                source = stride * s + o - kernel // 2
                if not 0 <= source < modules or tau >= tokens:
                    continue
                seen = m[:, : tokens - tau, source]  # of tokens τ, τ+1, …
                if gates is not None and tau:
                    seen = seen * gates[tau][:, tau:, None].to(seen)
                y[s] = y[s] + F.pad(seen @ weight[o, tau], (0, 0, tau, 0))
    return torch.stack(y, 2)


# ── Modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sparse_attention(call: SiteCall) -> Tensor:
    """Return the output of the attention called with [Q|K|V] instead of x, and its sparse output projection if there is one."""
    module: Any = call.module
    options = call.options
    x = call.argument(module.stream_in)
    stream = x.transpose(0, 1) if module.tokens_first else x
    before = earlier_tokens(call, "stream")
    call.kept["stream"] = stream
    tokens, total = stream.shape[1], sum(part.shape[1] for part in (*before, stream))
    is_shown = not module.cross and module.mask is not None  # an attention without a mask does not know the padding
    real = unpadded(call, total, len(stream)) if is_shown else None
    if real is not None:
        call.irrelevant = ~real[:, -tokens:]
    gates = gates_of(call, options.kernel, real, tokens, total) if is_shown else None
    packed = x
    if module.sparse is not None:
        columns = with_earlier(module.sparse, options.variant, options.kernel, before, stream, gates)
        packed = torch.cat([columns, stream], -1) if module.appends_stream else columns
        packed = packed.transpose(0, 1) if module.tokens_first else packed
    same = {key: packed for key, value in (*enumerate(call.args), *call.kwargs.items()) if value is x}
    others = None if module.cross else same
    y = call.given("layer", {module.stream_in: packed, **visible_source(call, module)}, module.out_key, others)
    if module.output is None:
        return y
    y = y.transpose(0, 1) if module.tokens_first else y
    earlier = earlier_tokens(call, "output")
    call.kept["output"] = y
    z = with_earlier(module.output.sparse, options.output, options.kernel, earlier, y, gates)
    z = z if module.output.bias is None else z + module.output.bias
    return z.transpose(0, 1) if module.tokens_first else z


def visible_source(call: SiteCall, module: Any) -> dict[Any, Tensor]:
    """Return the source of cross-attention by its argument, with zeros at padding, so that no convolution reads it.

    Returns {} without a mask.
    """
    if not module.cross or module.source_in is None or module.mask is None or call.before:
        return {}
    source, mask = call.argument(module.source_in, None), call.argument(module.mask, None)
    if not isinstance(source, Tensor) or not isinstance(mask, Tensor):
        return {}
    batch, tokens = (source.transpose(0, 1) if module.tokens_first else source).shape[:2]
    inputs = {name: value for name, value in call.inputs.items() if not name.startswith("decoder_")}
    found = [value for name, value in inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]
    kept = next((value for value in found if value.shape == (batch, tokens)), None)
    if kept is None and not found and (seen := shown(mask, module.true_hides)) is not None and seen.shape[-1] == tokens:
        kept = seen.any(1)
    if kept is None:
        return {}
    kept = (kept.T if module.tokens_first else kept).bool().unsqueeze(-1).to(source)
    return {module.source_in: source * kept}


def earlier_tokens(call: SiteCall, name: str) -> list[Tensor]:
    """Return what earlier calls stored under `name`, for the tokens that stayed in their sequences.

    If tokens were removed, the rows end together, after zeros.
    """
    if not any(past.staying is not None for past in call.before):
        return [past.kept[name] for past in call.before]
    rows = [
        torch.cat(
            [past.kept[name][row] if past.staying is None else past.kept[name][row][past.staying[row]] for past in call.before]
        )
        for row in range(len(call.before[0].kept[name]))
    ]
    most = max(map(len, rows))
    return [torch.stack([torch.nn.functional.pad(row, (0, 0, most - len(row), 0)) for row in rows])]


def with_earlier(projection: Any, variant: str, kernel: int, before: list[Tensor], x: Tensor, gates: Gates) -> Tensor:
    """Return the projection of x, the last tokens of a sequence that starts with `before`."""
    some = torch.cat([*before, x], 1)[:, -(x.shape[1] + kernel - 1) :]
    return projected(projection, variant, kernel, some, gates)[:, -x.shape[1] :]


def gates_of(call: SiteCall, kernel: int, real: Tensor | None, tokens: int, total: int) -> Gates:
    """Return the gates that hide earlier tokens: padding (`real` marks the others), or what the attention's mask hides by query and
    key.

    They are those of the last `tokens` of `total`, and of the F−1 tokens before them.
    """
    module: Any = call.module
    mask = call.argument(module.mask, None)
    pairs = shown(mask, module.true_hides) if isinstance(mask, Tensor) and mask.dim() == 4 else None
    if pairs is not None and (pairs.shape[1] != tokens or pairs.shape[2] > total):
        pairs = None  # the same for every query, or with positions of future tokens: a mask of padding
    if pairs is not None and not given_masks(call):
        real = None  # it was derived from the same mask
    if real is None and pairs is None:
        return None
    some = min(total, tokens + kernel - 1)
    gates = {}
    for tau in range(1, kernel):
        columns = []
        for t in range(total - some, total):
            query, seen = t - (total - tokens), torch.ones(1, dtype=torch.bool)
            if real is not None and t >= tau:
                seen = seen.to(real.device) & real[:, t - tau]
            if pairs is not None and query >= 0:
                key = pairs.shape[2] - total + t - tau  # before the first: it has left a window
                seen = seen.to(pairs.device) & (pairs[:, query, key] if key >= 0 else t < tau)
            columns.append(seen)
        rows = max(map(len, columns))
        gates[tau] = torch.stack([column.expand(rows) for column in columns], 1)
    return gates


def unpadded(call: SiteCall, tokens: int, batch: int) -> Tensor | None:
    """Return which tokens are no padding, (batch, tokens), by the model's `attention_mask`; None if all are, or nothing shows it.

    A model without one, or with one for more tokens than the stream's, may make its own mask: then the mask that its attention
    receives is used.
    """
    named = given_masks(call)
    for value in named:
        if value.shape == (batch, tokens):
            return None if bool(value.all()) else value.bool()
    module: Any = call.module
    mask = None if module.mask is None else call.argument(module.mask, None)
    if not isinstance(mask, Tensor) or not all(value.dim() == 2 and value.shape[1] > tokens for value in named):
        return None
    seen = shown(mask, module.true_hides)
    if seen is None or seen.shape[-1] != tokens:
        return None
    real = seen.diagonal(dim1=1, dim2=2) if seen.shape[1] == tokens else seen[:, -1]
    return None if bool(real.all()) else real.expand(batch, -1)


def given_masks(call: SiteCall) -> list[Tensor]:
    """Return the masks among the inputs of the model."""
    return [value for name, value in call.inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]


def shown(mask: Tensor, true_hides: bool) -> Tensor | None:
    """Return which keys each query may see, (batch or 1, queries or 1, keys); None for a mask of another layout."""
    if mask.dim() not in (2, 4):
        return None
    values = mask[:, None] if mask.dim() == 2 else mask[:, 0]
    if values.is_floating_point() and (mask.dim() == 4 or true_hides):
        return (values > -1e4) & ((values < 0.5) | (mask.dim() == 4))  # a bias, or ones for hidden keys
    return (values == 0) if true_hides else (values != 0)


def column_projection(call: SiteCall) -> Tensor:
    """Return the columns from `start` on, or those computed here, in the order of the dense projection, plus the dense bias."""
    module: Any = call.module
    x = call.args[0]
    if module.sparse is None:
        y = x[..., module.start : module.start + module.width]
    else:
        y = x.transpose(0, 1) if module.tokens_first else x
        y = projected(module.sparse, call.options.variant, call.options.kernel, y)
        y = y.transpose(0, 1) if module.tokens_first else y
    if module.order is not None:
        y = torch.stack([y[..., int(column)] for column in module.order], -1)
    return y if module.bias is None else y + module.bias


def sparse_output(call: SiteCall) -> Tensor:
    """Return a sparse projection of the attention's output, plus the dense bias."""
    module: Any = call.module
    y = projected(module.sparse, call.options.output, call.options.kernel, call.args[0])
    return y if module.bias is None else y + module.bias


def identity(call: SiteCall) -> Tensor:
    value: Tensor = call.args[0]
    return value


def stream_slice(call: SiteCall) -> Tensor:
    """Return the output of the module inside the attention for the columns of the stream."""
    module: Any = call.module
    x = call.argument(module.stream_in)
    if module.start >= x.shape[-1]:
        raise Deviation(f"the stream would begin at column {module.start} of {x.shape[-1]}")
    return call.given("reader", {module.stream_in: x[..., module.start :]}, 0)


# ── The start ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

LEAST = 0.6  # least ⟨Ŵ, W⟩ / ‖Ŵ‖² of a fit (1 but for the small number of rows)
CALIBRATED = 0.1  # the same for a fit on calibration data, in which the rows have other weights
SOLVED, NEARLY = 2e-3, 0.05  # of a target's square: by how much another E, or another D, may improve a fit
NO_PLAIN_MATRIX = "no module of the dense model multiplies by its matrix alone"


@dataclasses.dataclass(frozen=True)
class Part:
    """The columns of one letter, and the dense projection that they replace."""

    site: ObservedSite
    sparse: Any  # computes them
    kind: str  # mult-conv, mult, conv
    letter: str
    columns: slice  # among the columns of `sparse`
    dense: list[int]  # their positions in the dense projection


def start(observed: Observed) -> Problems:
    """Check that every projection was fitted to the dense one, with its columns in the same order."""
    by_sparse: dict[int, list[Part]] = {}
    owners: dict[tuple[int, ...], Part] = {}
    for part in parts(observed):
        if part.site.dense_path not in observed.dense.probes:
            observed.not_compared(part.site.path, NO_PLAIN_MATRIX)
        elif why := dropped_before(part, observed) or given_later(part, owners):
            observed.not_compared(part.site.path, why)
        elif observed.is_calibrated and part.letter == "v" and observed.options.output == "none":
            observed.not_compared(part.site.path, "calibrated values may do the work of the output layer too")
        else:
            yield from agreement_problems(part, observed)
            shared = part.sparse.mult if part.kind == "mult-conv" else part.sparse
            by_sparse.setdefault(id(shared), []).append(part)
    for same in by_sparse.values():
        yield from fit_problems(same, observed)


def dropped_before(part: Part, observed: Observed) -> str:
    """Return why an earlier pass dropped the dense projection's matrix, so that the fit was to another; "" if none did."""
    fate = observed.dense.fates.get(f"{part.site.dense_path}.weight")
    return fate.why if fate is not None and fate.kind == "dropped" and fate.why not in (FITTED, FITTED_OUTPUT, NO_OUTPUT) else ""


def given_later(part: Part, owners: dict[tuple[int, ...], Part]) -> str:
    """Return whose parameters a later pass shares with the sparse module; "" for its own. `owners` has the parts so far."""
    first = owners.setdefault(tuple(map(id, part.sparse.parameters())), part)
    return "" if first.sparse is part.sparse else f"it shares the matrices of {first.site.path}"


def parts(observed: Observed) -> Iterator[Part]:
    """Yield the parts that replace dense projections."""
    by_path = {site.path: site for site in observed.sites}
    for site in observed.sites:
        module: Any = site.module
        if not hasattr(module, "sparse") or hasattr(module, "cross"):
            continue
        if not hasattr(module, "start"):
            yield Part(replaced_output(site, observed), module.sparse, observed.options.output, "out", slice(None), [])
            continue
        sparse = module.sparse
        if sparse is None:
            owner = next(
                (
                    by_path[parent]
                    for parent in parents(site.path)
                    if parent in by_path and hasattr(by_path[parent].module, "cross")
                ),
                None,
            )
            if owner is None:
                continue
            sparse = owner.module.sparse
        order = list(range(module.width)) if module.order is None else module.order.tolist()
        place = [order.index(column) for column in range(module.width)]  # position in the dense projection of each of these columns
        first = 0
        for letter, stride in sparse.strides.items():  # type: ignore[union-attr]
            columns = slice(first, first + sparse.module_count // stride * sparse.size)  # type: ignore[union-attr,operator]
            first = columns.stop
            if module.start <= columns.start and columns.stop <= module.start + module.width:
                dense = place[columns.start - module.start : columns.stop - module.start]
                yield Part(site, sparse, observed.options.variant, letter, columns, dense)


def replaced_output(site: ObservedSite, observed: Observed) -> ObservedSite:
    """Return the site of a sparse output layer with the path of the dense one.

    Outside the attention's code the sparse layer is a child of the wrapper.
    """
    owner = next(
        (other for other in observed.sites if other.path == site.path.rpartition(".")[0] and hasattr(other.module, "cross")), None
    )
    inside = [
        other
        for other in observed.sites
        if owner is not None and other.path.startswith(f"{owner.path}.") and hasattr(other.module, "biased")
    ]
    return dataclasses.replace(site, dense_path=inside[0].dense_path) if len(inside) == 1 else site


def agreement_problems(part: Part, observed: Observed) -> Problems:
    """Check that a least-squares fit Ŵ has the best scale, ⟨Ŵ, W⟩ = ‖Ŵ‖²: on random rows, or with data on the model's activations.

    A fit to data may be far too long along inputs that the data do not contain.
    """
    probes = observed.dense.probes[part.site.dense_path]
    rows = [probes, observed.dense.products[part.site.dense_path]] if observed.is_calibrated else [probes]
    least = CALIBRATED if observed.is_calibrated else LEAST
    found = [agreement(part, observed, *row) for row in rows]
    if not any(least <= length <= 1 / least for length in found):
        ratio = f"along {part.letter} the dense projection is {' or '.join(f'{length:.2g}' for length in found)} times as long"
        yield part.site.path, f"{ratio}: it was not fitted, or its columns lie otherwise"


def agreement(part: Part, observed: Observed, x: Tensor, y: Tensor) -> float:
    """Return ⟨Ŵ, W⟩ / ‖Ŵ‖² on rows x, for which the dense projection returns y."""
    x, y = x.double(), y.double()
    y = y if part.letter == "out" else y[..., part.dense]
    found = projected(part.sparse, part.kind, observed.options.kernel, x.unsqueeze(1)).detach().squeeze(1)[..., part.columns]
    return float((found * y).sum() / found.square().sum().clamp_min(1e-30))


def fit_problems(same: list[Part], observed: Observed) -> Problems:
    """Check, without data, that projections with a shared multiplicative layer have the best fit to the weights."""
    first = same[0]
    rows = [observed.dense.features[part.site.dense_path] for part in same]
    if observed.is_calibrated or len({tuple(features) for features, _ in rows}) > 1:
        return
    features, letters = rows[0][0], {part.letter for part in same}
    targets = [
        matrix.double() if part.letter == "out" else matrix.double()[:, part.dense]
        for part, (_, matrix) in zip(same, rows, strict=True)
    ]
    if first.kind == "mult":
        for part, target in zip(same, targets, strict=True):
            product = getattr(part.sparse, f"mult_{part.letter}")
            problem = fit_problem(product.d, product.e, features, target)
            if problem:
                yield part.site.path, f"{part.letter}: {problem}"
        return
    for part in same:
        filters = getattr(part.sparse, f"conv_{part.letter}")
        if bool(filters.weight[:, 1:].any()) or bool(filters.bias.any()):
            yield part.site.path, f"the filters of {part.letter} do not begin at zero for earlier tokens, or their bias does not"
            return
    if first.kind == "mult-conv" and letters == set.union(*(set(part.sparse.strides) for part in same)):
        problem = factor_problem(same, features, targets)
        if problem:
            yield first.site.path, problem


def factor_problem(same: list[Part], features: list[int], targets: list[Tensor]) -> str:
    """Return what is wrong with D and E of a layer before convolutions: given all else, neither can be much better."""
    product = same[0].sparse.mult
    d, e = product.d.detach().double(), product.e.detach().double()
    better = {"E": 0.0, "D": 0.0}
    total = 0.0
    for index, feature in enumerate(features):
        target = torch.cat([matrix[index] for matrix in targets])
        directions = {
            "E": d[feature].view(1, -1, 1) * torch.eye(e.shape[1], dtype=d.dtype).unsqueeze(1).to(d.device),  # (M, S, M)
            "D": torch.eye(d.shape[1], dtype=d.dtype).unsqueeze(2).to(d.device) * e[feature].view(1, 1, -1),  # (S, S, M)
        }
        for name, m in directions.items():
            reached = torch.cat([columns_of(part, m) for part in same], -1)  # (unknowns, columns)
            own = (e if name == "E" else d)[feature] @ reached
            best = (
                torch.linalg.lstsq(reached.T.cpu(), target.unsqueeze(1).cpu(), driver="gelsd").solution.squeeze(1).to(reached)
                @ reached
            )
            better[name] += float((target - own).square().sum() - (target - best).square().sum())
        total += float(target.square().sum())
        lengths = float(d[feature].norm()), float(e[feature].norm())
        if abs(lengths[0] / max(lengths[1], 1e-30) - 1) > UNEVEN and max(lengths) > 1e-12:
            return f"D and E of input feature {feature} are {lengths[0]:.2g} and {lengths[1]:.2g} long, and should be equally long"
    for name, slack in (("E", SOLVED), ("D", NEARLY)):
        if better[name] > slack * total:
            return (
                f"another {name} misses {better[name] / total:.2g} of the dense projections' energy less: it was not fitted to them"
            )
    return ""


def columns_of(part: Part, m: Tensor) -> Tensor:
    """Return the output of a part's convolution for m, (rows, S, M), without earlier tokens: (rows, columns)."""
    filters = getattr(part.sparse, f"conv_{part.letter}")
    weight = filters.weight.detach().double()
    found = convolved(
        m.unsqueeze(1), weight, weight.new_zeros(weight.shape[-1]), len(weight), part.sparse.strides[part.letter], None
    )
    return found.squeeze(1).flatten(-2)


def parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path
