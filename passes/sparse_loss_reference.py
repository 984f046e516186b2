"""The multiplicative head once more, sum by sum: the reference that the check `method` holds the pass `sparse-loss` against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Observed, Problems, SiteCall


def multiplicative_head(call: SiteCall) -> Tensor:
    """logits[s·M + m] = Σ_i x_i D[i,s] E[i,m], the first V of them, plus the bias."""
    head: Any = call.module
    return logits(head, call.options.modules, call.args[0])


def logits(head: Any, modules: int, x: Tensor) -> Tensor:
    d, e = head.product.d.to(x.dtype), head.product.e.to(x.dtype)
    of_modules = [(x * d[:, s]) @ e for s in range(modules)]  # (…, M) each
    found = torch.cat(of_modules, -1)[..., : head.vocabulary]
    return found if head.bias is None else found + head.bias


def start(observed: Observed) -> Problems:
    """D and E are nearer to the dense head than nothing: they were fitted to it."""
    for site in observed.sites:
        head: Any = site.module
        known = observed.dense_probes.get(site.path)
        if known is None:
            continue
        x, y = (rows.double() for rows in known)
        bias = 0.0 if head.bias is None else head.bias.detach().double()
        error = (logits(head, observed.options.modules, x) - bias - y).norm() / y.norm()
        if float(error) >= 1:
            yield site.path, f"its relative error from the dense head is {float(error):.2g}: it was not fitted to it"
