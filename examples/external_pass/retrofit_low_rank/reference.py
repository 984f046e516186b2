"""The adapter once more, entry by entry: the reference that the check `method` holds the pass against."""

from __future__ import annotations

import torch
from torch import Tensor

from retrofit.sdk import Observed, Problems, SiteCall


def low_rank_adapter(call: SiteCall) -> Tensor:
    """layer(x) + (α/r) Σ_k (Σ_i x_i A[i,k]) B[k,o]."""
    adapter, options = call.module, call.options
    x = call.argument(adapter.stream_in)
    y = call.given("layer", {adapter.stream_in: x}, 0)
    low = torch.stack([(x * adapter.a[:, k]).sum(-1) for k in range(options.rank)], -1)
    added = sum(low[..., k : k + 1] * adapter.b[k] for k in range(options.rank))
    return y + options.alpha / options.rank * added


def start(observed: Observed) -> Problems:
    """B begins at zero, so that the adapter adds nothing."""
    for site in observed.sites:
        if bool(site.module.b.any()):
            yield site.path, "B does not begin at zero"
