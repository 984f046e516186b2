"""The fit of a mixture that replaces several feed-forwards, on calibration data: which of them become experts, and the router.

Let y_j(x) be the output of feed-forward j of the group. For a mixture of experts j_1 … j_E with gates g(x) the squared error of
layer l's output is

    ‖y_l(x) − Σ_e g_e(x) y_{j_e}(x)‖² = ‖y_l‖² − 2 Σ_e g_e ⟨y_{j_e}, y_l⟩ + Σ_{e,f} g_e g_f ⟨y_{j_e}, y_{j_f}⟩

so only the inner products of a token, n × n for n layers, are needed. They are divided by the layer's energy and weighted so that
tokens with large outputs do not dominate (`token_weights`): a layer's sum is its relative squared error.

The experts are the E feed-forwards for which, on average over the layers, the best convex combination of two (K = 1: of one) is
nearest to the layer's own output; if E ≥ n all are experts. The router first learns to distinguish the layers by x, then gradient
descent through the gates lowers the error. Of the uncalibrated start and the fits that are worse for no layer, the best on held-out
tokens is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.shared_moe.grouping import Group
from retrofit.passes.shared_moe.mixture_of_experts import ROUTER_SPREAD
from retrofit.sdk import Edit
from retrofit.sdk.anatomy import FeedForward, Matrix, weight_and_bias, weight_out_first
from retrofit.sdk.data import (
    Calibration,
    counted,
    evaluation_mode,
    evenly_spaced,
    groups_in_room,
    set_aside,
    split_calibration,
    token_weights,
)

TOKENS = 8192  # of all layers of a group together
STEPS = 300  # of Adam on the router, half of them to distinguish the layers
RATE = 0.02  # of Adam, for inputs whose features have a root mean square of one
WORSE = 10.0  # weight of the error of a layer in excess of that without calibration
CHUNK = 256  # tokens computed at a time


@dataclasses.dataclass(frozen=True)
class Products:
    """Tokens of all layers of a group, and the inner products of its feed-forwards' outputs for each token."""

    x: Tensor  # (tokens, d)
    layer: Tensor  # (tokens), the layer whose input the token is
    gram: Tensor  # (tokens, n, n), weighted

    @classmethod
    def of(cls, group: Group, inputs: Sequence[Tensor], model: nn.Module) -> Products:
        """Return the products for `inputs`, one tensor (tokens, d) for each layer."""
        grams = [weighted_products(group, layer, x, model) for layer, x in enumerate(inputs)]
        layer = torch.cat([torch.full((len(x),), index) for index, x in enumerate(inputs)]).to(inputs[0].device)
        return cls(torch.cat(list(inputs)).float(), layer, torch.cat(grams))

    @property
    def layers(self) -> int:
        return self.gram.shape[1]

    def errors(self, sources: Tensor, gates: Tensor) -> Tensor:
        """Return the relative squared error of each layer, (n), with the `sources`, (E), as experts and the gates (tokens, E)."""
        gram = self.gram[:, sources][:, :, sources]
        own = self.gram[torch.arange(len(self.layer), device=self.layer.device), self.layer]  # (tokens, n)
        energy = own.gather(1, self.layer.unsqueeze(1)).squeeze(1)
        missed = energy - 2 * (gates * own[:, sources]).sum(1) + torch.einsum("te,tef,tf->t", gates, gram, gates)
        return torch.zeros(self.layers, device=missed.device).index_add(0, self.layer, missed.clamp_min(0))


@torch.no_grad()
def weighted_products(group: Group, layer: int, x: Tensor, model: nn.Module) -> Tensor:
    """Return ⟨y_i, y_j⟩ w_t / Σ_t w_t ‖y_layer‖² for each token of x: (tokens, n, n)."""
    grams, own = [], []
    for part in x.split(CHUNK):
        outputs = torch.stack([compute(site, part, model) for site in group.sites], 1)  # (tokens, n, d)
        grams.append(outputs @ outputs.mT)
        own.append(outputs[:, layer])
    weights, gram = token_weights(torch.cat(own)), torch.cat(grams)
    energy = (gram[:, layer, layer] @ weights).clamp_min(torch.finfo(gram.dtype).tiny)
    return gram * (weights / energy).view(-1, 1, 1)


def compute(site: FeedForward, x: Tensor, model: nn.Module) -> Tensor:
    """Return the outputs of a dense feed-forward, in float32: (tokens, d) to (tokens, d)."""
    return times(site.out, hidden_units(site, x, model), model)


