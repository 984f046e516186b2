"""The multiplicative head once more, sum by sum: the reference that the check `method` holds the pass `sparse-loss` against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.passes.multiplicative_reference import fit_problem
from retrofit.sdk import Observed, Problems, SiteCall

CALIBRATED = 0.1  # of the own square of a fit on data: its product with what it is fitted to, on rows of one kind or the other


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
    """D and E were fitted to the dense head: to each of its rows as well as can be, without data.

    With data they were fitted to what is predicted on it: then the dense head only lies along Ŵ, ⟨Ŵ, W⟩ near ‖Ŵ‖², on random rows
    or on those that the dense head received. Along inputs that the data do not have the fit may be far too long. A pass before this
    one that widened the head may have divided its rows among the blocks: then they are one multiple of the dense head's.
    """
    for site in observed.sites:
        head: Any = site.module
        known = observed.dense_probes.get(site.dense_path)
        if known is None:
            observed.not_compared(site.path, "no module of the dense model multiplies by its matrix alone")
            continue
        if not observed.is_calibrated:
            features, rows = observed.dense_rows[site.dense_path]
            if len(head.product.d) > known[0].shape[-1]:
                rows = rows * multiple(head, features, rows)
            problem = fit_problem(head.product.d, head.product.e, features, rows)
            if problem:
                yield site.path, problem
            continue
        received = (known, observed.dense_products[site.dense_path])
        agreements = [agreement(head, observed.options.modules, *one) for one in received]
        if not any(CALIBRATED <= one <= 1 / CALIBRATED for one in agreements):
            ratio = " or ".join(f"{one:.2g}" for one in agreements)
            yield site.path, f"the dense head is {ratio} times as long along it: it was not fitted to it"


@torch.no_grad()
def multiple(head: Any, features: list[int], rows: Tensor) -> float:
    """The multiple of the dense head's rows, all of these together, that the fit lies at: ‖Ŵ‖² / ⟨Ŵ, W⟩."""
    d, e = head.product.d[features].double(), head.product.e[features].double()
    found = (d.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)[:, : rows.shape[1]]
    return float(found.square().sum() / (found * rows.double()).sum().clamp_min(1e-30))


@torch.no_grad()
def agreement(head: Any, modules: int, x: Tensor, y: Tensor) -> float:
    """⟨Ŵ, W⟩ / ‖Ŵ‖² on rows x, of which the dense head makes y; a number that all logits of a row have says nothing.

    A head that was widened before reads x in each of its blocks: of these it makes y too, at either exact start of AltUp.
    """
    x = x.repeat(1, -(-len(head.product.d) // x.shape[-1]))[:, : len(head.product.d)]
    bias = 0.0 if head.bias is None else head.bias.detach().double()
    found, y = (z - z.mean(-1, keepdim=True) for z in (logits(head, modules, x.double()) - bias, y.double()))
    return float((found * y).sum() / found.square().sum().clamp_min(1e-30))
