"""The regression of a controller, against least squares on as many draws as it takes."""

from __future__ import annotations

import pytest
import torch

from retrofit.passes.sparse_ffn.contributions import ContributionMoments
from retrofit.passes.sparse_ffn.controller_fit import Controller

D, UNITS, N = 6, 12, 4


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_regression_goes_through_the_means(rank: int) -> None:
    """At the mean of x the logits are the units' mean contributions, less their block's, times one number."""
    generator = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(500, D, generator=generator)
    c = torch.randn(UNITS, generator=generator) + x @ torch.randn(D, UNITS, generator=generator)
    centred_x, centred_c = x - x.mean(0), c - c.mean(0)
    moments = ContributionMoments(x.mean(0), c.mean(0), centred_x.T @ centred_x / len(x), centred_x.T @ centred_c / len(x))
    logits = Controller.fit(moments, torch.arange(UNITS), N, rank)(x.mean(0, keepdim=True))[0].view(-1, N)
    means = c.mean(0).view(-1, N)
    expected = (means - means.mean(1, keepdim=True)).flatten()
    found = (logits - logits.mean(1, keepdim=True)).flatten()
    scale = float(found @ expected / (expected @ expected))
    assert scale > 0
    torch.testing.assert_close(found, scale * expected, rtol=1e-3, atol=1e-3 * float(found.abs().max()))
