"""What sparse projections begin with, held against optima that are computed here: of the check `method`.

A multiplicative layer by itself has an exact optimum. Where a convolution follows, alternating least squares ends where no factor
alone can be bettered: E is the least-squares solution for D and the filters, which were solved for before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from retrofit.passes.multiplicative import UNEVEN, fit_problem
from retrofit.passes.sparse_qkv.reference import convolved, projected
from retrofit.passes.sparse_qkv.sparse_projections import FITTED, FITTED_OUTPUT, NO_OUTPUT
from retrofit.sdk import Observed, ObservedSite, Problems

LEAST = 0.6  # of a fit's own square: its product with what it is fitted to (1 but for the few rows they are tried on)
CALIBRATED = 0.1  # the same of a fit on calibration data, where the rows it is tried on count less or more than in the data
SOLVED, NEARLY = 2e-3, 0.05  # of a target's square: by how much another E, or another D, may better a fit
NO_PLAIN_MATRIX = "no module of the dense model multiplies by its matrix alone"


@dataclasses.dataclass(frozen=True)
class Part:
    """The columns of one letter, and the dense projection that they replace."""

    site: ObservedSite
    sparse: Any  # that computes them
    kind: str  # mult-conv, mult, conv
    letter: str
    columns: slice  # among those of `sparse`
    dense: list[int]  # their places in the dense projection


def start(observed: Observed) -> Problems:
    """Every projection was fitted to the dense one, and its columns are in the same order."""
    by_sparse: dict[int, list[Part]] = {}
    owners: dict[tuple[int, ...], Part] = {}
    for part in parts(observed):
        if part.site.dense_path not in observed.dense_probes:
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
    """Why an earlier pass dropped the matrix of the dense projection, "" where none did: then another one was fitted to."""
    fate = observed.fates.get(f"{part.site.dense_path}.weight")
    return fate.why if fate is not None and fate.kind == "dropped" and fate.why not in (FITTED, FITTED_OUTPUT, NO_OUTPUT) else ""


def given_later(part: Part, owners: dict[tuple[int, ...], Part]) -> str:
    """Whose parameters a later pass gave to the sparse modules, "" where they have their own; `owners` holds the parts so far."""
    first = owners.setdefault(tuple(map(id, part.sparse.parameters())), part)
    return "" if first.sparse is part.sparse else f"it shares the matrices of {first.site.path}"


def parts(observed: Observed) -> Iterator[Part]:
    """Yield what was a dense projection and is a sparse one now."""
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
        place = [order.index(column) for column in range(module.width)]  # in the dense projection, of each of its columns
        first = 0
        for letter, stride in sparse.strides.items():  # type: ignore[union-attr]
            columns = slice(first, first + sparse.module_count // stride * sparse.size)  # type: ignore[union-attr,operator]
            first = columns.stop
            if module.start <= columns.start and columns.stop <= module.start + module.width:
                dense = place[columns.start - module.start : columns.stop - module.start]
                yield Part(site, sparse, observed.options.variant, letter, columns, dense)


def replaced_output(site: ObservedSite, observed: Observed) -> ObservedSite:
    """Return the site of a sparse output layer in the dense one's place; outside the attention's code it is the wrapper's child."""
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
    """The scale of a least-squares fit Ŵ is the best one, ⟨Ŵ, W⟩ = ‖Ŵ‖²: on random rows, or where data count on rows of a model.

    What is fitted to data may be far too long along inputs that the data do not have.
    """
    probes = observed.dense_probes[part.site.dense_path]
    rows = [probes, observed.dense_products[part.site.dense_path]] if observed.is_calibrated else [probes]
    least = CALIBRATED if observed.is_calibrated else LEAST
    found = [agreement(part, observed, *row) for row in rows]
    if not any(least <= length <= 1 / least for length in found):
        ratio = f"along {part.letter} the dense projection is {' or '.join(f'{length:.2g}' for length in found)} times as long"
        yield part.site.path, f"{ratio}: it was not fitted, or its columns lie otherwise"


def agreement(part: Part, observed: Observed, x: Tensor, y: Tensor) -> float:
    """⟨Ŵ, W⟩ / ‖Ŵ‖² on rows x, of which the dense projection makes y."""
    x, y = x.double(), y.double()
    y = y if part.letter == "out" else y[..., part.dense]
    found = projected(part.sparse, part.kind, observed.options.kernel, x.unsqueeze(1)).detach().squeeze(1)[..., part.columns]
    return float((found * y).sum() / found.square().sum().clamp_min(1e-30))


def fit_problems(same: list[Part], observed: Observed) -> Problems:
    """Of projections that share a multiplicative layer: the fit to the weights is the best one. Not with data."""
    first = same[0]
    rows = [observed.dense_rows[part.site.dense_path] for part in same]
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
    """Return what is wrong with D and E of a layer before convolutions: given all others, neither can be much better."""
    product = same[0].sparse.mult
    d, e = product.d.detach().double(), product.e.detach().double()
    better = {"E": 0.0, "D": 0.0}
    total = 0.0
    for index, feature in enumerate(features):
        target = torch.cat([one[index] for one in targets])
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
    """Return what the convolution of a part makes of m, (rows, S, M), where no earlier token counts: (rows, columns)."""
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
