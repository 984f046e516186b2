"""Where two runs of a model part ways: the first module, in the order of the calls, that hands on something else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from retrofit.checks.fingerprint import sample
from retrofit.runtime.probes import Inputs, distance, run
from retrofit.surgery.edit import Fate

Trail = dict[str, list[torch.Tensor]]  # module → what each of its calls handed on; modules in the order they first did
SAMPLE = 64


@contextlib.contextmanager
def recorded(model: nn.Module, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> Iterator[Trail]:
    """Within this context what every module with parameters of its own hands on is written down, as `keep` makes it."""
    trail: Trail = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                trail.setdefault(path, []).append(keep(value.detach()))

        return hook

    owners = [
        (path, module)
        for path, module in model.named_modules()
        if path and next(module.parameters(recurse=False), None) is not None
    ]
    handles = [module.register_forward_hook(note(path)) for path, module in owners]
    try:
        yield trail
    finally:
        for handle in handles:
            handle.remove()


def sampled_trail(model: nn.Module, inputs: Inputs) -> Trail:
    """A few elements of everything that modules hand on."""
    with recorded(model, lambda value: sample(value, SAMPLE)) as trail:
        run(model, inputs)
    return trail


def at(trail: Trail, positions: torch.Tensor) -> Trail:
    """What was handed on at some positions, (batch, length), by the modules that work on positions."""
    where = positions.cpu()
    found = {path: [value[where] for value in values if value.shape[:2] == where.shape] for path, values in trail.items()}
    return {path: values for path, values in found.items() if values}


@dataclasses.dataclass(frozen=True)
class Departure:
    """The first module that hands on something else, and the last before it that does not."""

    path: str  # "" where every module hands on what it did
    what: str
    before: str

    def said(self, placed: Callable[[str], str]) -> str:
        """The departure in words; `placed` adds to a module's name where it lies."""
        if not self.path:
            return f"every module hands on the same, {placed(self.before)} the last; the difference arises after or beside them"
        found = f"{placed(self.path)} is the first module that {self.what}"
        return f"{found}; {placed(self.before)} before it does not" if self.before else found


def first_departure(ours: Trail, theirs: Trail, tolerance: float, names: Mapping[str, str] | None = None) -> Departure:
    """The first module of `theirs` that hands on something else in `ours`.

    `names` are the modules' names in `ours`. One that is called oftener than before departs when no call gives what it gave.
    """
    before = ""
    for path, values in theirs.items():
        name = path if names is None else names.get(path, "")
        if not name:
            continue
        gap = gap_between(ours.get(name, []), values)
        if gap > tolerance:
            return Departure(name, f"hands on something else ({gap:.1e})" if name in ours else "is not called", before)
        before = name
    return Departure("", "", before)


def gap_between(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """How far apart the calls of a module are: one by one where there are as many, else from the nearest."""
    if len(ours) == len(theirs):
        return max(map(distance, ours, theirs), default=0.0)
    return max((min((distance(one, other) for one in ours), default=float("inf")) for other in theirs), default=0.0)


def still_whole(fates: Mapping[str, Fate], paths: Iterable[str]) -> dict[str, str]:
    """The dense modules whose own parameters are all kept or moved, by their path then: their path now."""
    owned: dict[str, list[Fate]] = {path: [] for path in paths}
    for name, fate in fates.items():
        owned.get(name.rpartition(".")[0], []).append(fate)
    whole = {path: own for path, own in owned.items() if own and all(fate.kind in ("kept", "moved") for fate in own)}
    return {path: own[0].name.rpartition(".")[0] for path, own in whole.items()}


def departure_from_dense(model: nn.Module, inputs: Inputs, dense: Trail, fates: Mapping[str, Fate], tolerance: float) -> Departure:
    """Where a rewritten model first computes something else than the dense one did."""
    return first_departure(sampled_trail(model, inputs), dense, tolerance, still_whole(fates, dense))
