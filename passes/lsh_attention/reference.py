"""Attention in buckets, query by query: the reference for the check `method`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, Observed, Problems, SiteCall, may_be_chance
from retrofit.sdk.modules import FUSED_ARGUMENTS

HIDDEN = -1e4  # an additive mask below this hides
OWN = -1e5  # the score of a query's own key where queries are keys
CLOSE = 1e-3  # tolerance between float32 and float64, relative to the largest output: large scores round


def bucketed_attention(call: SiteCall) -> Tensor:
    """Return for each query the softmax over the keys it sees: Σ_j softmax_j(scale · q·k_j + mask_j) v_j."""
    module: Any = call.module
    options = call.options
    # torch's attention counts as an operation that draws random numbers, but recorded calls have no dropout
    call.draws = [draw for draw in call.draws if not draw.operation.startswith("_scaled_dot_product")]
    query, key, value, mask, _, is_causal = (call.argument((place, name), None) for place, name in enumerate(FUSED_ARGUMENTS))
    q = query.reshape(len(query), module.heads, -1, query.shape[-1])
    visible, bias = visibility(mask, bool(is_causal), q, key.shape[2])
    first = first_position(mask, bool(is_causal), visible, q.shape[2], key.shape[2])
    scale = q.shape[-1] ** -0.5 if call.kwargs.get("scale") is None else call.kwargs["scale"]
    if len(module.rotations) != options.rounds or 2 * module.rotations.shape[-1] != options.buckets:
        raise Deviation(f"its rotations are {tuple(module.rotations.shape)}")
    rows = []
    for b in range(len(q)):
        for h in range(module.heads):
            k, v = (projected[b, h // (module.heads // projected.shape[1])] for projected in (key, value))
            real = visible[b, h].any(0)
            own, others = buckets_of(q[b, h], module), torch.where(real, buckets_of(k, module), options.buckets)  # (rounds, tokens)
            for i in range(q.shape[2]):
                seen = seen_keys(own[:, i].tolist(), others.tolist(), first + i, module.causal, options)
                allowed = visible[b, h, i].nonzero().flatten().tolist()
                seen = sorted({*seen, *allowed[:1]}) if module.causal else seen
                if module.causal and len(k) > options.chunk:
                    seen = [j for j in seen if j <= first + i]
                kept = [j for j in seen if bool(visible[b, h, i, j])]
                scores = scores_of(q[b, h, i], k, scale, options.share == "queries", first + i)[kept] + bias[b, h, i, kept]
                rows.append(scores.softmax(-1) @ v[kept] if kept else v[min(first + i, len(v) - 1)])
    call.irrelevant = (~visible.any(-1)).reshape(query.shape[:-1])
    return torch.stack(rows).reshape(*query.shape[:-1], value.shape[-1])


def visibility(mask: Tensor | None, is_causal: bool, q: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    """Return the visibility of each key to each query, and the bias of the mask: (batch, heads, n_q, n_k) each."""
    size = (*q.shape[:3], n_k)
    visible, bias = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.float64)
    if mask is not None:
        given = mask if mask.dim() < 4 or mask.shape[1] in (1, size[1]) else mask.reshape(size[0], size[1], -1, n_k)
        visible = (given if given.dtype == torch.bool else given > HIDDEN).expand(size)
        bias = bias if given.dtype == torch.bool else given.expand(size)
    return visible.tril() if is_causal else visible, bias


def first_position(mask: Tensor | None, is_causal: bool, visible: Tensor, n_q: int, n_k: int) -> int:
    """Return the position of the first query among the keys; the queries are the last visible tokens."""
    if mask is None:
        return 0 if is_causal else n_k - n_q
    if n_q == n_k:
        return 0
    return max(j for j in range(n_k) if bool(visible[..., j].any())) - (n_q - 1)


def seen_keys(own: list[int], others: list[list[int]], place: int, causal: bool, options: Any) -> list[int]:
    """Return the keys that a query at `place` sees, from its bucket and the keys' buckets in each round."""
    keys = len(others[0])
    if keys <= options.chunk:
        return list(range(keys))
    found = set(range(max(0, place - options.chunk + 1), place + 1)) if causal else set()
    for bucket, buckets in zip(own, others, strict=True):
        if causal:
            found |= set([j for j in range(place + 1) if buckets[j] == bucket][-options.chunk :])
            continue
        order = sorted(range(keys), key=lambda j: (buckets[j], j))
        before = sum((buckets[j], j) <= (bucket, place) for j in order)
        first = max((before - 1) // options.chunk - 1, 0) * options.chunk
        found |= set(order[first : first + 2 * options.chunk])
    return sorted(found)


def scores_of(q: Tensor, k: Tensor, scale: float, shared: bool, own: int) -> Tensor:
    """Return scale · q·k_j of each key; if queries are keys q·k_j/|k_j|, and `OWN` for the query's own key."""
    if shared:
        is_own = torch.arange(len(k)) == own
        return torch.where(is_own, torch.tensor(OWN, dtype=q.dtype), (k @ q) / k.square().sum(-1).sqrt())
    return scale * (k @ q)


def wiring(observed: Observed) -> Problems:
    """Check that each attention returns the same in float32 without gradients, by a fused kernel, as in float64."""
    for site in observed.sites:
        module: Any = site.module
        for call in site.calls[:1]:
            narrow = {**dict(zip(FUSED_ARGUMENTS, call.args, strict=False)), **call.kwargs, "cache": None}
            wide = {name: value.double() if is_float(value) else value for name, value in narrow.items()}
            if narrow["query"].dtype != torch.float32:
                continue
            if any(not torch.equal(*(buckets_of(value[name], module) for value in (narrow, wide))) for name in ("query", "key")):
                observed.not_compared(site.path, "in float32: a vector is equally near to two buckets")
                continue
            with torch.no_grad():
                found, expected = module(**narrow).double(), module(**wide)
            gap = float((found - expected).abs().max() / expected.abs().max())
            if not gap <= CLOSE:
                yield site.path, f"the outputs in float32 and float64 differ by {gap:.1e} of the largest"


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def buckets_of(x: Tensor, module: Any) -> Tensor:
    """Return argmax [x R; −x R] of each vector in each round: (rounds, …)."""
    y = torch.einsum("...i,rij->r...j", x, module.rotations.to(x.dtype))
    return torch.cat([y, -y], -1).argmax(-1)


def start(observed: Observed) -> Problems:
    """Check that the rotations are standard normal numbers, different for each attention and each round."""
    seen: set[tuple[float, ...]] = set()
    for site in observed.sites:
        module: Any = site.module
        rotations = module.rotations.detach().double()
        for rotation in rotations:
            values = tuple(rotation.flatten().tolist())
            if values in seen:
                yield site.path, "two rounds or attentions have the same rotation"
            seen.add(values)
        spread, count = float(rotations.square().mean().sqrt()), rotations.numel()
        if not may_be_chance(spread, count):
            yield site.path, f"the standard deviation of its rotations is {spread:.2g}, not 1"
