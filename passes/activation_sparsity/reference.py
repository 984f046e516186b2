"""Activation sparsity, entry by entry: the reference for the check `method`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, Observed, Problems, SiteCall

SLACK = 0.15  # deviation of a sample's share of zeros from the level that is tolerated


def activation_mask(call: SiteCall) -> Tensor:
    """Return x̃: x if its distance from m reaches τ, else m; with the gradient of x."""
    return masked(call, call.module, call.argument((0, "x")))


def masked_projection(call: SiteCall) -> Tensor:
    """Return layer(x̃)."""
    module: Any = call.module
    x = masked(call, module.mask, call.argument(module.stream_in))
    return call.given("layer", {module.stream_in: x})


def masked(call: SiteCall, mask: Any, x: Tensor) -> Tensor:
    if (mask.centre is not None) != call.options.centre:
        raise Deviation(f"its entries are {'not ' if call.options.centre else ''}measured from a centre")
    m = torch.zeros_like(x) if mask.centre is None else mask.centre.expand_as(x)
    far = ((x - m) ** 2).sqrt() >= mask.threshold
    chosen = far.to(x.dtype) * x + (1 - far.to(x.dtype)) * m
    return chosen.detach() + x - x.detach()


def start(observed: Observed) -> Problems:
    """Check that thresholds are not negative, zero without calibration, and not all zero with it."""
    buffers = {site.path: dict(site.module.named_buffers(recurse=False)) for site in observed.sites}
    thresholds = {path: float(held["threshold"]) for path, held in buffers.items() if "threshold" in held}
    for path, threshold in thresholds.items():
        if threshold < 0:
            yield path, "its threshold is negative"
        if threshold and (observed.options.level == 0 or not observed.is_calibrated):
            yield path, "it has a threshold, and nothing was measured"
    level = observed.options.level
    if thresholds and observed.is_calibrated and level is not None and level >= SLACK and not any(thresholds.values()):
        yield next(iter(thresholds)), "no threshold was fitted"
