"""Models rewritten with shared-moe, and mixtures of experts by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.anatomy.feed_forwards import Port
from retrofit.passes import SharedMoE
from retrofit.passes.shared_moe.mixture_of_experts import ExpertMatrices, MixtureOfExperts, MoEBlock
from support import zoo


def build(identity: str, spec: SharedMoE | None = None, **config: Any) -> tuple[Any, dict[str, Tensor]]:
    entry = zoo.entry(identity)
    model = zoo.build(entry, **config)
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    inputs = zoo.inputs(entry, model)
    torch.manual_seed(0)
    if spec is not None:
        retrofit.apply(model, spec, verify=False)
    return model, inputs


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return zoo.logits(model.eval()(**inputs)).clone()


def blocks(model: nn.Module) -> dict[str, MoEBlock]:
    """The blocks that replaced feed-forwards, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoEBlock)}


def mixtures(model: nn.Module) -> list[nn.Module]:
    """One entry a layer."""
    return [block.moe for block in blocks(model).values()]


D = 8


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def make(
    experts: int = 4,
    k: int = 2,
    *,
    units: int = 12,
    gated: str = "",
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    slices: int | None = None,
    **how: Any,
) -> tuple[MixtureOfExperts, Callable[..., Tensor]]:
    """A mixture with random weights, and its hidden function: plain, or gated by another matrix or within one.

    With slices each has so many experts of `units` units, and k is 1.
    """
    generator = torch.Generator().manual_seed(7)
    if slices is not None:
        experts, k, how = experts * slices, 1, {**how, "slices": slices, "order": torch.arange(units * slices)}

    def matrices(out: int, width: int) -> ExpertMatrices:
        weight = torch.randn(experts, out, width, generator=generator) / math.sqrt(width)
        return ExpertMatrices(
            nn.Parameter(weight.to(dtype)), nn.Parameter(torch.randn(experts, out, generator=generator).to(dtype)) if bias else None
        )

    forms = {
        "": ({"up": units}, [Port(0, 0, 1)]),
        "two": ({"gate": units, "up": units}, [Port(0, 0, 1), Port(1, 0, 1)]),
        "halves": ({"gate_up": 2 * units}, [Port(0, 0, 1), Port(0, units, 1)]),
        "turns": ({"gate_up": 2 * units}, [Port(0, 0, 2), Port(0, 1, 2)]),
    }
    sizes, ports = forms[gated]
    moe = MixtureOfExperts({name: matrices(out, D) for name, out in sizes.items()}, ports, matrices(D, units), k=k, **how)
    with torch.no_grad():
        moe.router.weight.normal_(generator=generator)
    return moe, swiglu if gated else F.gelu
