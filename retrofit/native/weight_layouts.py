"""How the weights of one mixture lie in another that computes the same: found by shape, decided by what it computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from retrofit.native.mixtures import in_float32, response
from retrofit.runtime.probes import distance

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
        """The weight; zeros of that shape where it is made of none."""
        if not self.sources:
            return torch.zeros(shape)
        parts = [weights[name] if half is None else weights[name].chunk(2, 1)[half] for name, half in self.sources]
        whole = parts[0] if len(parts) == 1 else JOINS[self.join](parts)
        return (whole.transpose(1, 2) if self.transposed else whole).contiguous()


ZEROS = Layout(())


def layouts_for(shape: torch.Size, weights: Mapping[str, Tensor]) -> list[Layout]:
    """The layouts that give a weight of that shape."""
    experts = next(iter(weights.values())).shape[0]
    if len(shape) < 2 or shape[0] != experts:
        return [ZEROS]
    parts: list[tuple[str, int | None]] = [(name, None) for name in weights]
    parts += [(name, half) for name, one in weights.items() for half in (0, 1) if one.dim() > 1 and one.shape[1] % 2 == 0]
    found: list[Layout] = []
    for sources in [(one,) for one in parts] + list(itertools.permutations(parts, 2)):
        halves = [(name, half) for name, half in sources]
        if len(sources) == 2 and {half is None for _, half in halves} == {True, False}:
            continue
        for join in JOINS if len(sources) == 2 else ("joined",):
            for transposed in (False, True):
                if shape_of(Layout(tuple(sources), join, transposed), weights) == shape:
                    found.append(Layout(tuple(sources), join, transposed))
    return found or [ZEROS]


def shape_of(layout: Layout, weights: Mapping[str, Tensor]) -> torch.Size | None:
    """The shape that a layout gives; None where its parts do not fit together."""
    with torch.device("meta"):
        hollow = {name: torch.empty(one.shape) for name, one in weights.items()}
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
    """How the weights of `source` lie in `target`, so that both compute the same; none where they never do, and the least distance.

    `weights` are values at random for the source; the target's may be on the meta device.
    """
    expected = response(in_float32(source, lambda name, one: weights[name]), x)
    wanted = {name: one.shape for name, one in target.named_parameters()}
    nearest = float("inf")
    for layouts in itertools.islice(combinations(wanted, weights), MOST):
        made = {name: layout.made_of(weights, wanted[name]) for name, layout in layouts.items()}
        found = response(in_float32(target, lambda name, one, made=made: made[name]), x)  # type: ignore[misc]
        gap = distance(found, expected)
        if gap <= CLOSE:
            return layouts, gap
        nearest = min(nearest, gap)
    return {}, nearest
