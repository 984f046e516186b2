"""The summed embedding once more, token by token: the reference that the check `method` holds the pass `sum` against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Observed, Problems, SiteCall


def summed_embedding(call: SiteCall) -> Tensor:
    """E[id] + S[id]; nothing for an id that the table has no row for."""
    module: Any = call.module
    ids = call.argument(module.place)
    y = call.given("layer", {module.place: ids}, 0)
    table = module.extra.weight
    rows = [table[id] if id < len(table) else torch.zeros_like(table[0]) for id in ids.flatten().tolist()]
    return y + torch.stack(rows).view(*ids.shape, -1)


def start(observed: Observed) -> Problems:
    """S begins at zero."""
    for site in observed.sites:
        if bool(site.module.extra.weight.any()):  # type: ignore[union-attr,operator]
            yield site.path, "the extra embedding does not begin at zero"
