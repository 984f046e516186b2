"""What the check `method` says of projections that were fitted: to weights, to data, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from retrofit.passes.sparse_qkv.modular_projection import ModularProjection
from retrofit.passes.sparse_qkv.start_reference import Part, agreement_problems

LOUD, WIDTH = 4, 16  # the input features that the model's activations have, of all


def problems(fitted: Tensor, dense: Tensor, *, calibrated: bool) -> list[Any]:
    """What is wrong with a projection by `fitted`, (d, columns), in the place of `dense`."""
    sparse = ModularProjection("mult", WIDTH, 1, WIDTH, {"q": 1}, 1, torch.empty(0))
    with torch.no_grad():  # one module: D E is any matrix
        sparse.mult_q.d.fill_(1.0)
        sparse.mult_q.e.copy_(fitted)
    generator = torch.Generator().manual_seed(0)
    anywhere, activations = torch.randn(8, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)
    activations[:, LOUD:] = 0
    observed: Any = SimpleNamespace(
        options=SimpleNamespace(kernel=1),
        dense_probes={"q": (anywhere, anywhere @ dense)},
        dense_products={"q": (activations, activations @ dense)},
        is_calibrated=calibrated,
    )
    site: Any = SimpleNamespace(path="q", dense_path="q")
    part = Part(site, sparse, "mult", "q", slice(0, WIDTH), list(range(WIDTH)))
    return list(agreement_problems(part, observed))


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_fit_to_data_is_held_against_the_dense_projection_on_data(calibrated: bool) -> None:
    dense = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    fitted = 20 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
    fitted[:LOUD] = 0.9 * dense[:LOUD]  # right for the data, and far too long along what they do not have
    assert bool(problems(fitted, dense, calibrated=calibrated)) is not calibrated
    assert problems(fitted.roll(WIDTH // 2, 1), dense, calibrated=calibrated)  # columns that lie otherwise
    assert not problems(0.9 * dense, dense, calibrated=calibrated)