def hidden_units(site: FeedForward, x: Tensor, model: nn.Module) -> Tensor:
    """Return the hidden units of a dense feed-forward, in float32: (tokens, d) to (tokens, units)."""
    units = torch.arange(site.units, device=x.device)
    z = [times(matrix, x.float(), model) for matrix in site.into]
    with evaluation_mode(site.hidden):
        h: Tensor = site.hidden(*(z[port.matrix][:, port.columns(units)] for port in site.ports))
    return h


def times(matrix: Matrix, rows: Tensor, model: nn.Module) -> Tensor:
    """Return the rows times the matrix, plus its bias, in float32."""
    _, bias = weight_and_bias(matrix, model)
    weight = weight_out_first(matrix, model)
    return F.linear(rows, weight.float(), None if bias is None else bias.float())


# ── Experts ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def choose_sources(products: Products, experts: int, k: int) -> list[int]:
    """Return the best `experts` feed-forwards of a larger group, ascending: greedily added, then swapped while that helps."""
    errors = combination_errors(products, k)  # (layers, n, n)

    def total(chosen: Sequence[int]) -> float:
        index = torch.tensor(chosen)
        return float(errors[:, index][:, :, index].flatten(1).amin(1).sum())

    chosen: list[int] = []
    while len(chosen) < experts:
        rest = (layer for layer in range(products.layers) if layer not in chosen)
        chosen.append(min(rest, key=lambda layer: total([*chosen, layer])))
    best = total(chosen)
    improved = True
    while improved:
        improved = False
        for place, other in itertools.product(range(experts), range(products.layers)):
            swapped = [*chosen[:place], other, *chosen[place + 1 :]]
            if other not in chosen and (value := total(swapped)) < best - 1e-9:
                chosen, best, improved = swapped, value, True
    return sorted(chosen)


def combination_errors(products: Products, k: int) -> Tensor:
    """Return the squared error of layer l with the best convex combination of feed-forwards i and j (k = 1: i alone): (l, i, j)."""
    n = products.layers
    grams = torch.zeros(n, n, n, device=products.gram.device).index_add(0, products.layer, products.gram)  # of each layer's tokens
    own = torch.stack([grams[layer, layer] for layer in range(n)])  # ⟨y_i, y_l⟩: (layers, n)
    # With error vectors r_i = y_i − y_l the error of a r_i + (1 − a) r_j is least at a = ⟨r_j, r_j − r_i⟩ / ‖r_j − r_i‖².
    inner = grams - own.unsqueeze(2) - own.unsqueeze(1) + own.diagonal().view(n, 1, 1)  # ⟨r_i, r_j⟩
    alone = inner.diagonal(dim1=1, dim2=2)
    first, second = alone.unsqueeze(2), alone.unsqueeze(1)
    if k == 1:
        return torch.where(torch.eye(n, dtype=torch.bool), first, torch.inf)
    apart = (first + second - 2 * inner).clamp_min(1e-12)
    share = ((second - inner) / apart).clamp(0, 1)
    return share.square() * first + (1 - share).square() * second + 2 * share * (1 - share) * inner


# ── Router ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gates_of(logits: Tensor, k: int, renormalize: bool) -> Tensor:
    """Return the gates of all experts, zero except for the K largest: (tokens, E)."""
    probabilities = logits.softmax(-1)
    kept, selected = probabilities.topk(k, -1)
    if renormalize:
        kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, selected, kept)


