"""Where two runs of a model diverge: the first module, in the order of the calls, that returns something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch

from retrofit.checks.activations import Activations
from retrofit.numerics.distances import distance
from retrofit.surgery.edit import Fate


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first module that returns something else, and the last before it that does not."""

    path: str  # "" where every module returns what it did
    what: str
    before: str

    def describe(self, place: Callable[[str], str]) -> str:
        """The divergence in words; `place` adds to a module's name the site it lies in."""
        if not self.path and not self.before:
            return "no module of the dense model is found again, so none says where the difference arises"
        if not self.path:
            return f"every module returns the same, {place(self.before)} the last; the difference arises after or between them"
        found = f"{place(self.path)} is the first module that {self.what}"
        return f"{found}; {place(self.before)} before it does not" if self.before else found


def first_divergence(now: Activations, before: Activations, tolerance: float, names: Mapping[str, str] | None = None) -> Divergence:
    """The first module of `before` that returns something else in `now`.

    `names` are the modules' names in `now`. A module that is called more often than before diverges when no call returns what it
    did.
    """
    last = ""
    for path, values in before.items():
        name = path if names is None else names.get(path, "")
        if not name:
            continue
        gap = gap_between(now.get(name, []), values)
        if gap > tolerance:
            return Divergence(name, f"returns something else ({gap:.1e})" if name in now else "is not called", last)
        last = name
    return Divergence("", "", last)


def gap_between(now: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    """How far apart the calls of a module are: one by one where there are as many, else from the nearest."""
    if len(now) == len(before):
        return max(map(distance, now, before), default=0.0)
    return max((min((distance(one, other) for one in now), default=float("inf")) for other in before), default=0.0)


def unchanged_modules(fates: Mapping[str, Fate], paths: Iterable[str]) -> dict[str, str]:
    """The dense modules whose own parameters are all kept or moved: their path in the dense model → their path now."""
    owned: dict[str, list[Fate]] = {path: [] for path in paths}
    for name, fate in fates.items():
        owned.get(name.rpartition(".")[0], []).append(fate)
    whole = {path: own for path, own in owned.items() if own and all(fate.kind in ("kept", "moved") for fate in own)}
    return {path: own[0].name.rpartition(".")[0] for path, own in whole.items()}
