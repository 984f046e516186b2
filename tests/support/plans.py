"""Plans of a tiny model, for a few candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import retrofit
from retrofit.planning.model_plan import ModelPlan

QKV, FFN, HEAD = "sparse-qkv(variant=mult, output=keep)", "sparse-ffn(sparsity=8, active=4)", "sparse-loss(modules=4)"
LENGTH = 24
TARGETS = ["memory 0.98x", "memory 0.74x"]


def windows(count: int = 40, size: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(3, size, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def planned(model: nn.Module, targets: Any, **options: Any) -> ModelPlan:
    return retrofit.plan(model, windows(), targets, **{"passes": [QKV, HEAD], "seconds": 0.02, **options})
