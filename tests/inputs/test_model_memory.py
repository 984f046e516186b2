"""Bytes counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from retrofit.inputs.model_memory import own_bytes, peak_bytes


def test_what_lives_at_one_time_counts_and_views_and_weights_do_not() -> None:
    weight = torch.randn(100, 100)

    def action() -> torch.Tensor:
        y = weight.t() @ weight  # 40,000 bytes
        z = (y.relu() + 1).view(-1)  # two more, of which the first is dropped
        del y
        return z.double()  # 80,000 bytes next to 40,000

    assert peak_bytes(action) == 120_000


def test_what_was_dropped_does_not_count() -> None:
    def action() -> None:
        for _ in range(5):
            torch.zeros(1000)

    assert peak_bytes(action) == 4000


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    model[1].weight = model[0].weight
    assert own_bytes(model) == 16 * 4 + 2 * 4 * 4 + 8  # mean, variance, and how many batches there were
