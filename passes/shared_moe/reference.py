"""The mixture of experts, token by token: the reference for the check `method`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, Observed, ObservedSite, Problems, SiteCall, spread_problem
from retrofit.sdk.data import preserve_attribute


def moe_block(call: SiteCall) -> Tensor:
    """Return Σ_i g(x)_i e_i(x), with noise, capacity and balance loss in training."""
    block: Any = call.module
    moe, options = block.moe, call.options
    x = call.argument(block.place)
    tokens = x.reshape(-1, x.shape[-1])
    logits = torch.stack([tokens @ row for row in moe.router.weight], -1)
    noise = 1 / options.experts if options.noise is None else options.noise
    if call.training and noise:
        drawn = call.draw("randn_like", "normal_", "randn", shape=logits.shape)
        if drawn.numel() >= 64 and not 0.5 < float(drawn.std()) < 1.5:
            raise Deviation("its noise is not normal")
        logits = logits + noise * drawn
    experts, slices = options.experts, options.slices or 1
    capacity = math.inf
    if call.training and options.capacity is not None:
        capacity = math.ceil(options.capacity * options.chosen * len(tokens) / experts - 1e-9)
    y = torch.zeros_like(tokens)
    lost = tokens.new_zeros(())
    for first in range(0, experts * slices, experts):  # each slice has its own router
        routed = logits[:, first : first + experts]
        odds = (routed - routed.detach().amax(-1, keepdim=True)).exp()
        probabilities = odds / odds.sum(-1, keepdim=True)
        chosen = [sorted(range(experts), key=lambda e, row=row: -float(row[e]))[: options.chosen] for row in probabilities]  # type: ignore[misc]
        if call.training and options.balance:
            lost = lost + options.balance * balance_loss(probabilities, chosen)
        taken = [0] * experts
        results = [expert(block, first + e, tokens) for e in range(experts)]
        rows = []
        for number, (row, picked) in enumerate(zip(probabilities, chosen, strict=True)):
            whole = row[picked].detach() if options.slices else row[picked].sum() if options.renormalize else 1.0
            part = torch.zeros_like(tokens[0])
            for e in picked:
                taken[e] += 1
                if taken[e] <= capacity:  # excess tokens only take the residual connection
                    part = part + (row[e] / whole) * results[e][number]
            rows.append(part)
        y = y + torch.stack(rows)
    if call.training and options.balance:
        call.losses.append(lost)
    y = y.view(x.shape)
    return y if block.tail is None else block.tail(y)  # type: ignore[no-any-return]


def balance_loss(probabilities: Tensor, chosen: list[list[int]]) -> Tensor:
    """Return E Σ_i m_i P_i: m_i is the number of dispatches to expert i per token, P_i its mean probability."""
    count, experts = probabilities.shape
    total = probabilities.new_zeros(())
    for e in range(experts):
        dispatched = sum(e in experts_of_token for experts_of_token in chosen) / count
        total = total + dispatched * probabilities[:, e].mean()
    return experts * total


def expert(block: Any, e: int, x: Tensor) -> Tensor:
    """Return e_i(x), (tokens, d): the dense feed-forward's formula with the matrices of expert i."""
    moe = block.moe
    units = moe.down.weight.shape[2]
    z = []
    for name in moe.into:
        matrices = getattr(moe, name)
        result = x @ matrices.weight[e].double().T
        z.append(result if matrices.bias is None else result + matrices.bias[e])
    ports = [z[port.matrix][:, [port.start + port.step * unit for unit in range(units)]] for port in moe.ports]
    h = block.hidden(*ports)
    y: Tensor = h @ moe.down.weight[e].double().T
    return y if moe.down.bias is None else y + moe.down.bias[e]


# ── The model as a whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def wiring(observed: Observed) -> Problems:
    """Check that the model's loss in training contains the balance losses of all routings."""
    mixtures = list({id(site.module.moe): site.module.moe for site in observed.sites if site.calls}.values())
    if not observed.options.balance or not mixtures:
        return
    total = observed.training_loss()
    if total is None:
        return
    recorded = observed.recorded_losses()
    with preserve_attribute("balance", mixtures):
        for moe in mixtures:
            moe.balance = 0.0  # type: ignore[union-attr,assignment]
        base = observed.training_loss()
    assert base is not None
    if abs(total - base - recorded) > 1e-2 * recorded + 1e-5 * abs(base):
        yield "", f"the balance losses sum to {recorded:.4g}, and add {total - base:.4g} to the model's own loss"


def groups_of(observed: Observed) -> list[list[ObservedSite]]:
    """Return the blocks that share a mixture, in order of depth."""
    groups: dict[int, list[ObservedSite]] = {}
    for site in observed.sites:
        if site.calls:
            groups.setdefault(id(site.module.moe), []).append(site)
    return list(groups.values())


def start(observed: Observed) -> Problems:
    """Check that experts start as feed-forwards of their group, spread evenly over its depth.

    The router must have a standard deviation of 0.02.
    """
    named = iter(named_sources(observed.options.sources))
    for group in groups_of(observed):
        moe: Any = group[0].module.moe
        weight = moe.router.weight.detach().float()
        fitted = observed.is_calibrated and len(group) > 1  # the router distinguishes the layers of the group
        if not fitted:
            yield from ((group[0].path, problem) for problem in spread_problem("the router", weight, 0.02))
        sources = next(named, None) if len(group) > 1 else None
        if not observed.options.reinit:
            yield from expert_start(group, sources, observed)


def named_sources(text: str) -> list[list[int]]:
    """Return the layers that the option names for each group of several, as in 0+2/1+3; none if experts are spread evenly."""
    found = [[int(source) for source in group.split("+") if source.isdecimal()] for group in text.split("/")]
    return [group for group in found if group]


def expert_start(group: list[ObservedSite], sources: list[int] | None, observed: Observed) -> Problems:
    """Check that expert e equals the feed-forward named by `sources`, or that at depth ⌊(e + ½) n / E⌋ of the group's n."""
    experts, slices = observed.options.experts, observed.options.slices or 1
    for e, depth in enumerate(sources or [int((e + 0.5) * len(group) / experts) for e in range(experts)]):
        source = group[depth]
        block: Any = source.module
        known = observed.dense_stream(source.path, source.dense_path, block.width)
        if known is None:
            continue
        x, y, rounding = known
        found = sum(expert(block, first + e, x).detach() for first in range(0, experts * slices, experts))
        found = found if block.tail is None else block.tail(found)
        if float((found - y).abs().max()) > rounding:
            yield source.path, f"expert {e} does not begin as this layer's feed-forward"
