"""Thresholds from calibration text, and the level of each mask.

The threshold of level p is the p-quantile of |x − m| over all entries of a sample of tokens. The overall level is weighted by
bytes: Σ_i p_i f_i / Σ_i f_i, where f_i is the size of the weight behind mask i.

`uniform` gives all masks the same level. `greedy` is TEAL's algorithm: it works layer by layer, with the same level for each layer.
At each step the level of one of a layer's masks rises by `STEP`: the one for which the squared error of the layer's output grows
least for the bytes saved,

    min over i of (E(p + STEP e_i) − E(p)) / (STEP f_i)          E(p) = Σ_t w_t ‖y_t − ŷ_t(p)‖² / Σ_t w_t ‖y_t‖²

with y of the dense layer for the same arguments, and the weights of `weighted_error`. The cost of a mask is measured again only
when it comes first by its last measured cost (lazy greedy).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.passes.activation_sparsity.masked_products import ActivationMask
from retrofit.passes.activation_sparsity.sites import MaskedWeight
from retrofit.sdk.data import RecordedCall, evaluation_mode, evenly_spaced, float_tensors, set_aside, weighted_error

STEP = 0.1  # by which a mask's level rises
HIGHEST = 0.9  # of one mask, unless the overall level is higher
ROWS = 512  # tokens in the sample of a quantile
VALUES = 1 << 18  # entries in the sample of a quantile
NEAR = 0.001  # tolerance of a threshold's level
HALF = 0.5  # level of all masks of a layer whose error identifies it
KEPT = 512  # layers whose steps are kept

Levels = Mapping[str, float]  # by the path of a mask


class RowSample:
    """Collects evenly spaced rows of its inputs: between `most` and twice as many. A watcher for `observe`.

    Rows of zeros are left out: an expert may get one for each token that is not sent to it, and there is nothing to mask.
    """

    def __init__(self, most: int = ROWS) -> None:
        self.most, self.every, self.skipped, self.count = most, 1, 0, 0
        self.parts: list[Tensor] = []

    def __call__(self, x: Tensor) -> None:
        x = x[x.any(-1)]
        part = x[self.skipped :: self.every]
        self.skipped = (self.skipped - len(x)) % self.every
        if not len(part):
            return
        self.parts.append(set_aside(part.clone()))
        self.count += len(part)
        while self.count > 2 * self.most:
            rows = torch.cat(self.parts)
            self.skipped += self.every * (self.count % 2)
            self.every *= 2
            self.parts = [set_aside(rows[::2].clone())]
            self.count = len(self.parts[0])

    def rows(self) -> Tensor | None:
        """Return the rows, (tokens, d); None if there were none."""
        return evenly_spaced(torch.cat(self.parts), self.most) if self.parts else None


@dataclasses.dataclass(frozen=True)
class Magnitudes:
    """A sample of |x − m|, in ascending order, and m."""

    ordered: Tensor
    centre: Tensor | None

    @staticmethod
    def of(rows: Tensor, centred: bool) -> Magnitudes:
        rows = rows.float()
        centre = rows.median(0).values if centred else None
        values = (rows if centre is None else rows - centre).abs().flatten()
        every = -(-len(values) // VALUES)
        while every > 1 and rows.shape[-1] % every == 0:  # otherwise the sample would contain only some features
            every += 1
        return Magnitudes(values[::every].sort().values, centre)

    def threshold(self, level: float) -> float:
        """Return the quantile: within `NEAR`, the middle of the widest gap between two entries.

        So no entry of the sample equals the threshold, where rounding would decide; the inputs of a first layer take few values.
        """
        place, count = round(level * len(self.ordered)), len(self.ordered)
        if not place:
            return 0.0
        near, value = int(NEAR * count), self.ordered[min(place, count - 1)]
        first = min(int(torch.searchsorted(self.ordered, value)), place - near)
        last = max(int(torch.searchsorted(self.ordered, value, right=True)), place + near)
        around = self.ordered[max(0, first - 1) : last + 1]
        gap = int(around.diff().argmax()) if len(around) > 1 else 0
        return float(around[gap : gap + 2].mean())


@dataclasses.dataclass(frozen=True)
class Masks:
    """The installed masks, by path, and samples of their inputs; masks that no token reached have no sample."""

    modules: Mapping[str, ActivationMask]
    weights: Mapping[str, MaskedWeight]
    magnitudes: Mapping[str, Magnitudes]

    def set_centres(self) -> None:
        """Set m of every mask."""
        for path, found in self.magnitudes.items():
            if found.centre is not None:
                self.modules[path].get_buffer("centre").copy_(found.centre)

    def set_levels(self, levels: Levels) -> None:
        """Set the thresholds of these masks."""
        for path, level in levels.items():
            self.modules[path].threshold.fill_(self.magnitudes[path].threshold(level))

    def hash(self, paths: Iterable[str]) -> str:
        """Return a hash of the samples of these masks."""
        digest = hashlib.sha256()
        for path in paths:
            digest.update(self.magnitudes[path].ordered.cpu().numpy().tobytes())
        return digest.hexdigest()

    def size(self, paths: Iterable[str]) -> int:
        """Return the size of the weights behind these masks."""
        return sum(self.weights[path].elements for path in paths)

    def share(self, levels: Levels) -> float:
        """Return the overall level."""
        return sum(level * self.weights[path].elements for path, level in levels.items()) / max(1, self.size(levels))


@dataclasses.dataclass
class Steps:
    """The levels of the masks of one layer at the steps taken so far, and what the next one depends on."""

    levels: dict[str, float]
    taken: list[tuple[float, dict[str, float]]]  # the level of the layer, and the levels of its masks
    waiting: list[tuple[float, int, str]]  # masks by the cost of a step, as last measured
    reached: float = 0.0  # the error at the last step


@functools.lru_cache(KEPT)
def steps_of(paths: tuple[str, ...], *facts: Any) -> Steps:
    """Return the steps in a layer with masks at these paths: those taken before, if all facts are the same.

    The greedy levels do not depend on the overall level: several levels, and a recipe after a plan, take the steps once.
    """
    levels = dict.fromkeys(paths, 0.0)
    return Steps(levels, [(0.0, dict(levels))], [(float("-inf"), number, path) for number, path in enumerate(paths)])


class LayerPath:
    """The levels of the masks of one layer as the layer's level rises; further steps are computed on demand."""

    def __init__(self, masks: Masks, paths: Sequence[str], error: Callable[[], float], highest: float = HIGHEST) -> None:
        self.masks, self.error, self.highest = masks, error, max(highest, HIGHEST)
        sizes = tuple(masks.weights[path].elements for path in paths)
        masks.set_levels(dict.fromkeys(paths, HALF))
        self.steps = steps_of(tuple(paths), sizes, self.highest, masks.hash(paths), error())

    def at(self, level: float) -> dict[str, float]:
        """Return the levels of the masks at a level of the layer, interpolated between steps."""
        taken = self.steps.taken
        while taken[-1][0] < level and self.steps.waiting:
            self.rise()
        (low, before), (high, after) = next((pair for pair in itertools.pairwise(taken) if pair[1][0] >= level), (taken[-1],) * 2)
        part = (level - low) / (high - low) if high > low else 1.0
        return {path: before[path] + part * (after[path] - before[path]) for path in before}

    def rise(self) -> None:
        """Take the next step; if it is interrupted, it was not begun."""
        steps, waiting = self.steps, list(self.steps.waiting)
        fresh: dict[str, float] = {}  # errors measured in this step
        while True:
            _, number, path = heapq.heappop(waiting)
            higher = min(steps.levels[path] + STEP, self.highest)
            if path in fresh:
                break
            self.masks.set_levels({**steps.levels, path: higher})
            fresh[path] = self.error()
            saved = (higher - steps.levels[path]) * self.masks.weights[path].elements
            heapq.heappush(waiting, ((fresh[path] - steps.reached) / saved, number, path))
        if higher < self.highest:
            heapq.heappush(waiting, (float("-inf"), number, path))
        steps.levels[path], steps.reached, steps.waiting = higher, fresh[path], waiting
        steps.taken.append((self.masks.share(steps.levels), dict(steps.levels)))


class Allocation:
    """Computes the level of every mask from the overall level."""

    def __init__(self, masks: Masks, layers: Mapping[str, LayerPath]) -> None:
        self.masks, self.layers = masks, layers
        apart = {path for layer in layers.values() for path in layer.steps.levels}
        self.uniform = [path for path in masks.magnitudes if path not in apart]

    def at(self, level: float) -> dict[str, float]:
        """Return the levels of all masks at an overall level, which is that of each layer and of each mask outside of them."""
        levels = dict.fromkeys(self.uniform, level)
        for layer in self.layers.values():
            levels.update(layer.at(level))
        return levels


@torch.no_grad()
def layer_error(module: nn.Module, calls: Sequence[RecordedCall]) -> float:
    """Return the squared error of a layer's outputs for the arguments of these calls, relative to the recorded outputs."""
    with evaluation_mode(module):
        pairs = [(call.real(float_tensors(call.repeat(module))[0]), call.real(float_tensors(call.output)[0])) for call in calls]
    return float(weighted_error(torch.cat([found for found, _ in pairs]), torch.cat([dense for _, dense in pairs])) ** 2)