@torch.enable_grad()
def fit_router(products: Products, sources: Tensor, start: Tensor, k: int, renormalize: bool, uncalibrated: Tensor) -> Tensor:
    """Return the router, (E, d), after `STEPS` steps from `start`; `uncalibrated`: each layer's squared error without data."""
    weights = token_weights(products.x)
    scale = (weights @ products.x.square() / weights.sum()).sqrt().clamp_min(1e-12)
    x = products.x / scale
    weight = nn.Parameter(start.float() * scale)
    nearest = nearest_experts(products, sources)  # (layers, E)
    optimizer = torch.optim.Adam([weight], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        logits = x @ weight.t()
        if 2 * step < STEPS:
            right = logits.masked_fill(~nearest[products.layer], -torch.inf).logsumexp(-1) - logits.logsumexp(-1)
            loss = -(right @ weights) / weights.sum()
        else:
            errors = products.errors(sources, gates_of(logits, k, renormalize))
            loss = errors.mean() + WORSE * (errors - uncalibrated).clamp_min(0).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return weight.detach() / scale


def nearest_experts(products: Products, sources: Tensor) -> Tensor:
    """Return a mask of the experts whose outputs are nearest to each layer's own: (layers, E)."""
    gates = (F.one_hot(torch.full_like(products.layer, e), len(sources)).float() for e in range(len(sources)))
    errors = torch.stack([products.errors(sources, gate) for gate in gates], 1)
    return errors <= errors.amin(1, keepdim=True) + 1e-6


# ── Both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class MixtureStart:
    """The feed-forward from which each expert is copied, the router, and each layer's relative error on held-out tokens."""

    sources: tuple[int, ...]
    router: Tensor
    before: tuple[float, ...]
    after: tuple[float, ...]


def fit_mixtures(groups: Sequence[Group], edit: Edit, experts: int, k: int, renormalize: bool) -> dict[str, MixtureStart]:
    """Return the start of the mixture of each group of several layers, by the group's name; groups without data are left out."""
    assert edit.calibration is not None
    starts: dict[str, MixtureStart] = {}
    several = [group for group in groups if len(group.sites) > 1]
    fitted, held_out = (record_inputs(several, edit.model, part) for part in split_calibration(edit.calibration, TOKENS))
    for group in counted(several, "fitting mixture", len(several)):
        if not all(site.path in fitted and site.path in held_out for site in group.sites):
            continue
        x, held_x = ([inputs[site.path] for site in group.sites] for inputs in (fitted, held_out))
        router = torch.empty(experts, group.sites[0].width, device=x[0].device).normal_(std=ROUTER_SPREAD)
        bound = group.bound_to(edit.model)
        products, held_products = (Products.of(bound, rows, edit.model) for rows in (x, held_x))
        sources, choose = group.source_indices(experts), not group.chosen
        starts[group.name] = fit_mixture(products, held_products, sources, router, k, renormalize, choose=choose)
    return starts


def record_inputs(groups: Sequence[Group], model: nn.Module, calibration: Calibration) -> dict[str, Tensor]:
    """Return the input of each feed-forward that received tokens, by path: (tokens, d), at most `TOKENS` in a group."""
    sites = [site for group in groups for site in group.sites]
    entries = {site.path: site.entry_path for site in sites}
    most = {site.path: max(1, TOKENS // len(group.sites)) for group in groups for site in group.sites}
    size = max(parameter.element_size() for parameter in model.parameters())
    inputs: dict[str, Tensor] = {}
    for paths in groups_in_room({site.path: size * TOKENS * site.width for site in sites}, model):
        rows: dict[str, list[Tensor]] = {path: [] for path in paths}
        calibration.observe(model, {entries[path]: recorder(parts) for path, parts in rows.items()})
        inputs |= {path: evenly_spaced(torch.cat(parts), most[path]) for path, parts in rows.items() if parts}
    return inputs


def recorder(parts: list[Tensor]) -> Callable[[Tensor], None]:
    """Return a function that appends a copy of its argument to `parts`."""
    return lambda x: parts.append(set_aside(x.clone()))


def fit_mixture(
    fitted: Products, held_out: Products, spread: Sequence[int], router: Tensor, k: int, renormalize: bool, *, choose: bool = True
) -> MixtureStart:
    """Return the best start of a mixture; the uncalibrated start has the sources `spread` and this `router`, (E, d)."""

    def errors(products: Products, sources: Sequence[int], weight: Tensor) -> Tensor:
        gates = gates_of(products.x @ weight.float().t(), k, renormalize)
        return products.errors(torch.tensor(sources), gates)

    plain = errors(fitted, spread, router)
    best = tuple(spread), router
    before = after = errors(held_out, *best)
    chosen = tuple(choose_sources(fitted, len(spread), k)) if choose and len(spread) < fitted.layers else tuple(spread)
    for sources in dict.fromkeys((tuple(spread), chosen)):
        weight = fit_router(fitted, torch.tensor(sources), router, k, renormalize, plain).to(router.dtype)
        found = errors(held_out, sources, weight)
        if bool((found <= before).all()) and float(found.mean()) < float(after.mean()):
            best, after = (sources, weight), found
    return MixtureStart(*best, tuple(before.sqrt().tolist()), tuple(after.sqrt().tolist()))
