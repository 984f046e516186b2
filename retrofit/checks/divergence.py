"""The divergence of two runs of a model: recorded activations, and the first module, in call order, whose output differs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from retrofit.checks.report import Finding, failed, passed, skipped
from retrofit.checks.subject import Context
from retrofit.inputs.module_calls import first_tensor, watched
from retrofit.inputs.probes import Inputs, run
from retrofit.numerics.agreement import Comparison
from retrofit.numerics.distances import distance
from retrofit.surgery import Fate


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first module whose output differs, and the last one before it whose output does not."""

    path: str  # "" if all outputs agree
    what: str
    before: str

    def describe(self, place: Callable[[str], str]) -> str:
        """Return the divergence as text; `place` adds the site to a module's name."""
        if not self.path and not self.before:
            return "no module of the dense model can be matched, so the difference cannot be located"
        if not self.path:
            return f"the outputs of all modules agree, up to {place(self.before)}; the difference arises after or between them"
        found = f"{place(self.path)} is the first module that {self.what}"
        return f"{found}; {place(self.before)} before it does not" if self.before else found


def first_divergence(now: Activations, before: Activations, tolerance: float, names: Mapping[str, str] | None = None) -> Divergence:
    """Return the first module of `before` whose output differs in `now`.

    `names` are the modules' names in `now`. A module with more calls than before diverges if no call returns the earlier output.
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
    """Return the distance between two lists of outputs: in pairs if there are as many, else from the nearest."""
    if len(now) == len(before):
        return max(map(distance, now, before), default=0.0)
    return max((min((distance(value, other) for value in now), default=float("inf")) for other in before), default=0.0)


def unchanged_modules(fates: Mapping[str, Fate], paths: Iterable[str]) -> dict[str, str]:
    """Return the dense modules whose own parameters are all kept or moved: their path in the dense model → their path now."""
    owned: dict[str, list[Fate]] = {path: [] for path in paths}
    for name, fate in fates.items():
        owned.get(name.rpartition(".")[0], []).append(fate)
    unchanged = {path: own for path, own in owned.items() if own and all(fate.kind in ("kept", "moved") for fate in own)}
    return {path: own[0].name.rpartition(".")[0] for path, own in unchanged.items()}


# ── Activations ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


Activations = dict[str, list[torch.Tensor]]  # module → outputs of its calls; modules in the order of their first call


@contextlib.contextmanager
def record_activations(
    model: nn.Module, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu, also: Collection[str] = ()
) -> Iterator[Activations]:
    """Record the output of every module with parameters of its own within this context, reduced by `keep`.

    Modules at the paths in `also` are recorded too. A nested tensor (torch's encoder makes one of a padded input) is recorded with
    zeros in place of its padding.
    """
    activations: Activations = {}

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = first_tensor(output)
        if value is not None:
            dense = value.to_padded_tensor(0.0) if value.is_nested else value
            activations.setdefault(path, []).append(keep(dense.detach()))

    owners = {
        path: module
        for path, module in model.named_modules()
        if path and (path in also or next(module.parameters(recurse=False), None) is not None)
    }
    with watched(owners, after=record):
        yield activations


def activations_of(model: nn.Module, inputs: Inputs) -> Activations:
    """Return the activations of a forward with these inputs."""
    with record_activations(model) as activations:
        run(model, inputs)
    return activations


def at_positions(activations: Activations, positions: torch.Tensor) -> Activations:
    """Return the activations at a mask of positions, (batch, length), of the modules whose outputs have positions."""
    mask = positions.cpu()
    found = {path: [value[mask] for value in values if value.shape[:2] == mask.shape] for path, values in activations.items()}
    return {path: values for path, values in found.items() if values}


# ── Two ways to run a model ──────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_comparison(
    now: Comparison, before: Comparison | None, context: Context, locate: Callable[[float], Divergence]
) -> Finding:
    """Judge whether the two ways agree. If the dense model's do not, an exact rewrite has to reproduce its outputs; others are
    excused.

    `locate` returns the module where they diverge by more than a limit; it is called in the arithmetic that decided.
    """
    if now.agrees:
        return passed(now.measured)
    if before is None or before.agrees:
        with context.subject.arithmetic.computing(now.in_float64):
            return failed(now.measured, locate(now.limit).describe(context.place))
    excuse = f"the dense model does not agree with itself there ({before.measured})"
    if not context.exact:
        return skipped(excuse, now.measured)
    assert now.outputs is not None and before.outputs is not None
    gap, limit = distance(now.outputs, before.outputs), max(now.limit, before.limit)
    if gap <= limit:
        return passed(f"{gap:.1e} from the dense model", excuse)
    return failed(f"{gap:.1e} from the dense model (limit {limit:.0e})", f"{excuse}, but this one gives something else again")
