"""The mixtures of experts in a model, and how they route: what a run of one shows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.pipeline.replaying import rewrites

TOKENS = 64
SPREAD = 2.0  # of the logits of a router at random: large enough that gates differ


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A module that maps a stream to one of the same width by experts, whose matrices are stacked along their first dimension."""

    path: str
    module: nn.Module
    experts: int

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its parameters, by their names in the module."""
        return {name: one.detach() for name, one in self.module.named_parameters()}


def installed_mixtures(model: nn.Module) -> list[Mixture]:
    """The mixtures that passes put into the model, in its order."""
    sites = {site.name for one in rewrites(model) or () for site in one.sites}
    found: list[Mixture] = []
    for path, module in model.named_modules(remove_duplicate=False):
        stacked = {one.shape[0] for one in module.parameters() if one.dim() == 3}
        if path in sites and len(stacked) == 1 and not any(path.startswith(f"{one.path}.") for one in found):
            found.append(Mixture(path, module, stacked.pop()))
    return found


class Choices(TorchDispatchMode):
    """Records of how many things the greatest are chosen, and how many: (k, of)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.topk.default:
            self.made.append((int(args[1]), int(args[0].shape[-1])))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def choices_of(module: nn.Module, x: Tensor) -> list[tuple[int, int]]:
    """How many of how many things the module chooses for x."""
    with Choices() as choices:
        module(x)
    return choices.made


@torch.no_grad()
def response(module: nn.Module, x: Tensor) -> Tensor:
    """What the module returns for a stream: the first tensor of its shape."""
    out: Any = module(x)
    for one in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(one, Tensor) and one.shape == x.shape:
            return one
    raise TypeError("it returns no stream")


def in_float32(module: nn.Module, fill: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of the module in float32, its parameters as `fill` makes them of their names and shapes, its buffers zero."""
    memo = {id(one): nn.Parameter(torch.empty_like(one, device="meta")) for one in module.parameters()}
    made = copy.deepcopy(module, memo).to_empty(device="cpu").float().eval()
    with torch.no_grad():
        for buffer in made.buffers():
            buffer.zero_()
        for name, parameter in made.named_parameters():
            parameter.copy_(fill(name, parameter))
    return made


def random_weights(weights: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Values at random in which no two of a mixture's parts are equal."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: SPREAD * torch.randn(one.shape, generator=generator) / max(1, one.shape[-1]) ** 0.5 for name, one in weights.items()
    }


def random_stream(width: int, seed: int = 1) -> Tensor:
    """(1, tokens, width)."""
    return torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(seed))
