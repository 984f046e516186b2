"""The products of a mixture of experts: grouped by one kernel, in a loop over the experts, and in two ways for few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import moe as of_transformers

from on_cuda.parts import Part, attempt
from on_cuda.timing import in_turns
from retrofit.anatomy.feed_forwards import Port
from retrofit.passes.shared_moe.mixture_of_experts import ExpertMatrices, MixtureOfExperts

SIZES = ((2048, 8192, 4, 1), (2048, 8192, 4, 2), (2048, 1024, 64, 4))  # d, d_ff of an expert, E, K
TOKENS = (1, 8, 64, 512, 4096)
GATHERED, EVERY = 8, 512  # tokens up to which it is tried to copy experts for each token, to run every expert on every token


def parts(device: str, rehearsal: bool) -> list[Part]:
    return [Part("mixtures", 8, lambda: mixtures(device, rehearsal))]


def mixtures(device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds of a forward in each way, by sizes and tokens; and of forward and backward, grouped and in a loop."""
    found: dict[str, Any] = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for d, units, experts, k in ((32, 64, 4, 2),) if rehearsal else SIZES:
        moe = mixture(d, units, experts, k, device, dtype)
        for tokens in (1, 16) if rehearsal else TOKENS:
            x = torch.randn(tokens, d, device=device, dtype=dtype)
            row = attempt(lambda moe=moe, x=x: {"forward": in_turns(forwards(moe, x), device)})
            if tokens == max(TOKENS) or rehearsal:
                row |= attempt(lambda moe=moe, x=x: {"step": in_turns(steps(moe, x), device)})
            found[f"d={d} d_ff={units} E={experts} K={k} tokens={tokens}"] = row
    return found


def mixture(d: int, units: int, experts: int, k: int, device: str, dtype: torch.dtype) -> MixtureOfExperts:
    """Gated experts with random weights."""

    def matrices(rows: int, columns: int) -> ExpertMatrices:
        return ExpertMatrices(nn.Parameter(0.02 * torch.randn(experts, rows, columns, device=device, dtype=dtype)), None)

    into = {"gate": matrices(units, d), "up": matrices(units, d)}
    return MixtureOfExperts(into, (Port(0, 0, 1), Port(1, 0, 1)), matrices(d, units), k=k).eval()


def hidden(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def forwards(moe: MixtureOfExperts, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to compute the mixture; the dense feed-forward of one expert's size beside them."""

    def by(compute: Callable[..., Tensor]) -> Callable[[], Any]:
        def run() -> None:
            with torch.no_grad():
                compute(x, *moe.route(x), hidden)

        return run

    found = {"one expert": lambda: dense(moe, x), "grouped": by(moe.combine), "loop": looped(by(moe.combine))}
    if len(x) <= GATHERED:
        found["copied"] = by(moe.combine_gathered)
    if len(x) <= EVERY:
        found["every"] = by(moe.combine_every)
    return found


def steps(moe: MixtureOfExperts, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Forward and backward."""

    def step() -> None:
        moe.zero_grad(set_to_none=True)
        moe(x, hidden).float().square().mean().backward()

    return {"grouped": step, "loop": looped(step)}


@torch.no_grad()
def dense(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    gate, up = (F.linear(x, moe.get_submodule(name).weight[0]) for name in moe.into)  # type: ignore[index, arg-type]
    return F.linear(hidden(gate, up), moe.down.weight[0])


def looped(action: Callable[[], Any]) -> Callable[[], Any]:
    """The action with a loop over the experts instead of the grouped kernel."""

    def run() -> None:
        kernel = of_transformers._grouped_mm
        of_transformers._grouped_mm = torch.ops.transformers.grouped_mm_fallback
        try:
            action()
        finally:
            of_transformers._grouped_mm = kernel

    return run
