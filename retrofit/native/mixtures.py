"""The mixtures of experts in a model, how they route, and how the weights of one lie in another that computes the same.

Routing is read from a run; a layout of weights is found by shape and decided by what it computes.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.numerics.distances import distance
from retrofit.passbase.replaying import rewrites

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
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def installed_mixtures(model: nn.Module) -> list[Mixture]:
    """Return the mixtures that passes put into the model, in its order."""
    sites = {site.name for rewrite in rewrites(model) or () for site in rewrite.sites}
    found: list[Mixture] = []
    for path, module in model.named_modules(remove_duplicate=False):
        stacked = {parameter.shape[0] for parameter in module.parameters() if parameter.dim() == 3}
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
    """Return how many of how many things the module chooses for x."""
    with Choices() as choices:
        module(x)
    return choices.made


@torch.no_grad()
def response(module: nn.Module, x: Tensor) -> Tensor:
    """Return what the module returns for a stream: the first tensor of its shape."""
    out: Any = module(x)
    for one in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(one, Tensor) and one.shape == x.shape:
            return one
    raise TypeError("it returns no stream")


def in_float32(module: nn.Module, fill: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of the module in float32, its parameters as `fill` makes them of their names and shapes, its buffers zero."""
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
        name: SPREAD * torch.randn(weight.shape, generator=generator) / max(1, weight.shape[-1]) ** 0.5
        for name, weight in weights.items()
    }


def random_stream(width: int, seed: int = 1) -> Tensor:
    """(1, tokens, width)."""
    return torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(seed))


CLOSE = 1e-5  # of the largest output, in float32
MOST = 64  # combinations that are tried
Join = Callable[[list[Tensor]], Tensor]

JOINS: dict[str, Join] = {  # along the second dimension: the outputs of a matrix
    "joined": lambda parts: torch.cat(parts, 1),
    "interleaved": lambda parts: torch.stack(parts, 2).flatten(1, 2),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """One stacked weight as it is made of others: each whole or one of its halves, in order, joined, then perhaps transposed."""

    sources: tuple[tuple[str, int | None], ...]  # names, and which half; none: zeros
    join: str = "joined"
    transposed: bool = False

    def made_of(self, weights: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """Return the weight; zeros of that shape where it is made of none."""
        if not self.sources:
            return torch.zeros(shape)
        parts = [weights[name] if half is None else weights[name].chunk(2, 1)[half] for name, half in self.sources]
        whole = parts[0] if len(parts) == 1 else JOINS[self.join](parts)
        return (whole.transpose(1, 2) if self.transposed else whole).contiguous()


ZEROS = Layout(())


def layouts_for(shape: torch.Size, weights: Mapping[str, Tensor]) -> list[Layout]:
    """Return the layouts that give a weight of that shape."""
    experts = next(iter(weights.values())).shape[0]
    if len(shape) < 2 or shape[0] != experts:
        return [ZEROS]
    parts: list[tuple[str, int | None]] = [(name, None) for name in weights]
    parts += [(name, half) for name, weight in weights.items() for half in (0, 1) if weight.dim() > 1 and weight.shape[1] % 2 == 0]
    found: list[Layout] = []
    for sources in [(part,) for part in parts] + list(itertools.permutations(parts, 2)):
        halves = [(name, half) for name, half in sources]
        if len(sources) == 2 and {half is None for _, half in halves} == {True, False}:
            continue
        for join in JOINS if len(sources) == 2 else ("joined",):
            for transposed in (False, True):
                if shape_of(Layout(tuple(sources), join, transposed), weights) == shape:
                    found.append(Layout(tuple(sources), join, transposed))
    return found or [ZEROS]


def shape_of(layout: Layout, weights: Mapping[str, Tensor]) -> torch.Size | None:
    """Return the shape that a layout gives; None where its parts do not fit together."""
    with torch.device("meta"):
        hollow = {name: torch.empty(weight.shape) for name, weight in weights.items()}
    try:
        return layout.made_of(hollow, torch.Size()).shape
    except (RuntimeError, IndexError):
        return None


def combinations(wanted: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> Iterator[dict[str, Layout]]:
    """Ways to make all the wanted weights in which every weight there is takes part, each once."""
    options = [layouts_for(shape, weights) for shape in wanted.values()]
    for chosen in itertools.islice(itertools.product(*options), 4 * MOST):
        used = [part for layout in chosen for part in layout.sources]
        parts = {name: sorted((half for one, half in used if one == name), key=str) for name in weights}
        if all(halves in ([None], [0, 1]) for halves in parts.values()):  # whole, or both halves
            yield dict(zip(wanted, chosen, strict=True))


def equal_layout(source: nn.Module, target: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> tuple[dict[str, Layout], float]:
    """Return how the weights of `source` lie in `target` so that both compute the same, none if they never do; the least distance.

    `weights` are values at random for the source; the target's may be on the meta device.
    """
    expected = response(in_float32(source, lambda name, one: weights[name]), x)
    wanted = {name: parameter.shape for name, parameter in target.named_parameters()}
    nearest = float("inf")
    for layouts in itertools.islice(combinations(wanted, weights), MOST):
        made = {name: layout.made_of(weights, wanted[name]) for name, layout in layouts.items()}
        found = response(in_float32(target, lambda name, one, made=made: made[name]), x)  # type: ignore[misc]
        gap = distance(found, expected)
        if gap <= CLOSE:
            return layouts, gap
        nearest = min(nearest, gap)
    return {}, nearest
